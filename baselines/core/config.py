"""Everything a training run is made of: one TOML file, one frozen struct."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli_w

from agentgym.errors import DataError, UsageError, choices
from agentgym.policies._chat import PromptOptions

Count = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class LoRA(_Table, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al. 2021) through peft.

    Attributes:
        rank: 0 trains all weights.
        alpha: scale is alpha / rank.
        dropout: of the adapters' input.
        targets: names of modules; empty for all linear layers but the head.
    """

    rank: NotNegative = 0
    alpha: Positive = 16.0
    dropout: Share = 0.0
    targets: tuple[str, ...] = ()


class Tiny(_Table, frozen=True, kw_only=True):
    """Size of the model "tiny".

    Attributes:
        hidden, layers, heads, feed_forward: of the Llama.
        vocabulary: most words of the tokenizer, the most frequent ones first.
        episodes: expert episodes whose text the tokenizer is built from.
        max_positions: longest sequence.
    """

    hidden: Count = 64
    layers: Count = 2
    heads: Count = 4
    feed_forward: Count = 128
    vocabulary: Count = 2000
    episodes: Count = 400
    max_positions: Count = 2048


class Optimiser(_Table, frozen=True, kw_only=True):
    """AdamW.

    Attributes:
        lr: learning rate.
        beta1, beta2, weight_decay, epsilon: of AdamW.
        clip: largest norm of the gradient.
        warmup: optimiser steps of linear warm-up.
        decay: share of the iterations, at the end, over which the learning rate falls linearly to 0.
        value_lr: learning rate of the value head.
    """

    lr: Positive = 4e-4
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    epsilon: Positive = 1e-8
    clip: Positive = 1.0
    warmup: NotNegative = 0
    decay: Share = 0.0
    value_lr: Positive = 1e-3


class Evaluation(_Table, frozen=True, kw_only=True):
    """Scoring on held-out tasks.

    Attributes:
        split: split of the task set.
        every: iterations between evaluations, one before the first update included; 0 for the last one only.
        episodes: tasks, the first of the split; repeated with other draws where the split has fewer.
        final: tasks of the last evaluation.
        greedy: score greedy decoding too in the last one.
        stop_at: with a value, the run ends when the held-out success of an evaluation reaches it (cold starts).
    """

    split: str = "test"
    every: NotNegative = 10
    episodes: Count = 256
    final: Count = 512
    greedy: bool = True
    stop_at: Share = 0.0


class Guard(_Table, frozen=True, kw_only=True):
    """When to stop with a saved state and a reason.

    Attributes:
        max_kl: largest mean divergence of the updated policy from the one that played, measured on 16 samples
            behind each iteration's update; 0 for no limit, and no measurement.
        max_grad_norm: largest gradient norm before clipping; 0 for no limit.
        min_entropy: smallest mean entropy while playing; 0 for no limit.
    """

    max_kl: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    max_grad_norm: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    min_entropy: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Demonstrations(_Table, frozen=True, kw_only=True):
    """How the expert plays for methods that imitate it.

    Attributes:
        noise: share of turns with a random admissible command instead, which is not imitated.
    """

    noise: Share = 0.0


class Server(_Table, frozen=True, kw_only=True):
    """A vLLM server that generates, see docs/guides/scale.md.

    Attributes:
        base_url: its address, ending in /v1; empty to generate in this process.
        model: the name it serves the model under; empty for the model's own.
        weights: folder that this process and the server share, through which updated weights go.
        max_concurrency: requests at once.
    """

    base_url: str = ""
    model: str = ""
    weights: str = ""
    max_concurrency: Count = 64


class TrainConfig(_Table, frozen=True, kw_only=True):
    """One training run.

    Attributes:
        method, method_options: see `agentgym.baselines.core.method.make_method`.
        env, env_kwargs: environment and its options.
        train_split: split that tasks are drawn from.
        kinds: draw only tasks of these kinds; empty for all.
        model: "tiny", "smollm2-135m", a folder, or a hub id.
        teacher: model of methods that distil from another one.
        seed: of everything random.
        iterations: how often to play and update; 0 only scores the model.
        tasks_per_iteration: tasks drawn an iteration, each played `group_size` times.
        minibatch: trajectories an optimiser step; 0 for all of the iteration.
        token_budget: rows times width of one forward.
        packing: several samples a row; pays where attention skips masked blocks.
        precision: of the forward; weights of the optimiser stay as loaded ("fp32" loads fp32).
        gradient_checkpointing: recompute activations.
        temperature, max_new_tokens, max_context: of sampling.
        prompt: how observations become messages.
        slots: environments that play at once in this process.
        backend, workers, envs_per_worker: where environments live, see `agentgym.workers.make_backend`.
        retries: times a faulted episode is tried again.
        staleness: with a value k, iteration i is played by the policy of iteration i - k while the update runs.
        max_env_steps, max_tokens, max_seconds: budget, scoring passes included; 0 for none. The run ends behind the
            iteration that reaches it.
        checkpoint_every: iterations between checkpoints; 0 for the last one only.
        keep_checkpoints: how many are kept.
        save_episodes: write every episode of training to episodes.jsonl (with the token ids).
        trackers: "tensorboard", "wandb" beside metrics.jsonl.
        policies: role -> id of the parameters it uses; roles left out share "policy".
        share_base: several policies are adapters on one model (needs lora.rank).
    """

    method: str = "grpo"
    method_options: dict[str, Any] = {}
    env: str = "alfworld"
    env_kwargs: dict[str, Any] = {}
    train_split: str = "train"
    kinds: tuple[str, ...] = ()
    model: str = "tiny"
    teacher: str = ""
    seed: NotNegative = 0
    iterations: NotNegative = 60
    tasks_per_iteration: Count = 16
    minibatch: NotNegative = 64
    token_budget: Count = 8192
    packing: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_checkpointing: bool = False
    temperature: Positive = 1.0
    max_new_tokens: Count = 8
    max_context: Count | None = None
    prompt: PromptOptions = PromptOptions()
    slots: Count = 128
    backend: Literal["serial", "threads", "processes", "ray"] = "serial"
    workers: Count = 1
    envs_per_worker: Count = 1
    retries: NotNegative = 1
    staleness: NotNegative = 0
    max_env_steps: NotNegative = 0
    max_tokens: NotNegative = 0
    max_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    checkpoint_every: NotNegative = 10
    keep_checkpoints: Count = 1
    save_episodes: bool = False
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    policies: dict[str, str] = {}
    share_base: bool = False
    lora: LoRA = LoRA()
    tiny: Tiny = Tiny()
    optimiser: Optimiser = Optimiser()
    evaluation: Evaluation = Evaluation()
    guard: Guard = Guard()
    demonstrations: Demonstrations = Demonstrations()
    server: Server = Server()


def read_train_config(path: Path | str, **changes: Any) -> TrainConfig:
    """Reads a training configuration.

    Args:
        path: TOML file.
        **changes: values that replace the file's; a table replaces single entries of the file's table.

    Raises:
        DataError: if it cannot be read.
        UsageError: for unknown names or values of a wrong type.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            path, "no such file", "Give a training configuration, such as baselines/configs/alfworld-s.toml"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(path, f"cannot be read ({error})", "Mend the TOML") from error
    return make_train_config(merge(data, changes))


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, table by table."""
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def make_train_config(data: dict[str, Any]) -> TrainConfig:
    """Checks a training configuration by name and type.

    Raises:
        UsageError: for unknown names or values of a wrong type.
    """
    for name in data:
        if name not in TrainConfig.__struct_fields__:
            raise choices("setting of a training configuration", name, list(TrainConfig.__struct_fields__))
    _refuse_infinite(data)
    try:
        return msgspec.convert(data, TrainConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"training configuration: {error}") from error


def _refuse_infinite(table: dict[str, Any], where: str = "") -> None:
    for name, value in table.items():
        if isinstance(value, dict):
            _refuse_infinite(value, f"{where}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"training configuration: {where}{name} is {value}; give a finite number")


def write_train_config(path: Path, config: TrainConfig) -> None:
    """Writes a configuration as TOML."""
    from agentgym.episode import write_atomically

    data = {name: value for name, value in msgspec.to_builtins(config).items() if value is not None}
    data["prompt"] = {name: value for name, value in data["prompt"].items() if value is not None}
    write_atomically(path, tomli_w.dumps(data, multiline_strings=False).encode())
