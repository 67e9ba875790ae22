"""Progress of a training run, on stderr."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class TrainProgress:
    """A line that is redrawn in a terminal, and one line now and then elsewhere.

    Args:
        console: on stderr.
        iterations: of the run.
        seconds: between lines where there is no terminal.
    """

    def __init__(self, console: Console, iterations: int, seconds: float = 15.0) -> None:
        self._console = console
        self._iterations = iterations
        self._seconds = seconds
        self._began = self._said = time.monotonic()
        self._first: int | None = None
        self._tokens = (0, 0.0)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=iterations, said="", left="-")

    def __enter__(self) -> TrainProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def watch(self, line: dict[str, Any]) -> None:
        """Takes a line of metrics.jsonl."""
        if line["kind"] == "progress":
            self._bar.update(self._task, description=f"play {line['done']}/{line['of']}")
        elif line["kind"] == "train":
            self._train(line)
        elif line["kind"] == "eval":
            where = "final" if line.get("final") else f"iteration {line['iteration']}"
            text = f"held out, {where}, {line['mode']}: success {_number(line.get('success'))} of {line['episodes']}"
            self._console.print(f"{text}, invalid {_number(line.get('invalid'))}", highlight=False)

    def _train(self, line: dict[str, Any]) -> None:
        done = line["iteration"]
        if self._first is None:
            self._first = done - 1
        each = (time.monotonic() - self._began) / max(1, done - self._first)
        left = _clock(each * (self._iterations - done))
        tokens, seconds = line["tokens"], line["seconds"]
        rate = (tokens - self._tokens[0]) / max(1e-9, seconds - self._tokens[1])
        self._tokens = (tokens, seconds)
        said = (
            f"success {_number(line.get('success'))} return {_number(line.get('outcome'))} "
            f"kl {_number(line.get('approx_kl'))} entropy {_number(line.get('entropy'))} "
            f"clipped {_number(line.get('clip_share'))} {rate:.0f} tok/s"
        )
        if line["faults"]:
            said += f" faults {line['faults']}"
        if line["silent_groups"] and "ratio" in line:
            said += f" no signal {line['silent_groups']}/{line['groups']}"
        self._bar.update(self._task, completed=done, description="train", said=said, left=left)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._said > self._seconds or done == self._iterations):
            self._said = now
            self._console.print(f"iteration {done}/{self._iterations}  {said}  left {left}", highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
