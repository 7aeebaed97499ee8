"""The picture of a profile: memory and latency against tokens, with the lines through them, as one SVG file.

Pure functions of a report. Invariants: the file needs nothing from elsewhere, and the same report gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.tools.bench_machine import machine_line
from kvd.tools.bench_report import number
from kvd.tools.profile_report import Report
from kvd.tools.profile_run import METRICS, SideResult
from kvd.tools.profile_stats import Line, Point
from kvd.tools.svg_shapes import (
    GRID,
    MUTED,
    PANEL,
    SERIES,
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
_PANEL_HEIGHT = 300.0
_MEBIBYTE = 2.0**20


@dataclass(frozen=True, slots=True)
class _Chart:
    """`series`: per side the measured points and the line that is drawn with them. `slopes`: per side, in words."""

    title: str
    unit: str
    caption: str
    series: Sequence[tuple[list[Point], Line | None]]
    slopes: Sequence[str]


def draw(report: Report) -> str:
    """The SVG text."""
    shapes: list[str] = []
    top = _header(shapes, report)
    charts = [chart for chart in _charts(report.sides) if any(points for points, _ in chart.series)]
    for index, chart in enumerate(charts):
        row, column = divmod(index, 2)
        _draw_chart(shapes, chart, _MARGIN + column * (_HALF + _GAP), top + row * (_PANEL_HEIGHT + _GAP))
    num_rows = (len(charts) + 1) // 2
    return document(WIDTH, top + num_rows * (_PANEL_HEIGHT + _GAP) - _GAP + _MARGIN, shapes)


def _header(shapes: list[str], report: Report) -> float:
    """Title, machine, and the legend; returns where the panels begin."""
    y = _MARGIN + 18
    add_text(shapes, _MARGIN, y, "kvd profile", size=22, weight=700)
    runs = "one run" if report.num_runs == 1 else f"{report.num_runs} runs"
    add_text(shapes, WIDTH - _MARGIN, y, f"{report.started[:10]} · {runs}", colour=MUTED, anchor="end")
    y += 22
    add_text(shapes, _MARGIN, y, machine_line(report.machine), colour=MUTED)
    for side, colour in zip(report.sides, _colours(report.sides), strict=True):
        y += 22
        add_box(shapes, _MARGIN, y - 10, 12, 12, colour, radius=3)
        add_text(shapes, _MARGIN + 20, y, side.line, size=13)
    return y + 22


def _colours(sides: Sequence[object]) -> list[str]:
    return [SERIES[index % len(SERIES)] for index in range(len(sides))]


def _charts(sides: Sequence[SideResult]) -> list[_Chart]:
    memory = _Chart(
        "KV cache of one request",
        "MiB",
        "tokens · dots: blocks that were seen · line: bytes per token, as the server says",
        [
            (
                [(tokens, num_bytes / _MEBIBYTE) for tokens, num_bytes in side.points("kv")],
                None
                if side.settings.bytes_per_token is None
                else Line(side.settings.bytes_per_token / _MEBIBYTE, 0.0, None, 0),
            )
            for side in sides
        ],
        [
            "" if side.settings.bytes_per_token is None else f"{number(side.settings.bytes_per_token)} bytes per token"
            for side in sides
        ],
    )
    latencies = [
        _Chart(
            metric.label,
            metric.unit,
            "tokens · dots: runs · line: least squares",
            [(side.points(metric.name), side.line_of(metric.name)) for side in sides],
            [
                "" if line is None else f"{number(1000 * line.slope)} µs per token"
                for line in (side.line_of(metric.name) for side in sides)
            ],
        )
        for metric in METRICS
    ]
    return [memory, *latencies]


def _draw_chart(shapes: list[str], chart: _Chart, x: float, y: float) -> None:
    add_box(shapes, x, y, _HALF, _PANEL_HEIGHT, PANEL, radius=10)
    add_text(shapes, x + 18, y + 28, chart.title, size=15, weight=600)
    add_text(shapes, x + _HALF - 18, y + 28, chart.unit, colour=MUTED, anchor="end")
    left, right, top, bottom = x + 60, x + _HALF - 24, y + 48, y + _PANEL_HEIGHT - 54
    points = [point for series, _ in chart.series for point in series]
    most_x = nice_ceiling(max(tokens for tokens, _ in points))
    most_y = nice_ceiling(max(value for _, value in points))

    def place(tokens: float, value: float) -> tuple[float, float]:
        return left + (right - left) * tokens / most_x, bottom - (bottom - top) * value / most_y

    for step in range(5):
        _, at = place(0, most_y * step / 4)
        add_line(shapes, left, at, right, at, GRID, 1)
        add_text(shapes, left - 8, at + 4, number(most_y * step / 4), colour=MUTED, size=11, anchor="end")
        across, _ = place(most_x * step / 4, 0)
        add_text(shapes, across, bottom + 18, number(most_x * step / 4), colour=MUTED, size=11, anchor="middle")
    add_text(shapes, (left + right) / 2, bottom + 40, chart.caption, colour=MUTED, size=11, anchor="middle")
    at = top + 14
    for (series, line), slope, colour in zip(chart.series, chart.slopes, _colours(chart.series), strict=True):
        if line is not None and series:
            _draw_line(shapes, line, (min(series)[0], max(series)[0]), most_y, place, colour)
        for point in series:
            across, height = place(*point)
            shapes.append(f'<circle cx="{across:.1f}" cy="{height:.1f}" r="3.5" fill="{colour}"/>')
        if slope:
            add_text(shapes, left + 10, at, slope, colour=colour)
            at += 17


def _draw_line(
    shapes: list[str],
    line: Line,
    reach: tuple[float, float],
    most_y: float,
    place: Callable[[float, float], tuple[float, float]],
    colour: str,
) -> None:
    """The line between two numbers of tokens, kept within the panel."""
    ends = [(tokens, min(most_y, max(0.0, line.intercept + line.slope * tokens))) for tokens in reach]
    (x1, y1), (x2, y2) = (place(*end) for end in ends)
    add_line(shapes, x1, y1, x2, y2, colour, 1.5)
