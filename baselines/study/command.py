"""`agentgym study`: runs what a study still lacks, then writes its report."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agentgym.baselines.study.analyse import Analysis, analyse
from agentgym.baselines.study.plan import check_settings, model_digests, planned_runs, read_study, select
from agentgym.baselines.study.report import write_report
from agentgym.baselines.study.run import Tally, drive, read_failures
from agentgym.baselines.study.summary import read_summary
from agentgym.errors import UsageError
from agentgym.view.table import plain


def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="Study file, see baselines/configs/study-s.toml.")],
    parallel: Annotated[
        int | None, typer.Option("--parallel", "-p", min=1, help="Runs at a time. [default: the file's]")
    ] = None,
    sitting: Annotated[
        float | None, typer.Option(metavar="MINUTES", min=0, help="Start no run after this time; continue later.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="Run only this method of the study; may be repeated.")
    ] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Run nothing, write the report.")] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of checkpoints and logs.")] = Path("runs/study"),
    results: Annotated[Path, typer.Option(help="Folder of summaries and reports, to be committed.")] = Path(
        "docs/results"
    ),
) -> None:
    """Compares training methods on one budget: methods x cold starts x seeds. Stop it at will and run it again."""
    if report_only and (only or sitting is not None):
        raise UsageError("--report-only runs nothing: leave --only and --sitting out")
    console = Console()
    plan = read_study(file)
    name = plan.study.name
    runs = planned_runs(plan)
    folder = results / name
    tally = Tally([], [], [], [])
    if not report_only:
        chosen = select(runs, only or [])
        check_settings(chosen)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it stops the runs too
        try:
            tally = drive(
                chosen, out / name, folder, name=name, parallel=parallel or plan.study.parallel, sitting=sitting
            )
        except KeyboardInterrupt:
            console.print(f"\nStopped. Continue with: agentgym study {escape(str(file))}", highlight=False)
            raise typer.Exit(130) from None
        finally:
            signal.signal(signal.SIGTERM, before)
    digests = model_digests(runs, needed=False)
    found = [summary for run in runs if (summary := read_summary(folder, run, digests)) is not None]
    analysis = analyse(plan, runs, found)
    failures = [failure for failure in read_failures(folder) if failure.id in analysis.missing]
    path = write_report(folder, analysis, failures, command=f"agentgym study {_relative(file)}")
    console.print(_short_table(analysis))
    for text, ids in (("failed", tally.failed), ("run by another process", tally.busy), ("left", tally.left)):
        if ids:
            shown = ", ".join(ids[:8]) + (", ..." if len(ids) > 8 else "")
            console.print(f"{text}: {len(ids)} ({shown})", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)
    if tally.failed:
        raise typer.Exit(1)


def _relative(file: Path) -> str:
    """The path as another reader may use it: from here, or else the name alone."""
    path = os.path.relpath(file)
    return file.name if path.startswith("..") else Path(path).as_posix()


def _short_table(analysis: Analysis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method")
    for column in ("rank", "runs", "mean success [95%]", "against baseline", "p"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in analysis.methods:
        mean, (low, high), *_ = result.headline
        difference = result.difference
        table.add_row(
            Text(plain(result.entry.shown)),
            str(result.rank or "-"),
            f"{len(result.runs)}/{result.planned}",
            "-" if math.isnan(mean) else f"{100 * mean:.1f}%" + ("" if math.isnan(low) else _range(low, high)),
            "-" if difference is None or math.isnan(difference.value) else f"{100 * difference.value:+.1f}",
            "-" if difference is None or math.isnan(difference.p) else f"{difference.p:.3f}",
        )
    return table


def _range(low: float, high: float) -> str:
    return f" [{100 * low:.0f}, {100 * high:.0f}]"
