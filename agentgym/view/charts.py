"""Charts as SVG text, without scripts and without outside references, and the numbers that they show.

Colours are CSS variables --run0 ... --run5 of the page, so that they follow its light or dark scheme; runs are told
apart by the page's own legend, which wraps on a narrow screen.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pygal
from pygal.style import Style

from agentgym.episode import Episode
from agentgym.metrics import Estimate, Summary
from agentgym.view.table import plain

COLOURS = 6
_DASHES = ("none", "9,4", "3,3", "12,4,3,4", "1,4", "16,6")
_MOST_BINS = 10


class TurnBin(msgspec.Struct, frozen=True):
    """Episodes by their number of turns: what the charts of turns show, as numbers.

    Attributes:
        low, high: first and last number of turns.
        ended: share of the finished episodes that ended within the bin, one a run; None without episodes.
        solved: share of the episodes with a verdict that were solved within `high` turns, one a run.
    """

    low: int
    high: int
    ended: list[float | None]
    solved: list[float | None]

    @property
    def label(self) -> str:
        """The numbers of turns, as "6-10"."""
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def turn_bins(runs: Mapping[str, Sequence[Episode]]) -> list[TurnBin]:
    """At most ten bins of equal width; the first takes episodes of no turn too."""
    longest = max((len(e.turns) for episodes in runs.values() for e in episodes if e.finished), default=0)
    width = max(1, -(-longest // _MOST_BINS))
    bins = []
    for low in range(1, longest + 1, width):
        high = min(low + width - 1, longest)
        ended, solved = [], []
        for episodes in runs.values():
            lengths = [max(1, len(e.turns)) for e in episodes if e.finished]
            judged = _judged(episodes)
            within = sum(e.outcome == "success" and len(e.turns) <= high for e in judged)
            ended.append(sum(low <= n <= high for n in lengths) / len(lengths) if lengths else None)
            solved.append(within / len(judged) if judged else None)
        bins.append(TurnBin(low, high, ended, solved))
    return bins


def success_by_kind(summaries: Mapping[str, Summary]) -> str:
    """Bars of the success rate of each kind, one colour a run, with 95% intervals."""
    kinds = sorted({kind for summary in summaries.values() for kind in summary.kinds})
    height = 70 + (len(kinds) + 1) * (14 + 16 * len(summaries))
    chart = pygal.HorizontalBar(**_options(len(summaries), 560, height), range=(0, 100), value_formatter=_percent)
    chart.x_labels = ["all", *(plain(kind).replace("_", " ") for kind in reversed(kinds))]  # drawn from the bottom up
    chart.y_labels = range(0, 101, 20)
    for summary in summaries.values():
        groups = [summary.overall, *(summary.kinds.get(kind) for kind in reversed(kinds))]
        chart.add("", [_bar(group.success if group else Estimate()) for group in groups])
    return _inline(chart, "success", "Success rate of each kind of task with 95% intervals, as bars")


def solved_within(runs: Mapping[str, Sequence[Episode]]) -> str:
    """Share of judged episodes that were solved within t turns, one line a run."""
    longest = max((len(e.turns) for episodes in runs.values() for e in episodes if e.finished), default=1) or 1
    chart = pygal.XY(
        **_options(len(runs), 480, 320, stroke_width="2.5"),
        range=(0, 100),
        xrange=(0, longest),
        show_dots=False,
        value_formatter=_percent,
        x_value_formatter=lambda turns: f"{turns:.0f}",
        x_title="turns",
        y_title="solved",
    )
    chart.y_labels = range(0, 101, 20)
    for index, episodes in enumerate(runs.values()):
        judged = _judged(episodes)
        points: list[tuple[float, float]] = [(0, 0.0)] if judged else []
        for number, length in enumerate(sorted(len(e.turns) for e in judged if e.outcome == "success"), 1):
            points += [(length, points[-1][1]), (length, 100 * number / len(judged))]
        if points:
            points.append((longest, points[-1][1]))
        chart.add("", points, stroke_style={"width": 2.5, "dasharray": _DASHES[index % len(_DASHES)]})
    return _inline(chart, "solved", "Share of episodes solved within a number of turns, as lines")


def turns_histogram(bins: Sequence[TurnBin], runs: int) -> str:
    """Bars of the share of finished episodes by their number of turns, one colour a run."""
    chart = pygal.Bar(
        **_options(runs, 480, 320), range=(0, 100), value_formatter=_percent, x_title="turns, up to", y_title="episodes"
    )
    chart.x_labels = [str(each.high) for each in bins]  # whole ranges would overlap
    chart.y_labels = range(0, 101, 20)
    for run in range(runs):
        chart.add("", [None if (share := each.ended[run]) is None else 100 * share for each in bins])
    return _inline(chart, "turns", "Share of finished episodes by number of turns, as bars")


def _judged(episodes: Sequence[Episode]) -> list[Episode]:
    return [episode for episode in episodes if episode.outcome in ("success", "failure")]


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _bar(estimate: Estimate) -> dict[str, Any] | None:
    if estimate.value is None:
        return None
    bar: dict[str, Any] = {"value": 100 * estimate.value}
    if estimate.low is not None and estimate.high is not None:
        bar["ci"] = {"low": 100 * estimate.low, "high": 100 * estimate.high}
    return bar


def _options(runs: int, width: int, height: int, *, stroke_width: str = "1.3") -> dict[str, Any]:
    style = Style(
        background="transparent",
        plot_background="transparent",
        foreground="currentColor",
        foreground_strong="currentColor",
        foreground_subtle="currentColor",
        colors=tuple(itertools.islice(itertools.cycle(f"var(--run{i})" for i in range(COLOURS)), max(1, runs))),
        font_family="inherit",
        label_font_size=16,
        major_label_font_size=16,
        title_font_size=16,
        no_data_font_size=20,
        opacity=".8",
        opacity_hover=".8",
        stroke_width=stroke_width,
        stroke_width_hover=stroke_width,
        guide_stroke_color="var(--line)",
        major_guide_stroke_color="var(--line)",
        guide_stroke_dasharray="0",
        major_guide_stroke_dasharray="0",
        transition="0s",
    )
    return {
        "style": style,
        "js": [],
        "explicit_size": False,
        "width": width,
        "height": height,
        "margin": 4,
        "margin_right": 24,
        "show_legend": False,
        "truncate_label": -1,
        "no_data_text": "no episodes",
        "disable_xml_declaration": True,
    }


def _inline(chart: Any, name: str, label: str) -> str:
    """The SVG for putting into a page: named for screen readers, no script, no XML namespaces of tools."""
    chart.uuid = name  # instead of a random one: the same runs give the same page
    svg = str(chart.render(is_unicode=True))
    svg = re.sub(r"<script.*?</script>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<title>.*?</title>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<desc[^>]*>.*?</desc>", "", svg, flags=re.DOTALL)  # pygal's hover data, which needs its script
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows the namespace of SVG
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}; the numbers are in the tables" ', 1)
