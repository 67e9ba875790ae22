"""Small environments for tests: one that counts, and one that breaks in the way its task says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from agentgym.env import AgentEnv, Outcome
from agentgym.errors import DataError, InfrastructureError
from agentgym.policies.base import Policy, Reply, Request
from agentgym.registry import EnvCard, TasksCard, register_env, register_tasks
from agentgym.task import ListTaskSet, Task, TaskSet

FAULTS = (
    "raise in reset",
    "raise in step",
    "killed in step",
    "exit in step",
    "hang in reset",
    "hang in step",
    "hang without the interpreter",
    "garbage observation",
    "garbage reward",
    "unpicklable info",
    "infrastructure",
    "broken data",
)


def counter_tasks(variant: str, size: int = 40) -> TaskSet:
    """Tasks "count/000" ... of the counting world."""
    n = int(variant) if variant else size
    return ListTaskSet(
        f"count/tasks:{n}",
        [
            Task(id=f"count/{i:04}", family="count", kind=("even", "odd")[i % 2], split="test", instruction=f"Say {i}.")
            for i in range(n)
        ],
    )


def faulty_tasks(variant: str) -> TaskSet:
    """One task a fault, and healthy ones between them."""
    tasks = []
    for i, fault in enumerate(FAULTS):
        tasks.append(Task(id=f"faulty/{i:02}-ok", family="faulty", kind="ok", split="test"))
        tasks.append(Task(id=f"faulty/{i:02}", family="faulty", kind=fault, split="test"))
    return ListTaskSet("faulty/tasks", tasks)


class _State(msgspec.Struct):
    count: int
    noise: float


class CountEnv(AgentEnv):
    """Ten turns; "up" counts; counting to three solves it. Observations show a random number, to test seeds."""

    family: ClassVar[str] = "count"
    capabilities: ClassVar[frozenset[str]] = frozenset({"snapshot", "admissible", "state_key", "expert", "checkpoints"})
    default_tasks: ClassVar[str] = "count/tasks"
    default_max_turns: ClassVar[int] = 10

    def __init__(self, *, delay: float = 0.0, split: str = "test", **options: Any) -> None:
        super().__init__(split=split, **options)
        self.delay = delay
        self.state = _State(0, 0.0)

    def _start(self, task: Task) -> Outcome:
        self.state = _State(0, float(self.np_random.random()))
        return Outcome(f"count is 0, noise {self.state.noise:.6f}", score=0.0)

    def _act(self, action: str) -> Outcome:
        if self.delay:
            time.sleep(self.delay)
        self.state.noise = float(self.np_random.random())
        if action not in ("up", "down"):
            return Outcome(f"I know only up and down. noise {self.state.noise:.6f}", valid=False)
        self.state.count += 1 if action == "up" else -1
        done = self.state.count == 3
        return Outcome(
            f"count is {self.state.count}, noise {self.state.noise:.6f}",
            score=max(0, self.state.count) / 3,
            success=1 if done else -1,
            done=done,
        )

    def _save(self) -> bytes:
        return msgspec.msgpack.encode(self.state)

    def _load(self, task: Task, payload: bytes) -> None:
        self.state = msgspec.msgpack.decode(payload, type=_State)

    def _admissible(self) -> tuple[str, ...]:
        return ("down", "up")

    def _state_key(self) -> str:
        return f"{self.state.count}"

    def _checkpoints(self) -> tuple[str, ...]:
        return tuple(f"count {i}" for i in range(1, self.state.count + 1))

    def expert(self) -> str | None:
        return "up"


class FaultyEnv(CountEnv):
    """Breaks at its second step (or in reset) in the way its task's kind says; "ok" tasks never do."""

    family: ClassVar[str] = "faulty"
    default_tasks: ClassVar[str] = "faulty/tasks"

    def _start(self, task: Task) -> Outcome:
        if task.kind == "raise in reset":
            raise RuntimeError("planted in reset")
        if task.kind == "hang in reset":
            time.sleep(3600)
        if task.kind == "broken data":
            raise DataError("game.bin", "planted damage", "Fetch it again")
        return super()._start(task)

    def _act(self, action: str) -> Outcome:
        outcome = super()._act(action)
        if self.state.count < 2 or self.task is None:
            return outcome
        kind = self.task.kind
        if kind == "raise in step":
            raise ZeroDivisionError("planted in step")
        if kind == "killed in step":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit in step":
            sys.exit(3)
        if kind == "hang in step":
            time.sleep(3600)
        if kind == "hang without the interpreter":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            while True:
                sum(range(10_000_000))
        if kind == "garbage observation":
            return outcome._replace(observation=b"bytes")  # type: ignore[arg-type]
        if kind == "garbage reward":
            return outcome._replace(reward=float("nan"))
        if kind == "unpicklable info":
            return outcome._replace(extra={"f": lambda: None})
        if kind == "infrastructure":
            raise InfrastructureError("the retriever is down")
        return outcome


class FlakyEnv(CountEnv):
    """Raises at the second step until the file named by `marker` exists, which it then makes: heals at a retry."""

    def __init__(self, *, marker: str, **options: Any) -> None:
        super().__init__(**options)
        self.marker = Path(marker)

    def _act(self, action: str) -> Outcome:
        outcome = super()._act(action)
        if self.state.count == 2 and not self.marker.exists():
            self.marker.touch()
            raise InfrastructureError("flaky")
        return outcome


class UpPolicy(Policy):
    """Says up, or by its generator sometimes down."""

    name = "up"

    def __init__(self, argument: str | None = None, *, noise: float = 0.0) -> None:
        self.noise = noise

    def act(self, requests: Any) -> list[Reply]:
        return [Reply(text=self._choose(request)) for request in requests]

    def _choose(self, request: Request) -> str:
        return "down" if self.noise and request.rng.random() < self.noise else "up"


class TokenPolicy(UpPolicy):
    """Also gives token ids and log-probabilities, as a language model would."""

    name = "tokens"

    def act(self, requests: Any) -> list[Reply]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Reply:
        turn = len(request.history)
        return Reply(
            text=self._choose(request),
            prompt_ids=np.arange(10 * turn, 10 * turn + 5, dtype=np.int32),
            kept_ids=7 * turn,
            completion_ids=np.array([turn, 2**31 - 1], dtype=np.int32),
            logprobs=np.array([-0.5, -1e-7 * turn], dtype=np.float32),
            usage={"prompt_tokens": 5.0, "completion_tokens": 2.0},
        )


register_env(EnvCard(id="test/Count-v0", family="count", entry_point="tests.worlds:CountEnv"))
register_env(EnvCard(id="test/Faulty-v0", family="faulty", entry_point="tests.worlds:FaultyEnv"))
register_env(EnvCard(id="test/Flaky-v0", family="flaky", entry_point="tests.worlds:FlakyEnv"))
register_tasks(TasksCard(name="count/tasks", entry_point="tests.worlds:counter_tasks"))
register_tasks(TasksCard(name="faulty/tasks", entry_point="tests.worlds:faulty_tasks"))
