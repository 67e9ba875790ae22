"""`agentgym study`: runs what a study still lacks, then writes its report."""

from __future__ import annotations

import math
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentgym.baselines.study.analyse import Analysis, analyse
from agentgym.baselines.study.plan import check_settings, model_digests, planned_runs, read_study, select
from agentgym.baselines.study.report import write_report
from agentgym.baselines.study.run import Tally, drive, read_failures
from agentgym.baselines.study.summary import read_summary
from agentgym.errors import UsageError
from agentgym.view.table import plain

_OUT = Path("runs/study")
_RESULTS = Path("docs/results")


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
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of checkpoints and logs.")] = _OUT,
    results: Annotated[Path, typer.Option(help="Folder of summaries and reports, to be committed.")] = _RESULTS,
) -> None:
    """Compares training methods on one budget: methods x cold starts x seeds. Stop it at will and run it again."""
    if report_only and (only or sitting is not None):
        raise UsageError("--report-only runs nothing: leave --only and --sitting out")
    console = Console()
    plan = read_study(file)
    name = plan.study.name
    runs = planned_runs(plan)
    folder = results / name
    tally, stopped = Tally([], [], [], []), False
    again = _command(str(file), out, results, parallel=parallel, sitting=sitting, only=only or [])
    if not report_only:
        chosen = select(runs, only or [])
        check_settings(chosen)
        read_failures(folder)  # a damaged file is refused now, not after hours of runs
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it stops the runs too
        try:
            tally = drive(
                chosen, out / name, folder, name=name, parallel=parallel or plan.study.parallel, sitting=sitting
            )
        except KeyboardInterrupt:
            stopped = True
            _say(console, f"\nStopped. Continue with: {again}")
        finally:
            signal.signal(signal.SIGTERM, before)
    digests = model_digests(runs, needed=False)
    found = [summary for run in runs if (summary := read_summary(folder, run, digests)) is not None]
    analysis = analyse(plan, runs, found)
    failures = [failure for failure in read_failures(folder) if failure.id in analysis.missing]
    path = write_report(folder, analysis, failures, command=_command(_relative(file), out, results))
    console.print(_short_table(analysis))
    for text, ids in (("failed", tally.failed), ("run by another process", tally.busy), ("left", tally.left)):
        if ids:
            shown = ", ".join(ids[:8]) + (", ..." if len(ids) > 8 else "")
            _say(console, f"{text}: {len(ids)} ({shown})")
    if tally.left:
        _say(console, f"Continue with: {again}")
    _say(console, f"Report: {path}")
    if stopped:
        raise typer.Exit(130)
    if tally.failed:
        raise typer.Exit(1)


def _say(console: Console, text: str) -> None:
    """Prints a line as it is: not wrapped, so that a command in it can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _command(
    file: str,
    out: Path,
    results: Path,
    *,
    parallel: int | None = None,
    sitting: float | None = None,
    only: Sequence[str] = (),
) -> str:
    """The command that works on the same study: whatever differs from the default is in it."""
    words = ["agentgym", "study", file]
    words += ["--parallel", str(parallel)] if parallel is not None else []
    words += ["--sitting", f"{sitting:g}"] if sitting is not None else []
    words += [word for name in only for word in ("--only", name)]
    words += ["--out", out.as_posix()] if out != _OUT else []
    words += ["--results", results.as_posix()] if results != _RESULTS else []
    return shlex.join(words)


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
