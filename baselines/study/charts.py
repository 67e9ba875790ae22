"""Charts of a study as SVG files that stand alone: small multiples of learning curves, and dots with intervals.

The page's charts (`agentgym.view.charts`) have neither bands nor dots with intervals, and take their colours from the
page; a file that a README shows needs its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from agentgym.baselines.study.analyse import Point
from agentgym.view.table import plain

# Okabe and Ito's colours, which remain distinct under colour blindness, without the yellow; the first is for the
# curve that is in every chart. Dashes tell them apart in print.
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_DASHES = ("5,3", "", "9,3", "2,2", "12,3,3,3", "6,2,2,2,2,2", "1,3")
CURVES = 6  # in one chart, with the one that is in every chart

_WIDTH, _HEIGHT = 420, 300  # of a chart's plot with its labels, without the legend
_LEFT, _TOP, _BOTTOM, _RIGHT = 48, 34, 42, 14
_ROW = 17  # of a legend


class Line(NamedTuple):
    """A curve: its name and its points."""

    label: str
    points: Sequence[Point]


class Panel(NamedTuple):
    """A small chart: its heading and its curves, of which the first is drawn in grey."""

    title: str
    lines: Sequence[Line]


class Dot(NamedTuple):
    """A value with its interval: name, mean, ends, and a remark shown at the right."""

    label: str
    mean: float
    low: float
    high: float
    remark: str
    grey: bool = False


def curves(panels: Sequence[Panel], *, x_title: str, description: str) -> str:
    """Small charts of success in percent, two a row, all with the same axes.

    Args:
        panels: the charts.
        x_title: what goes to the right.
        description: for readers who do not see it.
    """
    points = [point for panel in panels for line in panel.lines for point in line.points]
    right = max((point.x for point in points), default=1.0) or 1.0
    ticks_x, ticks_y = _ticks(0.0, right), _ticks(*_bounds(points))
    columns = min(2, max(1, len(panels)))
    legend = _ROW * max((len(panel.lines) for panel in panels), default=0)
    cell = _HEIGHT + legend + 12
    parts = []
    for place, panel in enumerate(panels):
        x, y = _WIDTH * (place % columns), cell * (place // columns)
        inner = "".join(_panel(panel, ticks_x, ticks_y, right, x_title))
        parts.append(f'<g transform="translate({x},{y})">{inner}</g>')
    return _svg(_WIDTH * columns, cell * -(-len(panels) // columns), parts, description)


def dots(rows: Sequence[Dot], *, x_title: str, description: str) -> str:
    """A row for each method: its mean as a dot, its interval as a line; values in percent."""
    left = 12 + 6.7 * max((len(row.label) for row in rows), default=0)
    width, step, top = left + 520, 24, 16
    ends = [v for row in rows for v in (row.mean, row.low, row.high) if not math.isnan(v)]
    ticks = _ticks(max(0.0, min(ends, default=0.0)), min(1.0, max(ends, default=1.0)))
    bottom = top + step * len(rows)

    def place(value: float) -> float:
        inside = min(max(value, ticks[0]), ticks[-1])
        return left + 10 + 400 * (inside - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [_vertical(place(tick), top - 6, bottom) for tick in ticks]
    parts += [_text(place(tick), bottom + 16, f"{100 * tick:g}%", anchor="middle") for tick in ticks]
    parts.append(_text(left + 210, bottom + 36, x_title, anchor="middle"))
    for number, row in enumerate(rows):
        y = top + step * (number + 0.5)
        colour = COLOURS[0] if row.grey else COLOURS[1]
        parts.append(_text(left, y + 4, row.label, anchor="end", bold=row.grey))
        if not math.isnan(row.low):
            low, high = place(row.low), place(row.high)
            parts.append(f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<circle cx="{place(row.mean):.1f}" cy="{y}" r="4.5" fill="{colour}"/>')
        parts.append(_text(left + 424, y + 4, row.remark))
    return _svg(width, bottom + 46, parts, description)


def _panel(
    panel: Panel, ticks_x: Sequence[float], ticks_y: Sequence[float], right: float, x_title: str
) -> Iterable[str]:
    low, high = ticks_y[0], ticks_y[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        inside = min(max(y, low), high)
        return (
            _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / right,
            _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (inside - low) / (high - low),
        )

    yield _text(_LEFT, 20, panel.title, bold=True)
    for tick in ticks_y:
        y = place(0, tick)[1]
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>'
        yield _text(_LEFT - 6, y + 4, f"{100 * tick:g}%", anchor="end")
    for tick in ticks_x:
        if tick <= right * 1.001:
            yield _text(place(tick, low)[0], _HEIGHT - _BOTTOM + 16, _short(tick), anchor="middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 34, x_title, anchor="middle")
    for number, line in enumerate(panel.lines):  # bands first, so that they cover no curve
        band = [point for point in line.points if not math.isnan(point.interval.low)]
        if band:
            ends = [place(p.x, p.interval.high) for p in band] + [place(p.x, p.interval.low) for p in reversed(band)]
            yield f'<path d="{_path(ends)}Z" fill="{COLOURS[number]}" fill-opacity="0.1"/>'
    for number, line in enumerate(panel.lines):
        colour, dash = COLOURS[number], _DASHES[number]
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        if line.points:
            yield f'<path d="{_path([place(p.x, p.mean) for p in line.points])}" {style}/>'
        y = _HEIGHT + 4 + _ROW * number
        yield f'<path d="M{_LEFT} {y}h30" {style}/>'
        yield _text(_LEFT + 38, y + 4, line.label)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _vertical(x: float, top: float, bottom: float) -> str:
    return f'<path d="M{x:.1f} {top}V{bottom}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(plain(text))}</text>'


def _svg(width: float, height: float, parts: Sequence[str], description: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="12" fill="#222222">'
        f"<title>{escape(description)}</title>"
        f'<rect width="100%" height="100%" fill="#ffffff"/>' + "\n".join(parts) + "</svg>\n"
    )


def _bounds(points: Sequence[Point]) -> tuple[float, float]:
    """Range of success that shows the curves whole and most of their bands."""
    means = [point.mean for point in points] or [0.0, 1.0]
    ends = [end for point in points for end in point.interval if not math.isnan(end)]
    reach = 0.1  # of a band beyond the curves
    low = min([*means, *(end for end in ends if end > min(means) - reach)])
    high = max([*means, *(end for end in ends if end < max(means) + reach)])
    return max(0.0, low), min(1.0, high)


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers around a range."""
    span = max(high - low, 1e-9)
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * number, 10) for number in range(first, max(last, first + 1) + 1)]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
