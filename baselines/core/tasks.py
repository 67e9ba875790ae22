"""Drawing tasks for training, and the fixed ones of evaluation."""

from __future__ import annotations

import numpy as np

from agentgym.baselines.core.config import TrainConfig
from agentgym.errors import UsageError
from agentgym.registry import make_env
from agentgym.task import Task, resolve_split

TRIES = 1000  # draws for one task of a wanted kind


class TaskDraw:
    """The task set of a run.

    Args:
        config: names environment, splits and kinds.

    Raises:
        UsageError: for an unknown split, or kinds that the split does not have.
    """

    def __init__(self, config: TrainConfig) -> None:
        made = make_env(config.env, **config.env_kwargs)
        self._tasks = made.task_set
        self._kinds = frozenset(config.kinds)
        self._train = resolve_split(self._tasks, config.train_split)
        self._held_out = resolve_split(self._tasks, config.evaluation.split)
        self._kept: dict[int, list[Task]] = {}

    def draw(self, rng: np.random.Generator, count: int) -> list[Task]:
        """Tasks of the training split, with replacement."""
        size = self._tasks.splits[self._train]
        drawn: list[Task] = []
        for _ in range(count * TRIES):
            task = self._tasks.at(self._train, int(rng.integers(size)))
            if not self._kinds or task.kind in self._kinds:
                drawn.append(task)
                if len(drawn) == count:
                    return drawn
        raise UsageError(f"split {self._train!r} has no tasks of the kinds {sorted(self._kinds)}")

    def held_out(self, count: int) -> list[Task]:
        """The first tasks of the evaluation split; fewer where it has fewer."""
        if count in self._kept:
            return self._kept[count]
        size = self._tasks.splits[self._held_out]
        found: list[Task] = []
        for index in range(size):
            if len(found) == count:
                break
            task = self._tasks.at(self._held_out, index)
            if not self._kinds or task.kind in self._kinds:
                found.append(task)
        if not found:
            raise UsageError(f"split {self._held_out!r} has no tasks of the kinds {sorted(self._kinds)}")
        self._kept[count] = found
        return found
