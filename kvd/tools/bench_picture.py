"""The picture of a benchmark: bars of every load and the curve of the sweep with its knee, as one SVG file.

Pure functions of a report. Invariants: the file needs nothing from elsewhere, and the same report gives the same bytes.
With two endpoints every row has a scale of its own: a bar is compared with its neighbour. With one endpoint the rows of
one unit share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvd.tools.bench_loads import Metric, Streams
from kvd.tools.bench_machine import machine_line
from kvd.tools.bench_report import NOT_KNOWN, Report, number
from kvd.tools.bench_run import LoadResult, metric_title
from kvd.tools.bench_stats import KNEE_SHARE, Spread
from kvd.tools.svg_shapes import (
    ACCENT,
    BACKGROUND,
    GRID,
    MUTED,
    PANEL,
    SERIES,
    TEXT,
    add_box,
    add_line,
    add_text,
    document,
    nice_ceiling,
)

WIDTH = 960.0
_MARGIN = 28.0
_GAP = 28.0
_HALF = (WIDTH - 2 * _MARGIN - _GAP) / 2
_COLOURS = {"A": SERIES[0], "B": SERIES[1]}

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
    return document(WIDTH, height, shapes)


def _header(shapes: list[str], report: Report) -> float:
    """Title, machine, and the legend; returns where the panels begin."""
    y = _MARGIN + 18
    add_text(shapes, _MARGIN, y, "kvd bench", size=22, weight=700)
    add_text(shapes, WIDTH - _MARGIN, y, f"{report.started[:10]} · {report.what_is_shown}", colour=MUTED, anchor="end")
    y += 22
    add_text(shapes, _MARGIN, y, machine_line(report.machine), colour=MUTED)
    for side in report.sides:
        y += 22
        add_box(shapes, _MARGIN, y - 10, 12, 12, _COLOURS[side.label], radius=3)
        add_text(shapes, _MARGIN + 20, y, side.line, size=13)
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
    add_box(shapes, x, y, _HALF, height, PANEL, radius=10)
    add_text(shapes, x + 18, y + 28, title, size=15, weight=600)
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
    add_text(shapes, x, y + 11, row.title, size=13)
    add_text(shapes, x + width, y + 11, row.metric.unit + better, colour=MUTED, size=11, anchor="end")
    scale = bar_width / row.scale if row.scale > 0 else 0.0
    at = y + _ROW_HEAD
    for label in labels:
        value = row.values[label]
        add_box(shapes, x, at, bar_width, _BAR_HEIGHT, BACKGROUND, radius=3)
        if value is not None:
            add_box(shapes, x, at, max(2.0, value.median * scale), _BAR_HEIGHT, _COLOURS[label], radius=3)
            if value.most > value.least:
                middle = at + _BAR_HEIGHT / 2
                add_line(shapes, x + value.least * scale, middle, x + value.most * scale, middle, TEXT, 1.5)
        shown = NOT_KNOWN if value is None else number(value.median)
        add_text(shapes, x + width, at + 11, shown, size=12, anchor="end", colour=MUTED if value is None else TEXT)
        at += _BAR_HEIGHT + 3


# --------------------------------------------------------------------------- the sweep


def _sweep_panel(shapes: list[str], report: Report, sweep: Sequence[LoadResult], x: float, y: float) -> None:
    add_box(shapes, x, y, _HALF, _CHART_HEIGHT, PANEL, radius=10)
    add_text(shapes, x + 18, y + 28, "Concurrency sweep", size=15, weight=600)
    add_text(shapes, x + _HALF - 18, y + 28, "tok/s of all streams", colour=MUTED, size=12, anchor="end")
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
        add_line(shapes, left, at, right, at, GRID, 1)
        add_text(shapes, left - 8, at + 4, number(rate), colour=MUTED, size=11, anchor="end")
    for level in levels:
        add_text(shapes, place(level, 0)[0], bottom + 18, str(level), colour=MUTED, size=11, anchor="middle")
    caption = f"requests at once · ring: knee, the first that reaches {KNEE_SHARE:.0%} of the best rate"
    add_text(shapes, (left + right) / 2, bottom + 40, caption, colour=MUTED, size=11, anchor="middle")
    for label, curve in curves.items():
        _draw_curve(shapes, label, [(place(level, value.median), level, value) for level, value in curve.items()])
        for level, value in curve.items():
            if value.most > value.least:
                (at, low), (_, high) = place(level, value.least), place(level, value.most)
                add_line(shapes, at, low, at, high, _COLOURS[label], 1.5)
        level_of_knee = report.knees.get(label)
        if level_of_knee is not None:
            value = curve[level_of_knee]
            at, height = place(level_of_knee, value.median)
            shapes.append(
                f'<circle cx="{at:.1f}" cy="{height:.1f}" r="9" fill="none" stroke="{ACCENT}" stroke-width="2"/>'
            )
            below = label == "B"  # so that two knees close to each other stay readable
            words = f"{number(value.median)} at {level_of_knee}"
            anchor = "end" if at > right - 30 else "start" if at < left + 30 else "middle"
            add_text(shapes, at, height + (24 if below else -16), words, colour=_COLOURS[label], anchor=anchor)


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
