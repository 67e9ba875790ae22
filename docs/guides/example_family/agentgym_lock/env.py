"""A lock with dials from 0 to 9. Pulling it tells how many dials are right; with all of them it opens."""

from __future__ import annotations

import hashlib
import re
from typing import ClassVar

import msgspec
import numpy as np

from agentgym.env import AgentEnv, Outcome
from agentgym.errors import UsageError
from agentgym.task import ListTaskSet, Task, TaskSet

SIZES = {"train": 40, "test": 10}


def generated(variant: str = "") -> TaskSet:
    """The task set "lock/generated": the same locks wherever it is called.

    Raises:
        UsageError: for a variant, of which there are none.
    """
    if variant:
        raise UsageError(f"lock/generated has no variant {variant!r}; name it without a colon")
    tasks = []
    for number, split in enumerate(SIZES):
        draw = np.random.default_rng(number)
        for i in range(SIZES[split]):
            dials = 2 + i % 2
            code = [int(digit) for digit in draw.integers(10, size=dials)]
            task = Task(
                id=f"lock/{split}/{i:02}",
                family="lock",
                kind=f"{dials} dials",
                split=split,
                instruction=f"Open the lock: find the {dials} digits of its code.",
                data={"code": code},
            )
            tasks.append(task)
    return ListTaskSet("lock/generated", tasks, licence="Apache-2.0", source="drawn at random")


class State(msgspec.Struct):
    """Everything that an action may read or change."""

    code: list[int]
    dials: list[int]
    best: int = 0


class LockEnv(AgentEnv):
    """A combination lock; the actions are `turn dial N up`, `turn dial N down` and `pull`.

    Args:
        **options: options of every environment: tasks, split, max_turns, max_observation, action_format, render_mode.
    """

    family: ClassVar[str] = "lock"
    version: ClassVar[int] = 0
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"snapshot", "admissible", "state_key", "checkpoints", "expert", "process_score"}
    )
    default_tasks: ClassVar[str] = "lock/generated"
    default_max_turns: ClassVar[int] = 40

    _state: State

    @property
    def system_prompt(self) -> str:
        """What a language model should be told before the first observation."""
        return "You open combination locks. Reply with one of: turn dial N up, turn dial N down, pull."

    def _start(self, task: Task) -> Outcome:
        code = list(task.data["code"])
        # The only source of chance is the environment's own generator, which `reset(seed=...)` seeds.
        self._state = State(code=code, dials=[int(digit) for digit in self.np_random.integers(10, size=len(code))])
        return Outcome(f"{task.instruction} {self._show()}", score=0.0)

    def _act(self, action: str) -> Outcome:
        state = self._state
        if action == "pull":
            right = sum(dial == digit for dial, digit in zip(state.dials, state.code, strict=True))
            state.best = max(state.best, right)
            score, opened = state.best / len(state.code), right == len(state.code)
            text = "The lock opens." if opened else f"The lock stays shut; right dials: {right}."
            return Outcome(text, score=score, success=1 if opened else -1, done=opened)
        match = re.fullmatch(r"turn dial ([1-9]) (up|down)", action)
        if match is None or int(match[1]) > len(state.dials):
            # A bad action is no exception: say what was wrong.
            return Outcome(f"That does nothing. Say one of: {', '.join(self._admissible())}.", valid=False)
        index = int(match[1]) - 1
        state.dials[index] = (state.dials[index] + (1 if match[2] == "up" else -1)) % 10
        return Outcome(self._show())

    def _show(self) -> str:
        return f"The dials show {' '.join(map(str, self._state.dials))}."

    # The capabilities.

    def _save(self) -> bytes:
        return msgspec.msgpack.encode(self._state)

    def _load(self, task: Task, payload: bytes) -> None:
        self._state = msgspec.msgpack.decode(payload, type=State)

    def _admissible(self) -> tuple[str, ...]:
        turns = [f"turn dial {i + 1} {way}" for i in range(len(self._state.dials)) for way in ("up", "down")]
        return (*turns, "pull")

    def _state_key(self) -> str:
        return hashlib.sha256(self._save()).hexdigest()[:16]

    def _checkpoints(self) -> tuple[str, ...]:
        return tuple(f"{i} right" for i in range(1, self._state.best + 1))

    def expert(self) -> str | None:
        """Turns the first wrong dial the shorter way, then pulls."""
        for i, (dial, digit) in enumerate(zip(self._state.dials, self._state.code, strict=True)):
            if dial != digit:
                action = f"turn dial {i + 1} {'up' if (digit - dial) % 10 <= 5 else 'down'}"
                return self.action_format.render(action)
        return self.action_format.render("pull")
