"""The report of a study: README.md with its tables, and its charts as SVG files beside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from agentgym.baselines.study.analyse import Analysis, MethodResult, Point, Spread, by_env_steps, by_iteration
from agentgym.baselines.study.charts import CURVES, Dot, Line, Panel, curves, dots
from agentgym.baselines.study.plan import MethodEntry
from agentgym.baselines.study.run import Failure
from agentgym.baselines.study.summary import RunSummary
from agentgym.episode import write_atomically
from agentgym.stats import Interval
from agentgym.view.table import number, plain

REPORT = "README.md"
_FEW_RUNS = 5
_FEW_STARTS = 5
_LEAST_STARTS = 3
_LEAST_POINTS = 0.05  # less is 0.0 in print


def write_report(folder: Path, analysis: Analysis, failures: Sequence[Failure], *, command: str) -> Path:
    """Writes the report and its charts.

    Args:
        folder: of the study's results.
        analysis: what came out.
        failures: of runs that have no summary.
        command: with which the study is made.

    Returns:
        The report's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = [result for result in analysis.methods if result.runs]
    charts = {}
    if shown:
        charts = {
            "headline.svg": _dots(analysis, shown),
            "iterations.svg": _curves(
                analysis, lambda runs: by_iteration(runs, analysis.study), "iterations of training"
            ),
            "env_steps.svg": _curves(analysis, by_env_steps, "environment steps"),
        }
    for name, svg in charts.items():
        write_atomically(folder / name, svg.encode())
    path = folder / REPORT
    write_atomically(path, report_text(analysis, failures, command=command).encode())
    return path


def report_text(analysis: Analysis, failures: Sequence[Failure], *, command: str) -> str:
    """The report in Markdown."""
    table = analysis.study.study
    parts = [f"# {plain(table.title or table.name)}", f"```\n{command}\n```", _setting(analysis)]
    shown = [result for result in analysis.methods if result.runs]
    if shown:
        parts += [
            "## Result",
            _headline_table(analysis),
            "![Mean held-out success of each method with its interval](headline.svg)",
            "\n".join(f"- {note}" for note in notes(analysis)),
            "## Learning curves",
            "Mean over the runs of each method, with 95% intervals over the runs at each point. "
            "The grey curve in every chart is the same: the method with which the others are compared.",
            "![Held-out success by iteration](iterations.svg)",
            "![Held-out success by environment steps](env_steps.svg)",
            "## At the end of training",
            _final_table(shown, table.threshold),
            "## What each method used",
            _cost_table(shown),
            "## How far this can be trusted",
            _check_table(analysis, shown),
            (_OVER_STARTS if _clustered(shown) else _NOT_OVER_STARTS) + "\n" + _CHECKS,
        ]
    if analysis.missing:
        parts += ["## Runs without a result", _missing(analysis, failures)]
    return "\n\n".join(parts) + "\n"


def _setting(analysis: Analysis) -> str:
    table, train = analysis.study.study, analysis.study.train
    starts = "; ".join(
        f"`{start.name}` with seeds {', '.join(map(str, start.seeds or table.seeds))}" for start in table.cold_starts
    )
    evaluation = train["evaluation"]
    budget = [_count(train["iterations"], "iteration")]
    if table.max_env_steps:
        budget.append(f"{table.max_env_steps:,} environment steps")
    if table.max_tokens:
        budget.append(f"{table.max_tokens:,} tokens (generated ones and those of extra scoring passes)")
    first = ", whichever ends first" if len(budget) > 1 else ""
    every = "iteration" if evaluation["every"] == 1 else f"{evaluation['every']} iterations"
    world = str(train.get("env_kwargs", {}).get("tasks", train.get("env", "")))
    lines = [
        f"World `{world}`. Every method starts from the same saved models: {starts}.",
        f"The budget of a run is {', '.join(budget)}{first}.",
        f"Held-out success is measured every {every} on "
        f"{_known(evaluation, 'episodes')} unseen tasks, and at the end on {_known(evaluation, 'final')}.",
        _HEADLINE,
        *([plain(table.tuning)] if table.tuning else []),
        "Settings, seeds and methods are in the study file; each run's summary is in `runs/`.",
    ]
    return " ".join(lines)


_HEADLINE = (
    "Mean held-out success, by which methods are ranked, is the mean of all evaluations with sampled commands after "
    "iteration 0, each with the same weight; where the budget ended a run early, its last value is carried forward to "
    "the evaluations left out."
)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _known(table: dict[str, object], key: str) -> str:
    return str(table.get(key, "the usual number of"))


def _headline_table(analysis: Analysis) -> str:
    baseline = next(m.shown for m in analysis.study.method if m.name == analysis.study.baseline)
    rows = []
    for result in analysis.methods:
        difference = result.difference
        rows.append(
            [
                str(result.rank or "-"),
                result.entry.shown,
                result.card.removeprefix("formulas ") or "-",
                f"{len(result.runs)}/{result.planned}",
                _percent(result.headline),
                "-" if difference is None else _points(difference.value, difference.interval),
                "-" if difference is None or math.isnan(difference.p) else _p(difference.p),
            ]
        )
    head = ["rank", "method", "formulas", "runs", "mean held-out success [95%]"]
    return _table([*head, f"against {baseline}, points [95%]", "p (Holm)"], rows, left=3)


def _final_table(shown: Sequence[MethodResult], threshold: float) -> str:
    def share(result: MethodResult, value: Callable[[RunSummary], float | None]) -> str:
        mean = result.over(value).mean
        return "-" if math.isnan(mean) else f"{100 * mean:.1f}%"

    rows = [
        [
            result.entry.shown,
            _percent(result.over(lambda run: run.sampled.success)),
            _percent(result.over(lambda run: run.greedy.success)),
            _points(result.gain.mean, result.gain.interval),
            share(result, lambda run: run.sampled.invalid),
            _mean(result.over(_entropy), 3),
            _mean(result.over(lambda run: run.sampled.outcome), 3),
            _mean(result.over(lambda run: run.sampled.turns), 1),
            _mean(result.over(lambda run: run.sampled.tokens), 0),
            _reached(result),
        ]
        for result in shown
    ]
    head = ["method", "sampled [95%]", "greedy [95%]", "gain over the start, points", "invalid", "entropy"]
    head += ["return", "turns", "tokens an episode", f"iterations to {100 * threshold:g}%"]
    return (
        _table(head, rows, left=1)
        + "\n\nInvalid commands, entropy (mean -log p of the sampled tokens), return (without the costs by which a "
        "method shapes it), turns and tokens are those of the final sampled evaluation; intervals are over the runs. "
        "Iterations are the median of the runs that got there."
    )


def _entropy(run: RunSummary) -> float | None:
    return run.trained_entropy if run.sampled.entropy is None else run.sampled.entropy


def _cost_table(shown: Sequence[MethodResult]) -> str:
    def total(result: MethodResult, name: str) -> str:
        return _mean(result.over(lambda run: getattr(run.totals, name)), 0)

    names = ("iterations", "env_steps", "tokens", "scored_tokens", "trained_tokens", "seconds", "faults")
    rows = [
        [
            result.entry.shown,
            *(total(result, name) for name in names),
            _mean(result.over(_silent), 1) + "%",
        ]
        for result in shown
    ]
    head = ["method", "iterations", "environment steps", "generated tokens", "scored tokens", "trained tokens"]
    return (
        _table([*head, "seconds", "faults", "groups without signal"], rows, left=1)
        + "\n\nMeans over the runs. Scored tokens were passed through a model once more, for a reference, a teacher or "
        "values. Seconds are those of the trainer on one thread, several runs at a time on the same machine."
    )


def _silent(run: RunSummary) -> float:
    return 100 * run.totals.silent_groups / max(1, run.totals.groups)


_OVER_STARTS = """\
- The interval of a mean is over the runs: it speaks of further seeds from these cold starts. Clustered by cold start it
  speaks of other cold starts too, and is wide where there are few of them."""
_NOT_OVER_STARTS = """\
- The interval of a mean is over the runs: it speaks of further seeds from these cold starts. What other cold starts
  would give cannot be said from so few of them; the differences on each are in the table."""
_CHECKS = """\
- Differences come from pairs, the same cold start and seed; the noise is estimated from all methods together, taken to
  be equal for all. What the pairs of the two methods say alone is given beside it: where the two intervals differ
  much, trust the wider one.
- A method's rank is 1 + the number of methods shown to be better than it, all pairs corrected together (Holm). An
  equal rank does not show that methods are equal, only that these runs do not tell them apart. The p-values of the
  table are corrected for the comparisons with its one method alone, fewer than all pairs.
- Success over environment steps is the mean over the first steps that all runs have made, for methods that play
  unequal numbers of episodes an iteration."""


def _clustered(shown: Sequence[MethodResult]) -> bool:
    """Whether there are enough cold starts for an interval over them: of two it has one degree of freedom."""
    return min(len({run.cold_start for run in result.runs}) for result in shown) >= _LEAST_STARTS


def _check_table(analysis: Analysis, shown: Sequence[MethodResult]) -> str:
    starts = [start.name for start in analysis.study.study.cold_starts]
    rows = []
    clustered = _clustered(shown)
    for result in shown:
        difference = result.difference
        rows.append(
            [
                result.entry.shown,
                *([_interval(_share(result.headline.clustered))] if clustered else []),
                _percent(result.by_steps),
                "-" if difference is None else str(difference.pairs),
                "-" if difference is None else _interval(difference.alone, signed=True),
                *(
                    "-" if difference is None or start not in difference.by_start
                    else f"{100 * difference.by_start[start]:+.1f}"
                    for start in starts
                ),
            ]
        )  # fmt: skip
    head = ["method", *(["mean success, clustered"] if clustered else [])]
    head += [f"over the first {analysis.horizon:,} environment steps [95%]", "pairs"]
    head += ["difference, these pairs alone", *(f"difference on `{start}`" for start in starts)]
    return _table(head, rows, left=1)


def notes(analysis: Analysis) -> list[str]:
    """What can and cannot be said, in words."""
    shown = [result for result in analysis.methods if result.runs]
    found = []
    top = [result for result in shown if result.rank == 1]
    if len(shown) > 1:
        if len(top) == len(shown):
            found.append("These runs do not tell any two places of the ranking apart from the first.")
        elif len(top) > 1:
            found.append(f"First, and not told apart from the best by these runs: {_names(top)}.")
        else:
            found.append(f"{top[0].entry.shown} is shown to be better than every other method here.")
        if not math.isnan(analysis.visible):
            found.append(_noise(analysis))
    worse = [r for r in shown if r.difference is not None and r.difference.p < 0.05 and r.difference.value < 0]
    if worse:
        baseline = next(m for m in analysis.study.method if m.name == analysis.study.baseline)
        found.append(f"Shown to be worse than {baseline.shown}: {_names(worse)}.")
    flat = [r for r in shown if r.gain.n > 1 and not r.gain.interval.low > 0]
    if flat:
        found.append(f"No gain over the cold start is shown for: {_names(flat)}.")
    short = [r for r in shown if any(run.totals.iterations < analysis.study.train["iterations"] for run in r.runs)]
    if short:
        found.append(f"The budget ended runs before the last iteration for: {_names(short)}. What their policy scored "
                     "then stands for the evaluations that are left out.")  # fmt: skip
    runs = [len(result.runs) for result in shown]
    starts = len({run.cold_start for result in shown for run in result.runs})
    if min(runs, default=0) < _FEW_RUNS:
        found.append(f"Some methods have fewer than {_FEW_RUNS} runs: their place is a first impression.")
    if starts < _FEW_STARTS:
        found.append(f"All runs start from {_count(starts, 'cold start')} in one world: the ranking need not carry "
                     "over to other worlds, or to models of another size.")  # fmt: skip
    versions = {run.code for result in shown for run in result.runs}
    if len(versions) > 1:
        found.append(f"The trainer's source changed while the study ran: runs of {len(versions)} states of it are here "
                     "(`code` in their summaries).")  # fmt: skip
    uneven = [r for r in shown if any(len(r.runs) != other for other in runs)]
    if uneven:
        found.append("The methods have unequal numbers of runs; differences are adjusted for the cold starts and seeds "
                     "that are there, means are not.")  # fmt: skip
    return found


def _noise(analysis: Analysis) -> str:
    """How far two methods had to be apart; nothing of the kind where the runs show no noise to measure it by."""
    points, freedom = 100 * analysis.visible, analysis.model.df
    if points < _LEAST_POINTS:
        return (
            "These runs show next to no noise, as where all win every task or none: no smallest difference can be "
            "given, and intervals and p-values look better than they are."
        )
    degrees = f"{freedom} degree{'' if freedom == 1 else 's'} of freedom"
    return (
        f"Two methods had to differ by about {points:.1f} points to be told apart; the noise between runs is "
        f"{100 * analysis.model.sigma:.1f} points, {degrees}."
    )


def _missing(analysis: Analysis, failures: Sequence[Failure]) -> str:
    failed = {failure.id: failure for failure in failures}
    lines = []
    for run in analysis.missing:
        if run in failed:
            how = failed[run]
            lines.append(
                f"- `{run}` failed after iteration {how.iteration} (exit code {how.exit_code}): {plain(how.reason)}"
            )
    left = [run for run in analysis.missing if run not in failed]
    if left:
        lines.append(f"- not run yet: {len(left)}")
    if any(run in failed for run in analysis.missing):
        lines.append("- a failed run is in no mean: where a method failed on its own account its mean is too good")
    return "\n".join(lines)


def _curves(analysis: Analysis, points: Callable[[Sequence[RunSummary]], list[Point]], x_title: str) -> str:
    results = {result.entry.name: result for result in analysis.methods}

    def line(entry: MethodEntry) -> Line:
        return Line(entry.shown, points(results[entry.name].runs))

    baseline = next(entry for entry in analysis.study.method if entry.name == analysis.study.baseline)
    panels = [
        Panel(title, [line(baseline), *map(line, entries)])
        for title, entries in _panels([e for e in analysis.study.method if results[e.name].runs and e != baseline])
    ] or [Panel("", [line(baseline)])]
    return curves(panels, x_title=x_title, description=f"Held-out success by {x_title}, one small chart a group")


def _panels(entries: Iterable[MethodEntry]) -> list[tuple[str, list[MethodEntry]]]:
    """Methods by group, none larger than a chart can hold."""
    groups: dict[str, list[MethodEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    most = CURVES - 1
    return [
        (title if len(group) <= most else f"{title} ({start // most + 1})".strip(), group[start : start + most])
        for title, group in groups.items()
        for start in range(0, len(group), most)
    ]


def _dots(analysis: Analysis, shown: Sequence[MethodResult]) -> str:
    rows = [
        Dot(
            result.entry.shown,
            result.headline.mean,
            *_share(result.headline.interval),
            remark=f"rank {result.rank}",
            grey=result.entry.name == analysis.study.baseline,
        )
        for result in shown
    ]
    return dots(
        rows,
        x_title="mean held-out success over the iterations, 95% interval over runs",
        description="Mean held-out success of each method with its interval; the numbers are in the table",
    )


def _names(results: Sequence[MethodResult]) -> str:
    return ", ".join(result.entry.shown for result in results)


def _reached(result: MethodResult) -> str:
    there = [iteration for iteration in result.reached if iteration is not None]
    median = f"{statistics.median(there):g}" if there else "-"
    return f"{median} ({len(there)}/{len(result.reached)})"


def _percent(value: Spread) -> str:
    return "-" if math.isnan(value.mean) else f"{100 * value.mean:.1f}% {_interval(_share(value.interval))}".strip()


def _share(interval: Interval) -> Interval:
    """An interval of a rate; a t interval may reach beyond 0 and 1."""
    return Interval(max(0.0, interval.low), min(1.0, interval.high)) if not math.isnan(interval.low) else interval


def _points(value: float, interval: Interval) -> str:
    return "-" if math.isnan(value) else f"{100 * value:+.1f} {_interval(interval, signed=True)}".strip()


def _interval(interval: Interval, *, signed: bool = False) -> str:
    if math.isnan(interval.low):
        return ""
    sign = "+" if signed else ""
    return f"[{100 * interval.low:{sign}.1f}, {100 * interval.high:{sign}.1f}]"


def _mean(value: Spread, digits: int) -> str:
    return "-" if math.isnan(value.mean) else number(value.mean, digits)


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> str:
    """A Markdown table; the first columns are set to the left, the others to the right."""
    rule = [":--" if place < left else "--:" for place in range(len(head))]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(plain(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
