"""Progress of a study: a line for every running run and one for all, or single lines where there is no terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agentgym.baselines.study.plan import PlannedRun


class Tail:
    """Follows a metrics.jsonl that another process writes.

    Args:
        path: the file; it need not exist yet.

    Attributes:
        iteration: the last finished one.
        state: newest success, in words.
    """

    def __init__(self, path: Path) -> None:
        self.iteration = 0
        self._path = path
        self._place = 0
        self._train = self._held_out = ""

    @property
    def state(self) -> str:
        """Newest success in training and on held-out tasks."""
        return "  ".join(text for text in (self._train, self._held_out) if text)

    def read(self) -> None:
        """Reads the whole lines that were added; from the start where the file was cut or replaced."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._place:
                    self._place = 0
                file.seek(self._place)
                lines = file.readlines()
        except FileNotFoundError:
            return
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._place += len(line)
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the summary refuses it, with its number
            if isinstance(row, dict):
                self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        if row.get("kind") == "train":
            self.iteration = int(row["iteration"])
            self._train = f"train {100 * row.get('success', 0):.0f}%"
        elif row.get("kind") == "eval" and row.get("mode") == "sampled":
            self._held_out = f"held-out {100 * row.get('success', 0):.0f}%"


class StudyProgress:
    """What is going on, on standard error.

    Args:
        console: where to show it.
        name: of the study.
        runs: those to be done.
    """

    def __init__(self, console: Console, name: str, runs: Sequence[PlannedRun]) -> None:
        self._console = console
        self._iterations = {run.id: 0 for run in runs}
        self._ended = 0
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=900,  # runs of different speed follow each other
        )
        total = sum(run.iterations for run in runs)
        self._total = self._progress.add_task(f"[bold]{escape(name)}[/]", total=total, state="")
        self._show()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, run: PlannedRun, *, resumed: bool) -> None:
        """A run starts or goes on."""
        self._tasks[run.id] = self._progress.add_task(escape(run.id), total=run.iterations, state="starting")
        if not self._console.is_terminal:
            self._line(f"{run.id}: {'continued' if resumed else 'started'}")

    def advance(self, run: PlannedRun, tail: Tail) -> None:
        """A run has got somewhere."""
        self._iterations[run.id] = tail.iteration
        self._progress.update(self._tasks[run.id], completed=tail.iteration, state=tail.state or "starting")
        self._show()

    def end(self, run: PlannedRun, text: str, detail: str = "") -> None:
        """A run has ended: `text` in a line, `detail` below it."""
        self._ended += 1
        self._iterations[run.id] = run.iterations  # what a run does not need any more is not left to do either
        if run.id in self._tasks:
            self._progress.remove_task(self._tasks.pop(run.id))
        self._show()
        self._line(f"{run.id}: {text} ({self._ended}/{len(self._iterations)})")
        if detail:
            self._console.print(detail, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        state = f"{self._ended}/{len(self._iterations)} runs"
        self._progress.update(self._total, completed=sum(self._iterations.values()), state=state)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
