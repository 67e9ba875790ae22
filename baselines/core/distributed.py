"""Several processes: who computes what, and models whose weights are spread over them (FSDP2, DeepSpeed ZeRO-3)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from agentgym.baselines.core.bank import Bank, Values
from agentgym.baselines.core.batch import cut
from agentgym.baselines.core.sample import Sample
from agentgym.errors import UsageError

MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_accelerator(precision: str, *, clip: float) -> Accelerator:
    """What `accelerate launch` has set up: one process, or one of several.

    Args:
        precision: "fp32", "bf16" or "fp16", of the forward.
        clip: largest norm of the gradient; DeepSpeed wants to know it beforehand.

    Raises:
        UsageError: for FSDP 1, which moves parameters where the sampler cannot follow.
    """
    on_cpu = not torch.cuda.is_available()
    earlier = AcceleratorState._shared_state  # accelerate keeps one state a process
    if earlier and earlier["_mixed_precision"] != MIXED[precision]:
        AcceleratorState._reset_state()
    # accelerate shards on accelerators only; on the CPU the same path is there to be checked. AcceleratorState copies
    # the kind from PartialState whenever it is made.
    deepspeed = on_cpu and _wants("DEEPSPEED")
    if deepspeed:
        PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
    accelerator = Accelerator(mixed_precision=MIXED[precision], cpu=on_cpu and not deepspeed)
    if accelerator.num_processes > 1 and on_cpu and _wants("FSDP"):
        PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UsageError(
            "FSDP version 1 is not supported: set fsdp_version: 2 (baselines/configs/accelerate/fsdp2.yaml)"
        )
    if accelerator.is_fsdp2 and precision != "fp32":  # gradients are summed in fp32, outputs stay as they are
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings |= {"gradient_clipping": clip, "train_micro_batch_size_per_gpu": 1}
    return accelerator


def _wants(what: str) -> bool:
    """What `accelerate launch` was told."""
    return os.environ.get(f"ACCELERATE_USE_{what}", "").lower() == "true"


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds only a part of the weights."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.state.deepspeed_plugin.zero_stage == 3)
    return bool(accelerator.is_fsdp2)


# Shares of a batch.


def units_of(samples: Sequence[Sample], *, whole: bool) -> list[list[Sample]]:
    """Samples that stay together, in order.

    Args:
        samples: any.
        whole: also keep the samples of a trajectory together, not only those of equal `unit`.
    """
    units: dict[Hashable, list[Sample]] = {}
    for number, sample in enumerate(samples):
        alone = (sample.episode_id, sample.role) if whole else number
        units.setdefault(sample.unit or alone, []).append(sample)
    return list(units.values())


def shares(
    samples: Sequence[Sample], token_budget: int, world: int, *, packed: bool = False
) -> list[list[list[Sample]]]:
    """Micro-batches of each process: as many for each, for their forwards must pair up.

    Units of like length are dealt out in turn; a process that gets fewer micro-batches than another repeats a short
    unit without weight.
    """
    if world == 1:
        return [cut(samples, token_budget, packed=packed)]
    order = sorted(units_of(samples, whole=False), key=lambda unit: -max(map(len, unit)))
    dealt = [[sample for unit in order[rank::world] for sample in unit] for rank in range(world)]
    parts = [cut(own, token_budget, packed=packed) for own in dealt]
    most = max(map(len, parts))
    return [own + [[weightless(sample) for sample in order[-1]] for _ in range(most - len(own))] for own in parts]


def weightless(sample: Sample) -> Sample:
    """A copy that trains nothing."""
    zeros = np.zeros(len(sample), np.float32)
    return Sample(
        sample.input_ids,
        sample.action_mask,
        sample.obs_mask,
        sample.turn_of,
        sample.behaviour_logp,
        zeros,
        zeros,
        zeros,
        zeros,
        sample.fields,
        episode_id=sample.episode_id,
        unit=sample.unit,
    )


# Weights that are spread over the processes.


@contextlib.contextmanager
def gathered(actor: Any, accelerator: Accelerator) -> Iterator[None]:
    """Holds all weights in every process, so that each can sample on its own.

    Every process must come here; inside, no process waits for another. Weights must not be changed inside.

    Args:
        actor: the prepared model.
        accelerator: of the run.
    """
    if not is_sharded(accelerator):
        yield
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        with _deepspeed_gathered(actor):
            yield
    else:
        again = bool(accelerator.state.fsdp_plugin.reshard_after_forward)
        parts = _fsdp_modules(actor)
        actor.set_reshard_after_forward(False)
        for part in parts:
            part.unshard()
        try:
            yield
        finally:
            actor.set_reshard_after_forward(again)
            actor.set_reshard_after_forward(False, recurse=False)  # the root's are needed again at once
            reshard(actor)


def reshard(actor: Any) -> None:
    """Lets go of gathered weights, so that the next forward sees changed ones."""
    for part in _fsdp_modules(actor):
        part.reshard()


def _fsdp_modules(actor: Any) -> list[Any]:
    return [module for module in actor.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def _deepspeed_gathered(engine: Any) -> Iterator[None]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        offload = engine.optimizer.parameter_offload
        # Its hooks would fetch and free the weights of every layer, in step with the other processes.
        offload._remove_module_hooks()
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()


def clip_gradients(accelerator: Accelerator, parameters: Iterable[torch.nn.Parameter], limit: float) -> float:
    """Clips the norm of all gradients, over all processes; returns the norm before.

    DeepSpeed has clipped already, by its gradient_clipping, and made its step.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return float(accelerator.clip_grad_norm_([], limit))
    accelerator.unscale_gradients()
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _full(value: Tensor) -> Tensor:
    """The whole of a tensor of which each process holds a part."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class ShardedBank(Bank):
    """Copies of parameters of which each process holds a part.

    Args:
        parameters, rules, folder: see `Bank`.
        actor: the FSDP2 model.
    """

    def __init__(self, parameters: Any, rules: Any, folder: Path, actor: Any) -> None:
        for name, rule in rules.items():
            if rule.on_disk:
                raise UsageError(f"copy {name!r} on disk does not go with sharded weights; keep it in memory")
        self._actor = actor
        super().__init__(parameters, rules, folder)

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Writes a copy into the policy's place; FSDP2 keeps views of the memory, so it cannot be exchanged."""
        values = self._load(name)
        own = {key: parameter.detach().clone() for key, parameter in self._parameters.items()}
        try:
            self._write(values)
            yield
        finally:
            self._write(own)

    def _write(self, values: Values) -> None:
        reshard(self._actor)
        with torch.no_grad():
            for key, parameter in self._parameters.items():
                parameter.copy_(values[key])

    def state(self) -> dict[str, Any]:
        """For a checkpoint, whole; every process must ask."""
        state = super().state()
        values = {
            name: {key: _full(value).cpu() for key, value in part.items()} for name, part in state["values"].items()
        }
        return {**state, "values": values}

    def load_state(self, state: Any) -> None:
        """Restores what `state` gave."""
        for name, values in state["values"].items():
            mine = {key: parameter.detach().clone() for key, parameter in self._parameters.items()}
            for key, value in values.items():
                mine[key] = _like(value, mine[key])
            self._store(name, mine)
        self.refreshed = dict(state["refreshed"])


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


class Weights(msgspec.Struct):
    """A model with all of its weights in this process, to be saved.

    Attributes:
        model: of transformers or peft.
        state_dict: its weights.
    """

    model: Any
    state_dict: dict[str, Tensor]

    def save_pretrained(self, folder: Path) -> None:
        """Writes them as the model itself does."""
        self.model.save_pretrained(folder, state_dict=self.state_dict)


def whole_model(actor: Any, accelerator: Accelerator) -> Any:
    """Something whose save_pretrained writes the model whole; every process must ask, the first may save.

    Args:
        actor: the prepared model.
        accelerator: of the run.
    """
    plain = accelerator.unwrap_model(actor)
    if not is_sharded(accelerator):
        return plain.lm
    state = accelerator.get_state_dict(actor) or {}  # DeepSpeed gives it to the first process alone
    once = [name for name, _ in [*plain.lm.named_parameters(), *plain.lm.named_buffers()]]  # tied ones have one name
    return Weights(plain.lm, {name: state[f"lm.{name}"] for name in once if f"lm.{name}" in state})


def optimiser_state(actor: Any, optimiser: Any, accelerator: Accelerator) -> dict[str, Any]:
    """An optimiser's state, whole; every process must ask.

    DeepSpeed's is not saved: it fits only the number of processes that it was made by.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return {"kind": "deepspeed"}
    if not accelerator.is_fsdp2:
        state: dict[str, Any] = optimiser.state_dict()
        return state
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"kind": "fsdp2", "state": get_optimizer_state_dict(actor, optimiser.optimizer, options=options)}


def load_optimiser_state(actor: Any, optimiser: Any, accelerator: Accelerator, state: dict[str, Any]) -> None:
    """Restores what `optimiser_state` gave, in each process; the number of processes may differ.

    Raises:
        UsageError: if it was saved by another kind of run, or by DeepSpeed.
    """
    kind, here = state.get("kind", "whole"), "fsdp2" if accelerator.is_fsdp2 else "whole"
    if kind == "deepspeed" or accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UsageError("DeepSpeed runs cannot be continued: start anew with model = its model folder")
    if kind != here:
        raise UsageError(f"this checkpoint's optimiser is {kind}, this run's is {here}: launch it as it was before")
    if kind == "whole":
        optimiser.load_state_dict(state)
    else:
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(actor, optimiser.optimizer, state["state"], options=options)


def module_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """A small module's weights, whole; every process must ask."""
    return {name: _full(value.detach()).cpu().clone() for name, value in module.named_parameters()}


def load_module_state(module: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restores what `module_state` gave."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_like(state[name], parameter))
