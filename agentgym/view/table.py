"""Tables of runs for the terminal."""

from __future__ import annotations

import re

from rich import box
from rich.console import Group as RenderGroup
from rich.table import Table
from rich.text import Text

from agentgym.episode import RunConfig
from agentgym.metrics import Comparison, Estimate, Group, Summary

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def plain(text: str) -> str:
    """Text of a log without characters that steer a terminal, turn the writing direction or are not allowed in XML."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def percent(estimate: Estimate) -> str:
    """A rate in percent with its interval."""
    if estimate.value is None:
        return "-"
    text = f"{100 * estimate.value:.1f}%"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def run_title(config: RunConfig) -> str:
    """Environment, task set with the head of its digest, split and policies, as every table shows them."""
    policies = ", ".join(str(record.get("spec", role)) for role, record in config.policies.items())
    tasks = f"{config.task_set.name} ({config.task_set.digest[:8]})"
    return f"{config.name or 'run'}: {config.env}, {tasks}, {config.split}, policy {policies}, seed {config.seed}"


def run_table(summary: Summary, config: RunConfig) -> RenderGroup:
    """One row a kind, and the total, under a title."""
    spends = summary.overall.tokens > 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kind", overflow="fold", min_width=min(30, max(map(len, summary.kinds), default=4)))
    groups = [*summary.kinds.values(), summary.overall]
    graded = any(group.score.value != group.success.value for group in groups)  # else the score says nothing more
    columns = ["n", "success [95%]", *(["score"] if graded else []), "turns", "invalid", "faults"]
    for column in columns + (["tokens", "cost $"] if spends else []):
        table.add_column(column, justify="right", no_wrap=True)
    for kind, group in summary.kinds.items():
        table.add_row(Text(plain(kind)), *_cells(group, graded, spends))
    table.add_section()
    table.add_row("all", *_cells(summary.overall, graded, spends), style="bold")
    notes = []
    if summary.overall.episodes < summary.planned:
        notes.append(f"incomplete: {summary.overall.episodes} of {summary.planned} planned episodes are in the log")
    if summary.overall.unknown:
        notes.append(f"without a verdict: {summary.overall.unknown}, not counted in the success rate")
    if summary.overall.fault_causes:
        causes = ", ".join(f"{cause} {count}" for cause, count in summary.overall.fault_causes.items())
        notes.append(f"faults are not counted as failures: {causes}; attempts tried again: {summary.overall.retried}")
    for name, values in (("pass@k", summary.overall.pass_at_k), ("pass^k", summary.overall.pass_hat_k)):
        if values:
            notes.append(f"{name}: " + ", ".join(f"k={k} {100 * value:.1f}%" for k, value in values.items()))
    return RenderGroup(
        Text(plain(run_title(config)), style="bold"), table, *(Text(plain(note), style="dim") for note in notes)
    )


def _cells(group: Group, graded: bool, spends: bool) -> list[str]:
    cells = [
        str(group.finished),
        percent(group.success),
        *([number(group.score.value, 3)] if graded else []),
        number(group.turns),
        "-" if group.invalid is None else f"{100 * group.invalid:.1f}%",
        str(group.faults),
    ]
    return cells + ([number(group.tokens, 0), number(group.cost, 4)] if spends else [])


def compare_table(comparison: Comparison, first: str, second: str) -> Table:
    """Two runs, paired by episode."""
    first, second = plain(first) or "first", plain(second) or "second"
    title = Text(f"{second} against {first}, paired by episode")
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in ("pairs", first, second, "difference [95%]", "only first", "only second", "p"):
        table.add_column(Text(column), justify="right", no_wrap=column.startswith("diff"))
    table.add_row(
        str(comparison.pairs),
        percent(Estimate(comparison.first)),
        percent(Estimate(comparison.second)),
        percent(comparison.difference),
        str(comparison.only_first),
        str(comparison.only_second),
        "-" if comparison.p_value is None else f"{comparison.p_value:.3g}",
    )
    if comparison.left_out:
        table.caption = f"{comparison.left_out} episodes are not in both or were lost to a fault"
    return table
