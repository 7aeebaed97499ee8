"""The picture of a plan: where the memory goes, and how many requests of which context fit, as one SVG file.

Pure functions of a report. Invariants: the file needs nothing from elsewhere, and the same report gives the same bytes.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape, quoteattr

from kvd.geometry import HOST_SETTING
from kvd.tools.banner import size
from kvd.tools.plan_report import PlanReport
from kvd.tools.plan_text import SHORT_DTYPES

WIDTH = 960.0
_MARGIN = 28.0
_INNER = WIDTH - 2 * _MARGIN
_BACKGROUND, _PANEL, _GRID = "#0c1117", "#141b24", "#2b3846"
_TEXT, _MUTED = "#d3dde6", "#8b9cad"
_WEIGHTS, _STEPS, _KV, _REST = "#8b97ff", "#f2b25c", "#38d3c2", "#2b3846"
_DTYPES = {"fp8_e4m3": "#8b97ff", "int8": "#38d3c2", "fp16": "#f2b25c"}
_FONTS = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_BAR, _STEP = 12.0, 15.0


def draw(report: PlanReport) -> str:
    """The SVG text."""
    shapes: list[str] = []
    subject = report.subject
    _text(shapes, _MARGIN, 46, "kvd plan", size=22, weight=700)
    _text(shapes, WIDTH - _MARGIN, 46, subject.machine, colour=_MUTED, anchor="end")
    _text(shapes, _MARGIN, 70, f"{subject.model} · {subject.quantization}", size=13)
    y = _memory(shapes, report, 92)
    y = _contexts(shapes, report, y + 24)
    height = y + _MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:.1f}" font-family="{_FONTS}">',
            f'<rect width="{WIDTH:g}" height="{height:.1f}" rx="12" fill="{_BACKGROUND}"/>',
            *shapes,
            "</svg>",
            "",
        )
    )


def _memory(shapes: list[str], report: PlanReport, y: float) -> float:
    """One bar of all the memory; returns where the panel ends."""
    fits, room = report.fits, report.geometry.room
    is_host = room.setting == HOST_SETTING
    parts = [
        ("weights", fits.weight_bytes, _WEIGHTS),
        ("activations", fits.step_bytes, _STEPS),
        (f"KV cache, {fits.choice.kv_cache_dtype}", fits.kv_bytes, _KV),
    ]
    taken = sum(num_bytes for _, num_bytes, _ in parts)
    parts.append(("left for others" if is_host else "not taken", max(0, room.total_bytes - taken), _REST))
    height = 112.0
    _box(shapes, _MARGIN, y, _INNER, height, _PANEL, radius=10)
    title = f"{size(room.total_bytes)} {'of free RAM' if is_host else 'on the card'}"
    _text(shapes, _MARGIN + 18, y + 28, title, size=15, weight=600)
    if fits.refusal:
        _text(shapes, WIDTH - _MARGIN - 18, y + 28, "does not fit", colour=_STEPS, anchor="end")
    whole = max(room.total_bytes, taken, 1)
    x, width = _MARGIN + 18, _INNER - 36
    label_x = x
    for name, num_bytes, colour in parts:
        part_width = width * num_bytes / whole
        if num_bytes:
            _box(shapes, x, y + 44, max(1.0, part_width), 22, colour, radius=0)
        x += part_width
        words = f"{name} {size(num_bytes)}"
        _box(shapes, label_x, y + 82, 10, 10, colour, radius=2)
        _text(shapes, label_x + 16, y + 91, words, colour=_MUTED)
        label_x += 7.0 * len(words) + 34
    return y + height


def _contexts(shapes: list[str], report: PlanReport, y: float) -> float:
    """Requests at once by context and KV dtype, on a logarithmic scale; returns where the panel ends."""
    served = [each for each in report.by_dtype if each.choice.kv_cache_dtype in report.geometry.kv_dtypes]
    row = _STEP * len(served) + 16
    height = 56 + row * len(report.contexts) + 12
    _box(shapes, _MARGIN, y, _INNER, height, _PANEL, radius=10)
    _text(shapes, _MARGIN + 18, y + 28, "Requests at once by context", size=15, weight=600)
    caption = "bars grow with the logarithm"
    if report.fits.max_model_len in report.contexts:
        caption += " · *: max_model_len"
    _text(shapes, WIDTH - _MARGIN - 18, y + height - 10, caption, colour=_MUTED, size=11, anchor="end")
    x = WIDTH - _MARGIN - 18
    for each in reversed(served):
        words = f"{SHORT_DTYPES[each.choice.kv_cache_dtype]}: {each.bytes_per_token:,.0f} B per token"
        _text(shapes, x, y + 28, words, colour=_MUTED, anchor="end")
        x -= 6.6 * len(words) + 8
        _box(shapes, x, y + 19, 10, 10, _DTYPES[each.choice.kv_cache_dtype], radius=2)
        x -= 18
    left, width = _MARGIN + 96, _INNER - 96 - 70
    most = max((each.requests(length) for each in served for length in report.contexts), default=1)
    scale = width / (1 + math.log10(max(1, most)))
    at = y + 50
    for length in report.contexts:
        words = f"{length:,}" + (" *" if length == report.fits.max_model_len else "")
        _text(shapes, left - 12, at + 11 + (row - 27) / 2, words, anchor="end")
        for each in served:
            count = each.requests(length)
            bar = scale * (1 + math.log10(count)) if count else 0.0
            _box(shapes, left, at, width, _BAR, _BACKGROUND, radius=3)
            if count:
                _box(shapes, left, at, bar, _BAR, _DTYPES[each.choice.kv_cache_dtype], radius=3)
            words = f"{count:,}" if count else "does not fit"
            _text(shapes, left + bar + 6, at + 10.5, words, colour=_TEXT if count else _MUTED, size=11)
            at += _STEP
        at += 16
    return y + height


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
    # A model may be called anything; XML may not hold everything.
    words = escape("".join(letter if letter.isprintable() else " " for letter in text))
    shapes.append(
        f'<text x="{x:.1f}" y="{y:.1f}" fill={quoteattr(colour)} font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def _box(shapes: list[str], x: float, y: float, width: float, height: float, colour: str, *, radius: float) -> None:
    shapes.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" fill="{colour}"/>'
    )
