"""What runs beside an environment: carries out commands and turns every failure into a `Fault`."""

from __future__ import annotations

import contextlib
import math
import traceback
from typing import Any, NamedTuple

import msgspec

from agentgym.actions import ActionFormat
from agentgym.env import INFO_KEYS, AgentEnv, Info
from agentgym.errors import DataError, InfrastructureError, UsageError
from agentgym.registry import load_entry_point
from agentgym.task import Task


class Fault(NamedTuple):
    """An episode broke by no act of its agent.

    Attributes:
        kind: "exception", "garbage", "killed", "reset timeout", "step timeout", "infrastructure", "data", "policy",
            "usage" (a bad call, which ends the whole run), or "lost" (its worker died of another episode).
        message: one line for people.
        detail: traceback where there is one.
    """

    kind: str
    message: str
    detail: str = ""


class EnvSource(NamedTuple):
    """How a worker makes an environment: an importable class and its options."""

    entry_point: str
    kwargs: dict[str, Any]


class Start(NamedTuple):
    """Command: begin an episode (and, with `completions`, bring it back to where a lost worker left it)."""

    source: EnvSource
    task_id: str
    split: str
    seed: int
    snapshot: bytes | None = None
    hint: bool = False
    completions: tuple[str, ...] = ()


class Step(msgspec.Struct, gc=False):
    """Command: take one action."""

    completion: str
    hint: bool = False


class Started(NamedTuple):
    """Answer to `Start`."""

    observation: str
    info: Info
    hint: str | None
    task: Task
    system_prompt: str
    instruction: str
    tools: tuple[Any, ...]
    action_format: ActionFormat
    prompt_templates: dict[str, str]
    replay: str


class Stepped(msgspec.Struct, gc=False):
    """Answer to `Step`."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Info
    hint: str | None
    action: str | None


Command = Start | Step
Answer = Started | Stepped | Fault


class EnvHost:
    """Environments by slot. An environment is kept for the next episode with the same options."""

    def __init__(self) -> None:
        self._envs: dict[int, tuple[EnvSource, AgentEnv]] = {}

    def call(self, slot: int, command: Command) -> Answer:
        """Carries out one command; never raises but for KeyboardInterrupt and GeneratorExit."""
        try:
            return self._start(slot, command) if isinstance(command, Start) else self._step(slot, command)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            self._discard(slot)
            return to_fault(error)

    def close(self) -> None:
        """Closes all environments."""
        for slot in list(self._envs):
            self._discard(slot)

    def _start(self, slot: int, command: Start) -> Answer:
        kept = self._envs.get(slot)
        if kept is None or kept[0] != command.source:
            self._discard(slot)
            env: AgentEnv = load_entry_point(command.source.entry_point)(**command.source.kwargs)
            self._envs[slot] = (command.source, env)
        else:
            env = kept[1]
        options: dict[str, Any] = {"task": command.task_id}
        if command.split:
            options["split"] = command.split
        observation, info = env.reset(seed=command.seed, options=options)
        if command.snapshot is not None:
            observation, info = env.restore(command.snapshot)
        for completion in command.completions:
            observation, _, _, _, info = env.step(completion)
        _check(env, observation, 0.0, False, False, info)
        assert env.task is not None
        return Started(
            observation,
            info,
            env.expert() if command.hint else None,
            env.task,
            env.system_prompt,
            env.instruction,
            env.tools,
            env.action_format,
            dict(env.prompt_templates),
            env.replay,
        )

    def _step(self, slot: int, command: Step) -> Answer:
        env = self._envs[slot][1]
        observation, reward, terminated, truncated, info = env.step(command.completion)
        _check(env, observation, reward, terminated, truncated, info)
        hint = env.expert() if command.hint and not (terminated or truncated) else None
        return Stepped(observation, reward, terminated, truncated, info, hint, info["extra"].get("action"))

    def _discard(self, slot: int) -> None:
        kept = self._envs.pop(slot, None)
        if kept is not None:
            with contextlib.suppress(Exception):
                kept[1].close()


class Garbage(Exception):
    """An environment returned something that the contract forbids."""


def to_fault(error: BaseException) -> Fault:
    """The fault that an exception stands for."""
    if isinstance(error, Garbage):
        return Fault("garbage", str(error))
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = message.encode("utf-8", "replace").decode("utf-8")
    if isinstance(error, InfrastructureError):
        return Fault("infrastructure", message)
    if isinstance(error, UsageError):
        return Fault("usage", str(error))
    if isinstance(error, DataError):
        return Fault("data", str(error))
    return Fault("exception", message, "".join(traceback.format_exception(error))[-4000:])


def _check(env: AgentEnv, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
    if not env.observation_space.contains(observation):
        shown = (
            f"{type(observation).__name__} of length {len(observation)}"
            if hasattr(observation, "__len__")
            else repr(observation)
        )
        raise Garbage(f"observation is not in {env.observation_space}: {shown[:200]}")
    if not isinstance(reward, float | int) or not math.isfinite(reward):
        raise Garbage(f"reward is not a finite number: {reward!r}"[:200])
    if type(terminated) is not bool or type(truncated) is not bool:
        raise Garbage(f"terminated and truncated must be bool, not {terminated!r}, {truncated!r}"[:200])
    if not isinstance(info, dict) or info.keys() != _KEYS:
        raise Garbage("info lacks keys of the contract or has others; see agentgym.env.Info")
    # One pass over the types, for this runs at every step; the loop only names what is wrong.
    if not (
        type(info["role"]) is type(info["state_key"]) is type(info["feedback"]) is type(info["kind"]) is str
        and type(info["checkpoints"]) is tuple
        and type(info["extra"]) is type(info["usage"]) is dict
    ):
        for key, kind in _TYPES:
            if not isinstance(info[key], kind):
                raise Garbage(f"info[{key!r}] must be a {kind.__name__}, not {info[key]!r:.80}")
    if info["extra"] or info["usage"] or info["admissible"] or info["checkpoints"] or info["feedback"]:
        _check_content(info)


def _check_content(info: Any) -> None:
    for numbers in (info["usage"], info["extra"].get("metrics", {})):
        if not isinstance(numbers, dict) or not all(
            isinstance(n, float | int) and math.isfinite(n) for n in numbers.values()
        ):
            raise Garbage(f"usage and metrics must be finite numbers by name, not {numbers!r:.80}")
    try:
        _encoder.encode(info)  # the log must be able to hold it
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Garbage(f"info holds something that the log cannot keep: {error}") from None


_TYPES = (
    *((key, str) for key in ("role", "state_key", "feedback", "kind")),
    *(("checkpoints", tuple), ("extra", dict), ("usage", dict)),
)
_encoder = msgspec.json.Encoder()
_KEYS = dict.fromkeys(INFO_KEYS).keys()
