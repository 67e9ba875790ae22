"""One set of parameters that is trained: scoring, updating, and its copies."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray

from agentgym.baselines.core.actor import Actor
from agentgym.baselines.core.bank import Bank
from agentgym.baselines.core.batch import Batch, make_batch, normalisers, read_tokens
from agentgym.baselines.core.config import TrainConfig
from agentgym.baselines.core.distributed import (
    ShardedBank,
    clip_gradients,
    gathered,
    is_sharded,
    load_module_state,
    load_optimiser_state,
    module_state,
    optimiser_state,
    reshard,
    shares,
    units_of,
    whole_model,
)
from agentgym.baselines.core.losses import LossTerm, k3
from agentgym.baselines.core.method import Copy
from agentgym.baselines.core.models import trainable
from agentgym.baselines.core.sample import Sample
from agentgym.errors import AgentGymError, UsageError
from agentgym.policies._kept import keeps_cache

MEASURED = 16  # samples on which the divergence of an update is measured
SKIPS = 20  # steps in a row that half precision may lose to a loss scale that is too large


class Diverged(AgentGymError):
    """Training has gone wrong beyond repair; the state before the bad step is kept."""


class Learner:
    """A model with its optimiser.

    Args:
        config: of the run.
        lm: causal language model; with adapters, the one named `adapter` is trained.
        tokenizer: its tokenizer.
        accelerator: of the run.
        copies: name -> rule.
        value_head: whether a method needs one.
        folder: for copies on disk.
        adapter: name of the adapter that is this learner's, "" if the whole model is.
    """

    def __init__(
        self,
        config: TrainConfig,
        lm: Any,
        tokenizer: Any,
        accelerator: Accelerator,
        *,
        copies: dict[str, Copy],
        value_head: bool,
        folder: Path,
        adapter: str = "",
    ) -> None:
        self.config = config
        self.lm = lm
        self.tokenizer = tokenizer
        self.adapter = adapter
        self._accelerator = accelerator
        if config.packing and not keeps_cache(lm):
            raise UsageError("packing needs a model whose layers all see everything before: set packing = false")
        self.activate()
        actor = Actor(lm, value_head=value_head, temperature=config.temperature)
        if config.gradient_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if config.lora.rank:
                lm.enable_input_require_grads()
        own = trainable(actor)
        if adapter:
            own = {name: value for name, value in own.items() if f".{adapter}." in name or "value_head" in name}
        options = config.optimiser
        head = [value for name, value in own.items() if name.startswith("value_head")]
        body = [value for name, value in own.items() if not name.startswith("value_head")]
        groups = [{"params": body, "lr": options.lr}, {"params": head, "lr": options.value_lr}]
        optimiser = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            eps=options.epsilon,
        )
        self.actor, self.optimiser = accelerator.prepare(actor, optimiser)
        self._rates = [group["lr"] for group in self.optimiser.param_groups]
        plain = accelerator.unwrap_model(self.actor)
        self.parameters = {
            name: value
            for name, value in trainable(plain).items()
            if not adapter or f".{adapter}." in name or name.startswith("value_head")
        }
        self.bank: Bank
        if accelerator.is_fsdp2:
            self.bank = ShardedBank(self.parameters, copies, folder, self.actor)
        elif copies and is_sharded(accelerator):
            raise UsageError("DeepSpeed ZeRO-3 keeps no copies of the policy: use FSDP2 or DDP, or no KL term")
        else:
            self.bank = Bank(self.parameters, copies, folder)
        self.steps = 0
        self._skipped = 0
        self.scored_tokens = 0
        self.trained_tokens = 0
        self.padding = [0.0, 0.0]  # padding and all tokens of this iteration's forwards
        if is_sharded(accelerator):  # the root must have run before its layers do on their own, as in sampling
            samples = [_bare(np.zeros(2, np.int32)) for _ in range(accelerator.num_processes)]
            self._score(samples, lambda batch: self.actor(batch, entropy=False).logp)
            self.scored_tokens = 0

    @property
    def plain(self) -> Actor:
        """The actor without wrappers."""
        actor: Actor = self._accelerator.unwrap_model(self.actor)
        return actor

    def sampling(self) -> contextlib.AbstractContextManager[None]:
        """Holds all weights in this process while it samples; every process must come here."""
        return gathered(self.actor, self._accelerator)

    def whole_model(self) -> Any:
        """What writes the model, see `agentgym.baselines.core.distributed.whole_model`; every process must ask."""
        return whole_model(self.actor, self._accelerator)

    def activate(self) -> None:
        """Makes this learner's adapter the one in use."""
        if self.adapter:
            self.lm.set_adapter(self.adapter)

    def logp(
        self, samples: Sequence[Sample], copy: str, prefix: Sequence[Sequence[int]] | None = None
    ) -> list[NDArray[np.float32]]:
        """Log-probabilities of the samples' tokens, see `agentgym.baselines.core.method.Services`."""
        whole = list(samples) if prefix is None else [prefixed(s, p) for s, p in zip(samples, prefix, strict=True)]
        with contextlib.nullcontext() if copy == "policy" else self.bank.use(copy):
            scored = self._score(whole, lambda batch: self.actor(batch, entropy=False, keep_logits=False).logp)
        return [values[len(values) - len(sample) :] for values, sample in zip(scored, samples, strict=True)]

    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Values before the samples' tokens."""
        if self.plain.value_head is None:
            raise UsageError("this method asks for values but has no value head: set `value_head = True` in its class")
        return self._score(samples, lambda batch: self.actor(batch, entropy=False, keep_logits=False).value)

    def _score(self, samples: Sequence[Sample], read: Callable[[Batch], Any]) -> list[NDArray[np.float32]]:
        self.activate()
        self.actor.eval()
        accelerator = self._accelerator
        place = {id(sample): index for index, sample in enumerate(samples)}

        def precisely(batch: Batch) -> Any:
            with accelerator.autocast():
                return read(batch)

        scored = read_tokens(self._share(samples), precisely, device=accelerator.device, packed=self.config.packing)
        found = [(place[key], values) for key, values in scored.items() if key in place]  # without idle repeats
        self.scored_tokens += sum(map(len, samples))
        reshard(self.actor)
        if accelerator.num_processes > 1:
            found = gather_object(found)
        by_place = dict(found)
        return [by_place[index] for index in range(len(samples))]

    def update(
        self,
        samples: Sequence[Sample],
        terms: Sequence[LossTerm],
        *,
        epochs: int,
        rng: np.random.Generator,
        progress: float,
    ) -> dict[str, float]:
        """One iteration's optimiser steps.

        Args:
            samples: what to train on.
            terms: of the loss.
            epochs: passes.
            rng: orders the mini-batches.
            progress: share of the run that is done, for the learning rate.

        Returns:
            Metrics: loss of each term, what the terms reported, gradient norm, learning rate, padding share.

        Raises:
            Diverged: if loss or gradient is not finite or above its limit; the parameters are those before that step.
        """
        for sample in samples:
            sample.check()
        self.activate()
        self.actor.train()
        self.padding = [0.0, 0.0]
        totals = _Totals()
        for _ in range(epochs):
            for chosen in minibatches(samples, self.config.minibatch, rng):
                self._step(chosen, terms, progress, totals)
        if not all(bool(torch.isfinite(value).all()) for value in self.parameters.values()):
            raise Diverged("the weights are not finite after the update; lower optimiser.lr")
        if self.config.guard.max_kl and samples:
            self._measure(samples, totals)
        metrics = totals.read(self._accelerator)
        padding = np.sum(gather_object([self.padding]), axis=0) if self._accelerator.num_processes > 1 else self.padding
        metrics["padding"] = float(padding[0] / max(1.0, padding[1]))
        return metrics

    def _measure(self, samples: Sequence[Sample], totals: _Totals) -> None:
        """How far the whole update has moved the policy, on some samples; the ratios of its steps lack the last."""
        self.actor.eval()
        own = set(map(id, samples))
        for part in self._share(list(samples)[:MEASURED]):
            batch = make_batch(part, {}, device=self._accelerator.device, packed=self.config.packing, everything=True)
            with torch.no_grad(), self._accelerator.autocast():
                logp = self.actor(batch, entropy=False, keep_logits=False).logp
            # Demonstrations were not sampled; idle repeats only keep step with other processes.
            weight = batch["pg_weight"] * (batch["behaviour_logp"] != 0) * float(id(part[0]) in own)
            batch.report("update_kl", k3(logp - batch["behaviour_logp"]) * weight, weight)
            totals.add(batch)
        reshard(self.actor)

    def _step(self, samples: list[Sample], terms: Sequence[LossTerm], progress: float, totals: _Totals) -> None:
        accelerator = self._accelerator
        weights = normalisers(samples, terms)
        parts = self._share(samples)
        rate = self._rate(progress)
        for group, base in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = base * rate
        self.optimiser.zero_grad(set_to_none=True)
        entropy = any(term.name == "entropy" for term in terms)
        lost: dict[str, float] = {}
        trouble = ""
        own = set(map(id, samples))
        for number, part in enumerate(parts):
            idle = id(part[0]) not in own  # it keeps step with the other processes
            if idle:
                for by_sample in weights.values():
                    by_sample |= {id(sample): np.zeros(len(sample), np.float32) for sample in part}
            batch = make_batch(part, weights, device=accelerator.device, packed=self.config.packing, everything=idle)
            self.padding[0] += batch.padding * batch.input_ids.numel()
            self.padding[1] += batch.input_ids.numel()
            last = number + 1 == len(parts)
            accelerator.sync_gradients = last  # DeepSpeed makes its step behind the last one
            # Spread gradients are summed each time: the sum of whole ones would need their memory.
            with contextlib.nullcontext() if last or is_sharded(accelerator) else accelerator.no_sync(self.actor):
                with accelerator.autocast():
                    outputs = self.actor(batch, entropy=entropy, keep_logits=False)
                loss = outputs.logp.new_zeros(())
                for term in terms:
                    value = term.loss(batch, outputs)
                    if getattr(value, "shape", None) != outputs.logp.shape:
                        shape = tuple(getattr(value, "shape", ()))
                        raise UsageError(
                            f"loss term {term.name!r} gave shape {shape}; it must give one number for each of the "
                            f"{len(outputs.logp)} selected tokens (their weights make the average)"
                        )
                    value = (batch.weights[term.name] * value).sum()
                    lost[term.name] = lost.get(term.name, 0.0) + float(value.detach())
                    loss = loss + term.coefficient * value
                batch.report("entropy", outputs.entropy * batch["pg_weight"], batch["pg_weight"])
                if not torch.isfinite(loss):
                    where = ", ".join(sorted({sample.episode_id for sample in part})[:3])
                    trouble = (
                        f"the loss is {float(loss.detach())} on {where} ({lost}); lower optimiser.lr or optimiser.clip"
                    )
                    if accelerator.num_processes == 1:
                        raise Diverged(trouble)
                    loss = loss * math.nan  # so that every process sees it in the gradient's norm, and stops
                if accelerator.num_processes > 1:  # which waits for the gradient of every parameter
                    loss = loss + 0.0 * sum(v.sum() for v in (outputs.logp, outputs.value) if v is not None)
                # Wrappers average over processes, the loss is a sum over them.
                accelerator.backward(loss * accelerator.num_processes)
            totals.add(batch)
        norm = clip_gradients(accelerator, self.parameters.values(), self.config.optimiser.clip)
        limit = self.config.guard.max_grad_norm
        if not math.isfinite(norm) and not trouble and accelerator.mixed_precision == "fp16" and self._skipped < SKIPS:
            self._skipped += 1
            self.optimiser.step()  # makes no step: the scale of the loss was too large, and is lowered
            return
        self._skipped = 0
        if not math.isfinite(norm) or (limit and norm > limit):
            self.optimiser.zero_grad(set_to_none=True)
            raise Diverged(
                trouble
                or f"the gradient's norm is {norm:g}" + (f", above guard.max_grad_norm = {limit:g}" if limit else "")
            )
        self.optimiser.step()
        self.trained_tokens += sum(map(len, samples))
        self.steps += 1
        self.bank.after_step()
        totals.step(lost, norm, self._rates[0] * rate)

    def _share(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """This process's micro-batches."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        return shares(samples, self.config.token_budget, world, packed=self.config.packing)[rank]

    def _rate(self, progress: float) -> float:
        options = self.config.optimiser
        warm = min(1.0, (self.steps + 1) / options.warmup) if options.warmup else 1.0
        left = min(1.0, (1.0 - progress) / options.decay) if options.decay else 1.0
        return warm * left

    def state(self) -> dict[str, Any]:
        """For a checkpoint, beside the model's own folder."""
        head = self.plain.value_head
        return {
            "optimiser": optimiser_state(self.actor, self.optimiser, self._accelerator),
            "value_head": None if head is None else module_state(head),
            "bank": self.bank.state(),
            "steps": self.steps,
            "scored_tokens": self.scored_tokens,
            "trained_tokens": self.trained_tokens,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state` gave."""
        load_optimiser_state(self.actor, self.optimiser, self._accelerator, state["optimiser"])
        if state["value_head"] is not None and self.plain.value_head is not None:
            load_module_state(self.plain.value_head, state["value_head"])
        self.bank.load_state(state["bank"])
        self.steps = state["steps"]
        self.scored_tokens, self.trained_tokens = state["scored_tokens"], state["trained_tokens"]


class _Totals:
    """Metrics of an iteration's optimiser steps."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._steps: dict[str, list[float]] = {}

    def add(self, batch: Batch) -> None:
        for name, report in batch.reports.items():
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += float(report.value)
            sums[1] += float(report.weight)

    def step(self, lost: dict[str, float], norm: float, rate: float) -> None:
        for name, value in {**{f"loss/{k}": v for k, v in lost.items()}, "grad_norm": norm, "lr": rate}.items():
            self._steps.setdefault(name, []).append(value)

    def read(self, accelerator: Accelerator) -> dict[str, float]:
        means = {name: float(np.mean(values)) for name, values in self._steps.items()}
        sums = self._sums
        if accelerator.num_processes > 1:
            gathered = gather_object([(sums, means)])
            sums = {}
            for each, _ in gathered:
                for name, (value, weight) in each.items():
                    total = sums.setdefault(name, [0.0, 0.0])
                    total[0] += value
                    total[1] += weight
            for name in means:
                if name.startswith("loss/"):
                    means[name] = sum(other[name] for _, other in gathered)
        return {**{name: value / weight for name, (value, weight) in sums.items() if weight}, **means}


def prefixed(sample: Sample, prefix: Sequence[int]) -> Sample:
    """A sample for scoring, with other ids before its own."""
    return _bare(np.concatenate([np.asarray(prefix, np.int32), sample.input_ids]))


def _bare(ids: NDArray[np.int32]) -> Sample:
    """A sample that is only scored."""
    zeros = np.zeros(len(ids), np.float32)
    no = np.zeros(len(ids), np.bool_)
    return Sample(ids, no, no, np.zeros(len(ids), np.int32), zeros, zeros, zeros, zeros, zeros)


def minibatches(samples: Sequence[Sample], size: int, rng: np.random.Generator) -> Iterator[list[Sample]]:
    """Samples in random order, `size` trajectories (or preference pairs) at a time; all at once if 0."""
    order = units_of(samples, whole=True)
    places: Iterable[int] = rng.permutation(len(order))
    mixed = [order[place] for place in places]
    step = size or len(mixed)
    for start in range(0, len(mixed), step):
        yield [sample for unit in mixed[start : start + step] for sample in unit]
