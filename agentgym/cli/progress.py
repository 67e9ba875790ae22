"""Progress of an evaluation: done / total, success so far with its interval, faults, tokens, time left."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentgym.episode import Episode
from agentgym.stats import wilson


class EvalProgress:
    """A live line in a terminal; a line every tenth of the run elsewhere (logs, CI).

    Args:
        console: where to show it.
        total: number of episodes.
        label: name of the policy.
    """

    def __init__(self, console: Console, total: int, label: str) -> None:
        self._console = console
        self._total = total
        self._label = label
        self._ended: set[str] = set()
        self._solved = self._judged = self._faults = self._printed = 0
        self._tokens = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(label, total=total, state="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, done: list[Episode]) -> None:
        """Counts what a resumed run holds already."""
        for episode in done:
            self._count(episode)
        self._show()

    def advance(self, episode: Episode) -> None:
        """Counts one attempt."""
        self._count(episode)
        self._show()

    def _count(self, episode: Episode) -> None:
        if episode.outcome == "fault":
            self._faults += 1
        else:
            self._ended.add(episode.episode_id)
            if episode.outcome != "unknown":
                self._judged += 1
                self._solved += episode.outcome == "success"
        for spent in episode.usage.values():
            self._tokens += spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0)

    def _show(self) -> None:
        low, high = wilson(self._solved, self._judged)
        state = (
            f"success {100 * self._solved / self._judged:.1f}% [{100 * low:.0f}, {100 * high:.0f}]"
            if self._judged
            else "success -"
        )
        state += f"  faults {self._faults}"
        if self._tokens:
            state += f"  tokens {self._tokens:,.0f}"
        self._progress.update(self._task, completed=len(self._ended), state=state)
        tenth = 10 * len(self._ended) // max(1, self._total)
        if not self._console.is_terminal and tenth > self._printed:
            self._printed = tenth
            self._console.print(f"{self._label}: {len(self._ended)}/{self._total}  {state}", highlight=False)
