"""Plays environments for the checker: recorded transcripts, chosen actions, and what differs between two plays."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from agentgym.actions import render_command
from agentgym.env import AgentEnv
from agentgym.registry import EnvCard, TasksCard, env_cards, register_env, register_tasks, task_cards

Flat = dict[str, str]
Problem = tuple[str, str]


@dataclass(frozen=True)
class Subject:
    """What is being checked, and how far.

    Attributes:
        make: makes a fresh environment; wrappers are taken off.
        seed: first seed of every play.
        turns: greatest number of turns of a play.
        subprocess: whether plays are compared with another process too.
    """

    make: Callable[[], Any]
    seed: int = 0
    turns: int = 12
    subprocess: bool = False
    capabilities: frozenset[str] = field(default_factory=frozenset)

    @contextlib.contextmanager
    def env(self) -> Iterator[AgentEnv]:
        """A fresh environment, closed afterwards."""
        env = unwrap(self.make())
        try:
            yield env
        finally:
            env.close()


@dataclass(frozen=True)
class Step:
    """One observation of a play: of `reset` when `action` is None."""

    action: str | None
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return bool(self.terminated or self.truncated)

    @property
    def where(self) -> str:
        """Where this is, for a message."""
        return "at reset" if self.action is None else f"after the action {self.action!r:.60}"


@dataclass(frozen=True)
class Check:
    """One check: a function that yields (what is wrong, how to mend it).

    Attributes:
        name: name of the function.
        meaning: one line for the report.
        run: the function.
        needs: capabilities without which there is nothing to check.
        after: checks that must have passed, because this one builds on what they say.
        elsewhere: whether it starts other processes, and so runs on demand only.
    """

    name: str
    meaning: str
    run: Callable[[Subject], Iterator[Problem]]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    elsewhere: bool = False


def check(
    meaning: str, *, needs: tuple[str, ...] = (), after: tuple[str, ...] = (), elsewhere: bool = False
) -> Callable[[Callable[[Subject], Iterator[Problem]]], Check]:
    """Makes a check of a function, under its name."""

    def wrap(run: Callable[[Subject], Iterator[Problem]]) -> Check:
        return Check(run.__name__, meaning, run, needs, after, elsewhere)

    return wrap


def unwrap(env: Any) -> AgentEnv:
    """The `AgentEnv` below Gymnasium's wrappers.

    Raises:
        TypeError: if there is none.
    """
    bare = env.unwrapped
    if not isinstance(bare, AgentEnv):
        raise TypeError(f"{type(bare).__name__} is not an AgentEnv; derive the environment from agentgym.env.AgentEnv")
    return bare


def choose(env: AgentEnv, info: Mapping[str, Any], rng: random.Random) -> str:
    """A sensible action: mostly an admissible one, or the expert's, else a plain word."""
    admissible = info.get("admissible")
    if "admissible" in env.capabilities and admissible and rng.random() < 0.8:
        return render_command(env.action_format, env.tools, rng.choice(list(admissible)))
    if "expert" in env.capabilities and isinstance(action := env.expert(), str):
        return action
    if admissible:
        return render_command(env.action_format, env.tools, rng.choice(list(admissible)))
    return rng.choice(["look", "help", "1", "yes"])


def start(env: AgentEnv, seed: int, options: dict[str, Any] | None = None) -> Step:
    """Resets and records."""
    observation, info = env.reset(seed=seed, options=options)
    return Step(None, observation, 0.0, False, False, info)


def take(env: AgentEnv, action: str) -> Step:
    """Steps and records."""
    observation, reward, terminated, truncated, info = env.step(action)
    return Step(action, observation, reward, terminated, truncated, info)


def walk(env: AgentEnv, seed: int, turns: int) -> Iterator[Step]:
    """Plays one episode of chosen actions, step by step; the choice depends on the seed and the infos alone."""
    rng = random.Random(seed)
    step = start(env, seed)
    yield step
    for _ in range(turns):
        step = take(env, choose(env, step.info, rng))
        yield step
        if step.ended:
            return


def follow(env: AgentEnv, seed: int, actions: list[str]) -> Step:
    """Plays given actions from a seed, and returns the last step (of a sound environment, always the same)."""
    step = start(env, seed)
    for action in actions:
        step = take(env, action)
    return step


def flatten(value: Any, path: str = "") -> Flat:
    """A nested value as path -> text, in which equal values (NaN included) are equal texts."""
    if isinstance(value, Mapping):
        return {k: v for key, part in value.items() for k, v in flatten(part, f"{path}[{key!r}]").items()} or {
            path: "{}"
        }
    if isinstance(value, list | tuple) and value:
        flat = {k: v for i, part in enumerate(value) for k, v in flatten(part, f"{path}[{i}]").items()}
        return {f"{path} type": type(value).__name__, **flat}
    if isinstance(value, set | frozenset):
        return {path: f"{type(value).__name__} of {sorted(map(repr, value))}"}
    return {path: repr(value)}


def flat_step(step: Step) -> Flat:
    """Everything that a step returned."""
    flat = flatten({"observation": step.observation, "reward": step.reward, "info": step.info}, "")
    return {**flat, "action": repr(step.action), "terminated": repr(step.terminated), "truncated": repr(step.truncated)}


def transcript(env: AgentEnv, seeds: list[int], turns: int) -> list[Flat]:
    """Episodes of chosen actions, one after the other."""
    return [flat_step(step) for seed in seeds for step in walk(env, seed, turns)]


def difference(first: list[Flat], second: list[Flat]) -> str | None:
    """Says where two transcripts part, or None when they are equal."""
    for number, (one, two) in enumerate(zip(first, second, strict=False)):
        for path in [*one, *(key for key in two if key not in one)]:
            if one.get(path) != two.get(path):
                return (
                    f"record {number}: {path.removesuffix(' type')} is {one.get(path, 'absent'):.80}, "
                    f"then {two.get(path, 'absent'):.80}"
                )
    if len(first) != len(second):
        return f"one play has {len(first)} records, the other {len(second)}"
    return None


@contextlib.contextmanager
def global_generators(seed: int) -> Iterator[None]:
    """Seeds Python's and NumPy's global generators, and puts their states back afterwards."""
    python, legacy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def global_state() -> str:
    """Digest of the global generators' states."""
    legacy = np.random.get_state(legacy=True)
    return repr((hash(random.getstate()), legacy[1].tobytes(), legacy[2:]))  # type: ignore[index]


def record_elsewhere(subject: Subject, seeds: list[int], hash_seed: str) -> list[Flat]:
    """The transcript of a fresh process with its own PYTHONHASHSEED; raises as `_elsewhere` does."""
    return _elsewhere(subject, {"seeds": seeds}, hash_seed)


def continue_elsewhere(subject: Subject, saved: bytes, actions: list[str], hash_seed: str) -> list[Flat]:
    """What a fresh process returns that restores a snapshot and plays on; raises as `_elsewhere` does."""
    return _elsewhere(subject, {"saved": saved.hex(), "actions": actions}, hash_seed)


def _elsewhere(subject: Subject, what: dict[str, Any], hash_seed: str) -> list[Flat]:
    """Records in another process.

    Raises:
        TypeError, pickle.PicklingError, AttributeError: if `make` cannot be sent to another process.
        RuntimeError: if the other process fails.
    """
    import os
    import subprocess
    import sys

    # Cards registered by hand are sent along, or the task sets they name would be unknown there.
    cards = [msgspec.json.encode(list_cards()).decode() for list_cards in (env_cards, task_cards)]
    order = json.dumps(
        {
            "path": sys.path,
            "make": pickle.dumps(subject.make).hex(),
            "turns": subject.turns,
            "envs": cards[0],
            "tasks": cards[1],
            **what,
        }
    )
    code = (
        "import json, sys; order = json.load(sys.stdin); sys.path[:] = order['path']; "
        "from agentgym._probe import _serve; _serve(order)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=order,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONIOENCODING": "utf-8"},
    )
    if done.returncode:
        raise RuntimeError(f"the other process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    records: list[Flat] = json.loads(done.stdout.rpartition("\n")[2])
    return records


def _serve(order: dict[str, Any]) -> None:
    import sys

    for env_card in msgspec.json.decode(order["envs"], type=list[EnvCard]):
        register_env(env_card)
    for task_card in msgspec.json.decode(order["tasks"], type=list[TasksCard]):
        register_tasks(task_card)
    env = unwrap(pickle.loads(bytes.fromhex(order["make"]))())
    try:
        if "saved" in order:
            observation, info = env.restore(bytes.fromhex(order["saved"]))
            records = [flatten({"observation": observation, "info": info})]
            records += [flat_step(take(env, action)) for action in order["actions"]]
        else:
            records = transcript(env, order["seeds"], order["turns"])
    finally:
        env.close()
    sys.stdout.write("\n" + json.dumps(records))
