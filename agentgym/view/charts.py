"""Charts as SVG text, without scripts and without outside references."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pygal
from pygal.style import Style

from agentgym.episode import Episode
from agentgym.metrics import Estimate, Summary

COLOURS = ("#3b6fd4", "#c2571a", "#2c8a57", "#8a4fb5", "#b3364f", "#6b7280")


def _style(colours: Sequence[str]) -> Style:
    return Style(
        background="transparent",
        plot_background="transparent",
        foreground="currentColor",
        foreground_strong="currentColor",
        foreground_subtle="#88888866",
        colors=tuple(colours),
        font_family="system-ui, sans-serif",
        label_font_size=15,
        major_label_font_size=15,
        legend_font_size=15,
        value_font_size=13,
        opacity=".85",
        opacity_hover="1",
        guide_stroke_color="#88888855",
        major_guide_stroke_color="#88888855",
        guide_stroke_dasharray="0",
        major_guide_stroke_dasharray="0",
        transition="0s",
    )


def _options(colours: Sequence[str], height: int) -> dict[str, Any]:
    return {
        "style": _style(colours),
        "js": [],
        "explicit_size": False,
        "width": 900,
        "height": height,
        "margin": 8,
        "margin_right": 32,
        "legend_at_bottom": True,
        "disable_xml_declaration": True,
        "pretty_print": False,
    }


def _inline(chart: Any, label: str) -> str:
    """The SVG for putting into a page: named for screen readers, no script, no XML namespaces of tools."""
    svg = str(chart.render(is_unicode=True))
    svg = re.sub(r"<script.*?</script>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<title>.*?</title>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<desc[^>]*>.*?</desc>", "", svg, flags=re.DOTALL)  # pygal's hover data, which needs its script
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def success_by_kind(summaries: Mapping[str, Summary]) -> str:
    """Bars of the success rate of each kind, one colour a run, with 95% intervals."""
    kinds = sorted({kind for summary in summaries.values() for kind in summary.kinds})
    chart = pygal.HorizontalBar(
        **_options(COLOURS, 120 + 30 * (len(kinds) + 1) * len(summaries)), range=(0, 100), value_formatter=_percent
    )
    kinds = kinds[::-1]  # horizontal bars are drawn from the bottom up
    chart.x_labels = ["all", *(kind.replace("_", " ") for kind in kinds)]
    chart.truncate_label = -1
    for name, summary in summaries.items():
        groups = [summary.overall, *(summary.kinds.get(kind) for kind in kinds)]
        chart.add(name, [_bar(group.success if group else Estimate()) for group in groups])
    return _inline(chart, "Success rate of each kind of task with 95% intervals; the same numbers are in the tables")


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _bar(estimate: Estimate) -> dict[str, Any] | None:
    if estimate.value is None:
        return None
    bar: dict[str, Any] = {"value": 100 * estimate.value}
    if estimate.low is not None and estimate.high is not None:
        bar["ci"] = {"low": 100 * estimate.low, "high": 100 * estimate.high}
    return bar


def solved_within(runs: Mapping[str, Sequence[Episode]]) -> str:
    """Share of judged episodes that were solved within t turns, one line a run."""
    longest = max((len(e.turns) for episodes in runs.values() for e in episodes), default=1)
    chart = pygal.XY(
        **_options(COLOURS, 360),
        range=(0, 100),
        xrange=(0, longest),
        show_dots=False,
        stroke_style={"width": 3},
        value_formatter=_percent,
        x_value_formatter=lambda v: f"{v:.0f}",
        x_title="turns",
        y_title="solved",
    )
    for name, episodes in runs.items():
        judged = [e for e in episodes if e.outcome in ("success", "failure")]
        lengths = [len(e.turns) for e in judged if e.outcome == "success"]
        points: list[tuple[float, float]] = [(0, 0.0)]
        for length in sorted(set(lengths)):
            share = 100 * sum(other <= length for other in lengths) / len(judged)
            points += [(length, points[-1][1]), (length, share)]
        points.append((longest, points[-1][1]))
        chart.add(name, points)
    return _inline(chart, "Share of episodes solved within a number of turns")
