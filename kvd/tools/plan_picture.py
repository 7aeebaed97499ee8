"""The picture of a plan: where the memory goes, and how many requests of which context fit, as one SVG file.

Pure functions of a report. Invariants: the file needs nothing from elsewhere, and the same report gives the same bytes.
"""

from __future__ import annotations

import math

from kvd.geometry import HOST_SETTING
from kvd.tools.banner import size
from kvd.tools.plan_report import PlanReport
from kvd.tools.plan_text import SHORT_DTYPES
from kvd.tools.svg_shapes import BACKGROUND, GRID, MUTED, PANEL, SERIES, TEXT, add_box, add_text, document

WIDTH = 960.0
_MARGIN = 28.0
_INNER = WIDTH - 2 * _MARGIN
_WEIGHTS, _STEPS, _KV, _REST = SERIES[1], "#f2b25c", SERIES[0], GRID
_DTYPES = {"fp8_e4m3": _WEIGHTS, "int8": _KV, "fp16": _STEPS}
_BAR, _STEP = 12.0, 15.0


def draw(report: PlanReport) -> str:
    """The SVG text."""
    shapes: list[str] = []
    subject = report.subject
    add_text(shapes, _MARGIN, 46, "kvd plan", size=22, weight=700)
    add_text(shapes, WIDTH - _MARGIN, 46, subject.machine, colour=MUTED, anchor="end")
    add_text(shapes, _MARGIN, 70, f"{subject.model} · {subject.quantization}", size=13)
    y = _memory(shapes, report, 92)
    y = _contexts(shapes, report, y + 24)
    height = y + _MARGIN
    return document(WIDTH, height, shapes)


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
    add_box(shapes, _MARGIN, y, _INNER, height, PANEL, radius=10)
    title = f"{size(room.total_bytes)} {'of free RAM' if is_host else 'on the card'}"
    add_text(shapes, _MARGIN + 18, y + 28, title, size=15, weight=600)
    if fits.refusal:
        add_text(shapes, WIDTH - _MARGIN - 18, y + 28, "does not fit", colour=_STEPS, anchor="end")
    whole = max(room.total_bytes, taken, 1)
    x, width = _MARGIN + 18, _INNER - 36
    label_x = x
    for name, num_bytes, colour in parts:
        part_width = width * num_bytes / whole
        if num_bytes:
            add_box(shapes, x, y + 44, max(1.0, part_width), 22, colour, radius=0)
        x += part_width
        words = f"{name} {size(num_bytes)}"
        add_box(shapes, label_x, y + 82, 10, 10, colour, radius=2)
        add_text(shapes, label_x + 16, y + 91, words, colour=MUTED)
        label_x += 7.0 * len(words) + 34
    return y + height


def _contexts(shapes: list[str], report: PlanReport, y: float) -> float:
    """Requests at once by context and KV dtype, on a logarithmic scale; returns where the panel ends."""
    served = [each for each in report.by_dtype if each.choice.kv_cache_dtype in report.geometry.kv_dtypes]
    row = _STEP * len(served) + 16
    height = 56 + row * len(report.contexts) + 12
    add_box(shapes, _MARGIN, y, _INNER, height, PANEL, radius=10)
    add_text(shapes, _MARGIN + 18, y + 28, "Requests at once by context", size=15, weight=600)
    caption = "bars grow with the logarithm"
    if report.fits.max_model_len in report.contexts:
        caption += " · *: max_model_len"
    add_text(shapes, WIDTH - _MARGIN - 18, y + height - 10, caption, colour=MUTED, size=11, anchor="end")
    x = WIDTH - _MARGIN - 18
    for each in reversed(served):
        words = f"{SHORT_DTYPES[each.choice.kv_cache_dtype]}: {each.bytes_per_token:,.0f} B per token"
        add_text(shapes, x, y + 28, words, colour=MUTED, anchor="end")
        x -= 6.6 * len(words) + 8
        add_box(shapes, x, y + 19, 10, 10, _DTYPES[each.choice.kv_cache_dtype], radius=2)
        x -= 18
    left, width = _MARGIN + 96, _INNER - 96 - 70
    most = max((each.requests(length) for each in served for length in report.contexts), default=1)
    scale = width / (1 + math.log10(max(1, most)))
    at = y + 50
    for length in report.contexts:
        words = f"{length:,}" + (" *" if length == report.fits.max_model_len else "")
        add_text(shapes, left - 12, at + 11 + (row - 27) / 2, words, anchor="end")
        for each in served:
            count = each.requests(length)
            bar = scale * (1 + math.log10(count)) if count else 0.0
            add_box(shapes, left, at, width, _BAR, BACKGROUND, radius=3)
            if count:
                add_box(shapes, left, at, bar, _BAR, _DTYPES[each.choice.kv_cache_dtype], radius=3)
            words = f"{count:,}" if count else "does not fit"
            add_text(shapes, left + bar + 6, at + 10.5, words, colour=TEXT if count else MUTED, size=11)
            at += _STEP
        at += 16
    return y + height
