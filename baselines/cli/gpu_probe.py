"""`python -m agentgym.baselines.cli.gpu_probe PART PLAN RESULT`: a part of `agentgym gpu-check`, in its own process."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentgym.baselines.cli.gpu_check import Check, Plan
from agentgym.baselines.core.config import TrainConfig, make_train_config

TASKS = "alfworld/generated:xs"
EXACT = 1e-4  # largest difference of log-probabilities in fp32
COARSE = 0.1  # largest mean difference in bf16, whose numbers have 8 significant bits; 135M parameters gave 0.04


def main() -> None:
    """Runs a part and writes its checks."""
    part, plan, result = sys.argv[1:]
    from agentgym.baselines.core.run import quiet

    quiet()
    read = msgspec.json.decode(plan.encode(), type=Plan)
    checks = list(sampling(read) if part == "sampling" else [update(read, part.removeprefix("update-"))])
    Path(result).write_bytes(msgspec.json.encode(checks))


def train_config(plan: Plan, *, iterations: int, **changes: Any) -> TrainConfig:
    """A training on expert episodes: its loss is never zero, whatever the model can do."""
    return make_train_config(
        {
            "method": "sft",
            "model": plan.model,
            "env_kwargs": {"tasks": TASKS, "max_turns": plan.turns},
            "iterations": iterations,
            "tasks_per_iteration": plan.tasks,
            "minibatch": 0,
            "token_budget": plan.token_budget,
            "max_new_tokens": plan.tokens,
            "slots": plan.episodes,
            "checkpoint_every": 0,
            "optimiser": {"lr": 1e-4},
            "evaluation": {"every": 0, "final": plan.episodes, "greedy": False},
            **changes,
        }
    )


def sampling(plan: Plan) -> Iterator[Check]:
    """Plays with the kept cache, and compares the sampled log-probabilities with those of whole forwards."""
    from agentgym.baselines.core.models import load, model_folder

    config = train_config(plan, iterations=1)
    folder = model_folder(config, Path(plan.work))
    for precision in ("fp32", "bf16"):
        model, tokenizer = load(folder, dtype=precision, device="cuda" if plan.cuda else "cpu")
        samples, tokens, seconds, faults = _play(plan, config, model, tokenizer)
        yield Check(
            name=f"generation in {precision}",
            passed=tokens > 0 and not faults,
            value=tokens / seconds,
            unit="tokens/s",
            detail=f"{plan.episodes} episodes at once, {tokens} new tokens, {faults} faults, {_memory(plan)}",
        )
        largest, mean = _differences(plan, model, samples)
        bound = f"largest, at most {EXACT:g}" if precision == "fp32" else f"mean, at most {COARSE:g}"
        yield Check(
            name=f"sampled against whole log-probabilities in {precision}",
            passed=largest <= EXACT if precision == "fp32" else mean <= COARSE,
            value=largest if precision == "fp32" else mean,
            unit="nats",
            detail=f"{bound}; mean {mean:.2g}, largest {largest:.2g}",
        )
        if precision == "fp32":
            yield _packing(model, samples)


def _play(plan: Plan, config: TrainConfig, model: Any, tokenizer: Any) -> tuple[list[Any], int, float, int]:
    """Samples of the played episodes, new tokens, seconds and faults; what is compiled on first use is not counted."""
    from agentgym.baselines.core.collect import Collector, hf_policy
    from agentgym.baselines.core.sample import make_trajectories
    from agentgym.baselines.core.scoring import evaluation_specs
    from agentgym.baselines.core.tasks import TaskDraw

    specs = evaluation_specs(TaskDraw(config), config, plan.episodes)
    collector = Collector(config)
    try:
        collector.play(specs[:2], hf_policy(config, model, tokenizer))
        began = time.monotonic()
        episodes = collector.play(specs, hf_policy(config, model, tokenizer))
        seconds = time.monotonic() - began
    finally:
        collector.close()
    tokens = sum(len(turn.arrays.get("completion_ids", ())) for episode in episodes for turn in episode.turns)
    samples = [sample for trajectory in make_trajectories(episodes) for sample in trajectory.samples]
    return samples, tokens, seconds, sum(not episode.finished for episode in episodes)


def _differences(plan: Plan, model: Any, samples: Sequence[Any]) -> tuple[float, float]:
    """Largest and mean difference of the sampled tokens' log-probabilities."""
    import numpy as np

    from agentgym.baselines.core.batch import cut

    found = []
    for part in cut(samples, plan.token_budget):
        scored, _ = _score(model, part, packed=False)
        for sample, values in zip(part, scored, strict=True):
            own = sample.action_mask[1:]
            found.append(np.abs(values[own] - sample.behaviour_logp[1:][own]))
    every = np.concatenate(found)
    return float(every.max()), float(every.mean())


def _score(model: Any, samples: Sequence[Any], *, packed: bool) -> tuple[list[Any], int]:
    """Log-probabilities of each sample's tokens but the first, and the rows that they were computed in."""
    import torch

    from agentgym.baselines.core.actor import Actor
    from agentgym.baselines.core.batch import make_batch

    actor = Actor(model.eval())
    batch = make_batch(samples, {}, device=actor.device, packed=packed, everything=True)
    with torch.no_grad():
        flat = actor(batch, entropy=False, keep_logits=False).logp.float().cpu().numpy()
    owner = batch.sample_of.cpu().numpy()
    return [flat[owner == index] for index in range(len(samples))], len(batch.input_ids)


def _packing(model: Any, samples: Sequence[Any]) -> Check:
    """Several samples a row give the log-probabilities that each gives alone."""
    import numpy as np

    unlike = [_head(sample, len(sample) // (1 + place % 4)) for place, sample in enumerate(samples[:8])]
    padded, _ = _score(model, unlike, packed=False)
    packed, rows = _score(model, unlike, packed=True)
    largest = max(float(np.abs(a - b).max()) for a, b in zip(padded, packed, strict=True))
    return Check(
        name="packed against padded batches in fp32",
        passed=largest <= EXACT and rows < len(unlike),
        value=largest,
        unit="nats",
        detail=f"largest, at most {EXACT:g}; {len(unlike)} samples in {rows} rows",
    )


def _head(sample: Any, size: int) -> Any:
    import numpy as np

    from agentgym.baselines.core.sample import Sample

    ids = sample.input_ids[:size]
    no, zeros = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    return Sample(ids, no, no, np.zeros(len(ids), np.int32), zeros, zeros, zeros, zeros, zeros)


def update(plan: Plan, kind: str) -> Check:
    """Two iterations of the trainer in bf16, the second one measured."""
    import torch

    from agentgym.baselines.core.record import read_metrics
    from agentgym.baselines.core.trainer import Trainer

    lora = {"rank": 16, "alpha": 32.0} if kind == "lora" else {}
    config = train_config(plan, iterations=2, precision="bf16", gradient_checkpointing=True, lora=lora)
    out = Path(plan.work) / f"update-{kind}"
    trainer = Trainer(config, out)
    parameters = trainer.learners["policy"].parameters
    before = {name: value.detach().clone() for name, value in parameters.items()}
    trainer.run()
    first, second = [line for line in read_metrics(out) if line["kind"] == "train"]
    changed = sum(not torch.equal(before[name], value) for name, value in parameters.items())
    loss, tokens = second["loss/ce"], second["trained_tokens"] - first["trained_tokens"]
    seconds = second["seconds"] - first["seconds"] - second["rollout_seconds"]
    return Check(
        name=f"update {'with LoRA' if lora else 'of all weights'} in bf16",
        passed=loss == loss and abs(loss) < float("inf") and changed == len(parameters),
        value=tokens / seconds,
        unit="tokens/s",
        detail=f"loss {first['loss/ce']:.3f} then {loss:.3f}; {changed} of {len(parameters)} tensors changed; "
        + _memory(plan),
    )


def _memory(plan: Plan) -> str:
    """Most memory so far."""
    import torch

    if plan.cuda:
        return f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of GPU memory"
    return f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory"


if __name__ == "__main__":
    main()
