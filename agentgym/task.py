"""Tasks and task sets: what an environment plays, addressed by id or by position within a split.

A task set is named ("alfworld/generated"), may carry a variant after a colon ("alfworld/generated:s"), and takes
options of its own. Big things are files that `TaskSet.open` returns as bytes; the rest of a task is JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from agentgym.errors import UsageError, choices

SPLIT_ALIASES: Mapping[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid_seen", "valid", "val", "dev"),
    "test": ("test", "valid_unseen", "heldout"),
}


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task: frozen and JSON-able.

    Attributes:
        id: unique within its task set, stable across versions of the code.
        family: name of the family of environments that plays it.
        kind: sub-type used in per-kind tables.
        split: the split it belongs to, by the benchmark's own name.
        instruction: what the agent is asked to do.
        data: small family-specific values.
        files: name -> sha256 (hex) of the files that `TaskSet.open` returns.
    """

    id: str
    family: str
    kind: str = ""
    split: str = ""
    instruction: str = ""
    data: dict[str, Any] = {}
    files: dict[str, str] = {}

    def digest(self) -> str:
        """sha256 (hex) of the canonical JSON of the whole task, digests of its files included."""
        return hashlib.sha256(canonical_json(self)).hexdigest()


@runtime_checkable
class TaskSet(Protocol):
    """A named, versioned collection of tasks with splits.

    Attributes:
        name: "family/set" with its variant, as printed in every table.
        version: version of the content.
        licence: SPDX id or a sentence.
        source: where the content comes from.
        digest: sha256 of the canonical content; for a generated set of (generator, version, parameters).
        splits: the benchmark's own split names -> number of tasks.
    """

    name: str
    version: str
    licence: str
    source: str
    digest: str

    @property
    def splits(self) -> Mapping[str, int]:
        """Split name -> number of tasks."""

    def at(self, split: str, index: int) -> Task:
        """The task at a position of a split (a benchmark's own split name)."""

    def get(self, task_id: str) -> Task:
        """The task of an id; raises `UsageError` when there is none."""

    def open(self, task: Task, name: str) -> bytes:
        """The content of one of the task's files."""


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no white space: equal values give equal bytes."""
    return msgspec.json.encode(value, order="deterministic")


def resolve_split(tasks: TaskSet, split: str) -> str:
    """The benchmark's own name for a split that may be given as train, validation or test.

    Raises:
        UsageError: if the set has no such split.
    """
    if split in tasks.splits:
        return split
    for candidate in SPLIT_ALIASES.get(split, ()):
        if candidate in tasks.splits:
            return candidate
    raise choices(f"split of {tasks.name}", split, list(tasks.splits))


def default_split(tasks: TaskSet) -> str:
    """The training split, or the first one of a set that has none.

    Raises:
        UsageError: if the set has no split at all.
    """
    if not tasks.splits:
        raise UsageError(f"{tasks.name} holds no tasks")
    return "train" if "train" in tasks.splits else next(iter(tasks.splits))


def select_task(tasks: TaskSet, split: str, which: str | int) -> Task:
    """The task that `options={"task": ...}` names: an id, or a position within the split.

    Raises:
        UsageError: for an id or a position that does not exist.
    """
    if isinstance(which, bool) or not isinstance(which, str | int):
        raise UsageError(f"a task is named by its id (str) or its position (int), not by {which!r}")
    if isinstance(which, str):
        return tasks.get(which)
    size = tasks.splits[split]
    if not 0 <= which < size:
        raise UsageError(
            f"task {which} is outside split {split!r} of {tasks.name}, which has {size} tasks (0 to {size - 1})"
        )
    return tasks.at(split, which)


class ListTaskSet:
    """A task set held in memory: for small sets, tests and tasks read from one file.

    Args:
        name: name of the set.
        tasks: all tasks; positions within a split follow this order.
        files: task id -> file name -> content.
        version: version of the content.
        licence: SPDX id or a sentence.
        source: where the content comes from.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[Task],
        *,
        files: Mapping[str, Mapping[str, bytes]] | None = None,
        version: str = "1",
        licence: str = "",
        source: str = "",
    ) -> None:
        self.name = name
        self.version = version
        self.licence = licence
        self.source = source
        self._files = files or {}
        self._by_id = {task.id: task for task in tasks}
        if len(self._by_id) != len(tasks):
            seen: set[str] = set()
            twice = next(task.id for task in tasks if task.id in seen or seen.add(task.id))  # type: ignore[func-returns-value]
            raise UsageError(f"task id {twice!r} occurs twice in {name}; ids must be unique")
        self._by_split: dict[str, list[Task]] = {}
        for task in tasks:
            self._by_split.setdefault(task.split, []).append(task)
        self.digest = hashlib.sha256(canonical_json([task.digest() for task in tasks])).hexdigest()

    @property
    def splits(self) -> Mapping[str, int]:
        """Split name -> number of tasks."""
        return {split: len(tasks) for split, tasks in self._by_split.items()}

    def at(self, split: str, index: int) -> Task:
        """The task at a position of a split."""
        return self._by_split[split][index]

    def get(self, task_id: str) -> Task:
        """The task of an id."""
        try:
            return self._by_id[task_id]
        except KeyError:
            raise choices(f"task of {self.name}", task_id, list(self._by_id)) from None

    def open(self, task: Task, name: str) -> bytes:
        """The content of one of the task's files."""
        try:
            return self._files[task.id][name]
        except KeyError:
            raise UsageError(f"task {task.id!r} of {self.name} has no file {name!r}") from None
