"""The picture of a benchmark: bars of every load and the curve of the sweep with its knee, as one SVG file.

Pure functions of a report. Invariants: the file needs nothing from elsewhere, and the same report gives the same bytes.
With two endpoints every row has a scale of its own: a bar is compared with its neighbour. With one endpoint the rows of
one unit share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape, quoteattr

from kvd.tools.bench_loads import Metric, Streams
from kvd.tools.bench_machine import machine_line
from kvd.tools.bench_report import NOT_KNOWN, Report, number
from kvd.tools.bench_run import LoadResult, metric_title
from kvd.tools.bench_stats import KNEE_SHARE, Spread

WIDTH = 960.0
_MARGIN = 28.0
_GAP = 28.0
_HALF = (WIDTH - 2 * _MARGIN - _GAP) / 2
_BACKGROUND, _PANEL, _GRID = "#0c1117", "#141b24", "#2b3846"
_TEXT, _MUTED, _KNEE = "#d3dde6", "#8b9cad", "#ffc65c"
_COLOURS = {"A": "#38d3c2", "B": "#8b97ff"}
_FONTS = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

_BAR_HEIGHT, _ROW_GAP, _ROW_HEAD = 13.0, 13.0, 17.0
_PANEL_HEAD, _PANEL_FOOT = 46.0, 8.0
_CHART_HEIGHT = 340.0
_DOCUMENT_METRICS = ("miss", "hit", "rate", "whole")


@dataclass(frozen=True, slots=True)
class _Row:
    """One metric with one bar per side; `scale` is the value of a full bar."""

    title: str
    metric: Metric
    values: dict[str, Spread | None]
    scale: float = 0.0

    @property
    def most(self) -> float:
        return max((value.most for value in self.values.values() if value is not None), default=0.0)


def draw(report: Report) -> str:
    """The SVG text."""
    shapes: list[str] = []
    y = _header(shapes, report)
    sweep = report.result_of("sweep")
    plain = [result for result in report.results if result.counted and result.load.group not in ("sweep", "documents")]
    rows = [row for result in plain for row in _rows(report, result)]
    documents = [
        row
        for result in report.result_of("documents")
        for row in _rows(report, result)
        if row.metric.name in _DOCUMENT_METRICS
    ]
    panels: list[tuple[str, list[_Row]]] = [("Loads", _scaled(rows)), ("Document load", _scaled(documents))]
    panels = [panel for panel in panels if panel[1]]
    if len(sweep) <= 1 and len(panels) == 1 and len(panels[0][1]) > 1:
        title, some = panels[0]
        middle = (len(some) + 1) // 2
        panels = [(title, some[:middle]), (f"{title}, continued", some[middle:])]
    # The curve takes the left half, bars the right one; without a curve the bars have both.
    left = right = y
    if len(sweep) > 1:
        _sweep_panel(shapes, report, sweep, _MARGIN, left)
        left += _CHART_HEIGHT + _GAP
    for title, some in panels:
        x, at_left = (_MARGIN, True) if left < right else (_MARGIN + _HALF + _GAP, False)
        if len(sweep) <= 1 and left == right:
            x, at_left = _MARGIN, True
        height = _bar_panel(shapes, title, some, [side.label for side in report.sides], x, left if at_left else right)
        left, right = (left + height + _GAP, right) if at_left else (left, right + height + _GAP)
    height = max(left, right) - _GAP + _MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:.1f}" font-family="{_FONTS}">',
            f'<rect width="{WIDTH:g}" height="{height:.1f}" rx="12" fill="{_BACKGROUND}"/>',
            *shapes,
            "</svg>",
            "",
        )
    )


def _header(shapes: list[str], report: Report) -> float:
    """Title, machine, and the legend; returns where the panels begin."""
    y = _MARGIN + 18
    _text(shapes, _MARGIN, y, "kvd bench", size=22, weight=700)
    _text(shapes, WIDTH - _MARGIN, y, f"{report.started[:10]} · {report.what_is_shown}", colour=_MUTED, anchor="end")
    y += 22
    _text(shapes, _MARGIN, y, machine_line(report.machine), colour=_MUTED)
    for side in report.sides:
        y += 22
        _box(shapes, _MARGIN, y - 10, 12, 12, _COLOURS[side.label], radius=3)
        _text(shapes, _MARGIN + 20, y, side.line, size=13)
    return y + 22


# --------------------------------------------------------------------------- bars


def _rows(report: Report, result: LoadResult) -> list[_Row]:
    documents = result.load.group == "documents"
    return [
        _Row(
            metric.label if documents else metric_title(result.load, metric),
            metric,
            {side.label: result.spread(side.label, metric.name) for side in report.sides},
        )
        for metric in result.load.metrics
    ]


def _scaled(rows: Sequence[_Row]) -> list[_Row]:
    """The rows with their scales: each its own with two sides, one for all of a unit with one."""
    return [
        replace(
            row,
            scale=row.most
            if len(row.values) > 1
            else max(other.most for other in rows if other.metric.unit == row.metric.unit),
        )
        for row in rows
    ]


def _bar_panel(shapes: list[str], title: str, rows: Sequence[_Row], labels: Sequence[str], x: float, y: float) -> float:
    """A panel of rows at (x, y); returns its height."""
    row_height = _ROW_HEAD + len(labels) * (_BAR_HEIGHT + 3) + _ROW_GAP
    height = _PANEL_HEAD + len(rows) * row_height + _PANEL_FOOT
    _box(shapes, x, y, _HALF, height, _PANEL, radius=10)
    _text(shapes, x + 18, y + 28, title, size=15, weight=600)
    at = y + _PANEL_HEAD
    for row in rows:
        _draw_row(shapes, row, labels, x + 18, at)
        at += row_height
    return height


def _draw_row(shapes: list[str], row: _Row, labels: Sequence[str], x: float, y: float) -> None:
    """Title and bars, at (x, y)."""
    width = _HALF - 36
    bar_width = width - 74  # the rest is for the figure
    better = " · lower is better" if row.metric.better == "lower" else ""
    _text(shapes, x, y + 11, row.title, size=13)
    _text(shapes, x + width, y + 11, row.metric.unit + better, colour=_MUTED, size=11, anchor="end")
    scale = bar_width / row.scale if row.scale > 0 else 0.0
    at = y + _ROW_HEAD
    for label in labels:
        value = row.values[label]
        _box(shapes, x, at, bar_width, _BAR_HEIGHT, _BACKGROUND, radius=3)
        if value is not None:
            _box(shapes, x, at, max(2.0, value.median * scale), _BAR_HEIGHT, _COLOURS[label], radius=3)
            if value.most > value.least:
                middle = at + _BAR_HEIGHT / 2
                _line(shapes, x + value.least * scale, middle, x + value.most * scale, middle, _TEXT, 1.5)
        shown = NOT_KNOWN if value is None else number(value.median)
        _text(shapes, x + width, at + 11, shown, size=12, anchor="end", colour=_MUTED if value is None else _TEXT)
        at += _BAR_HEIGHT + 3


# --------------------------------------------------------------------------- the sweep


def _sweep_panel(shapes: list[str], report: Report, sweep: Sequence[LoadResult], x: float, y: float) -> None:
    _box(shapes, x, y, _HALF, _CHART_HEIGHT, _PANEL, radius=10)
    _text(shapes, x + 18, y + 28, "Concurrency sweep", size=15, weight=600)
    _text(shapes, x + _HALF - 18, y + 28, "tok/s of all streams", colour=_MUTED, size=12, anchor="end")
    left, right, top, bottom = x + 56, x + _HALF - 30, y + 52, y + _CHART_HEIGHT - 58
    curves = {side.label: _curve(sweep, side.label) for side in report.sides}
    ceiling = nice_ceiling(max((value.most for curve in curves.values() for value in curve.values()), default=1.0))
    levels = sorted({level for curve in curves.values() for level in curve})
    if not levels:
        return
    span = math.log2(levels[-1] / levels[0]) or 1.0

    def place(level: int, rate: float) -> tuple[float, float]:
        return left + (right - left) * math.log2(level / levels[0]) / span, bottom - (bottom - top) * rate / ceiling

    for step in range(5):
        rate = ceiling * step / 4
        _, at = place(levels[0], rate)
        _line(shapes, left, at, right, at, _GRID, 1)
        _text(shapes, left - 8, at + 4, number(rate), colour=_MUTED, size=11, anchor="end")
    for level in levels:
        _text(shapes, place(level, 0)[0], bottom + 18, str(level), colour=_MUTED, size=11, anchor="middle")
    caption = f"requests at once · ring: knee, the first that reaches {KNEE_SHARE:.0%} of the best rate"
    _text(shapes, (left + right) / 2, bottom + 40, caption, colour=_MUTED, size=11, anchor="middle")
    for label, curve in curves.items():
        _draw_curve(shapes, label, [(place(level, value.median), level, value) for level, value in curve.items()])
        for level, value in curve.items():
            if value.most > value.least:
                (at, low), (_, high) = place(level, value.least), place(level, value.most)
                _line(shapes, at, low, at, high, _COLOURS[label], 1.5)
        level_of_knee = report.knees.get(label)
        if level_of_knee is not None:
            value = curve[level_of_knee]
            at, height = place(level_of_knee, value.median)
            shapes.append(
                f'<circle cx="{at:.1f}" cy="{height:.1f}" r="9" fill="none" stroke="{_KNEE}" stroke-width="2"/>'
            )
            below = label == "B"  # so that two knees close to each other stay readable
            words = f"{number(value.median)} at {level_of_knee}"
            anchor = "end" if at > right - 30 else "start" if at < left + 30 else "middle"
            _text(shapes, at, height + (24 if below else -16), words, colour=_COLOURS[label], anchor=anchor)


def _curve(sweep: Sequence[LoadResult], label: str) -> dict[int, Spread]:
    """Concurrency → rate of all streams, where it is known."""
    curve = {}
    for result in sweep:
        assert isinstance(result.load, Streams)
        value = result.spread(label, "whole")
        if value is not None:
            curve[result.load.num_streams] = value
    return curve


def _draw_curve(shapes: list[str], label: str, points: Sequence[tuple[tuple[float, float], int, Spread]]) -> None:
    path = " ".join(f"{x:.1f},{y:.1f}" for (x, y), _, _ in points)
    shapes.append(
        f'<polyline points="{path}" fill="none" stroke="{_COLOURS[label]}" stroke-width="2.5" '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )
    for (x, y), _, _ in points:
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[label]}"/>')


def nice_ceiling(value: float) -> float:
    """The smallest of 1, 2, 4, 6, 8, 10 times a power of ten that is not under `value`; 1 for what is not positive."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 4, 6, 8) if factor * power >= value), 10 * power)


# --------------------------------------------------------------------------- shapes


def _text(
    shapes: list[str],
    x: float,
    y: float,
    text: str,
    *,
    colour: str = _TEXT,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
) -> None:
    shapes.append(
        f'<text x="{x:.1f}" y="{y:.1f}" fill={quoteattr(colour)} font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(_printable(text))}</text>'
    )


def _printable(text: str) -> str:
    """A model may be called anything; XML may not hold everything."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _box(shapes: list[str], x: float, y: float, width: float, height: float, colour: str, *, radius: float) -> None:
    shapes.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" fill="{colour}"/>'
    )


def _line(shapes: list[str], x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> None:
    shapes.append(
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'
    )
