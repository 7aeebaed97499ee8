"""What the pictures of measurements are drawn with: colours, text, boxes, and lines of an SVG file.

Pure functions that append to a list of shapes. Invariant: what they write needs nothing from elsewhere.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape, quoteattr

BACKGROUND, PANEL, GRID = "#0c1117", "#141b24", "#2b3846"
TEXT, MUTED, ACCENT = "#d3dde6", "#8b9cad", "#ffc65c"
SERIES = ("#38d3c2", "#8b97ff", "#ff9d6c", "#e879c6", "#b7d94c")
FONTS = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def document(width: float, height: float, shapes: list[str]) -> str:
    """The whole file: the shapes on the background."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:.1f}" font-family="{FONTS}">',
            f'<rect width="{width:g}" height="{height:.1f}" rx="12" fill="{BACKGROUND}"/>',
            *shapes,
            "</svg>",
            "",
        )
    )


def nice_ceiling(value: float) -> float:
    """The smallest of 1, 2, 4, 6, 8, 10 times a power of ten that is not under `value`; 1 for what is not positive."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 4, 6, 8) if factor * power >= value), 10 * power)


def add_text(
    shapes: list[str],
    x: float,
    y: float,
    text: str,
    *,
    colour: str = TEXT,
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


def add_box(shapes: list[str], x: float, y: float, width: float, height: float, colour: str, *, radius: float) -> None:
    shapes.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" fill="{colour}"/>'
    )


def add_line(shapes: list[str], x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> None:
    shapes.append(
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'
    )
