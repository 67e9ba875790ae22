"""`agentgym replay`: re-steps a run without its policy."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from agentgym.cli.options import Backend, RunArgument, Workers
from agentgym.replay import replay_run


def replay(
    run: RunArgument,
    backend: Backend = "processes",
    workers: Workers = 1,
    most: Annotated[int, typer.Option(min=1, help="Differences to print.")] = 20,
) -> None:
    """Re-steps every episode of a run and names the first turn that differs; exit code 1 if one does."""
    console = Console(highlight=False, soft_wrap=True)
    report = replay_run(
        run, backend=backend, workers=workers, notice=lambda text: console.print(f"[yellow]note:[/] {escape(text)}")
    )
    for problem in report.problems:
        console.print(f"[bold red]differs[/]  {escape(problem)}")
    for difference in report.differences[:most]:
        console.print(f"[bold red]differs[/]  {escape(str(difference))}")
    if len(report.differences) > most:
        console.print(f"... and {len(report.differences) - most} more (--most)")
    console.print(
        f"{report.episodes} episodes re-stepped, {len(report.differences)} differ, {report.faults} faults left out; "
        f"compared: {report.verified}"
    )
    if not report.ok:
        raise typer.Exit(1)
