"""A picture of the running dashboard, for the README. Owner: the event loop.

Textual's own export draws blocks and boxes as letters of a font that it fetches from elsewhere; with any other font
there are seams between them. Here they are shapes, so that the file looks like a terminal and needs nothing else.

Invariant: the file depends on what is shown alone, not on how that was put together; one screen gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.cells import cell_len
from rich.style import Style
from textual.app import App

from kvd.tui.charts import EIGHTHS
from kvd.tui.palette import colors

_FONT_SIZE = 16.0
_CELL_WIDTH = 9.632  # of the usual monospace fonts at that size, DejaVu Sans Mono and Menlo among them
_CELL_HEIGHT = 20.0
_MARGIN = 14.0
_BASELINE = 15.0
_FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', ui-monospace, monospace"

_LINES = {"─": "H", "━": "H", "│": "V", "╭": "M{r},{m} Q{c},{m} {c},{b}", "╮": "M{l},{m} Q{c},{m} {c},{b}",
          "╰": "M{c},{t} Q{c},{m} {r},{m}", "╯": "M{c},{t} Q{c},{m} {l},{m}"}  # fmt: skip


def picture(app: App[Any]) -> str:
    """What the app shows now, as an SVG that needs nothing from elsewhere."""
    # Textual has no public way to the lines of a screen; its own export takes this one.
    strips = app.screen._compositor.render_strips()
    shapes: list[str] = []
    texts: list[str] = []
    for row, strip in enumerate(strips):
        column = 0
        for segment in strip.simplify():
            if not segment.control:
                _draw(shapes, texts, segment.text, segment.style or Style.null(), column, row)
                column += cell_len(segment.text)
    width = app.size.width * _CELL_WIDTH + 2 * _MARGIN
    height = app.size.height * _CELL_HEIGHT + 2 * _MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height:.1f}">',
            f'<rect x="0.5" y="0.5" width="{width - 1:.1f}" height="{height - 1:.1f}" rx="10" '
            f'fill="{colors().background}" stroke="{colors().border}"/>',
            f'<g transform="translate({_MARGIN:g},{_MARGIN:g})" font-family="{_FONTS}" font-size="{_FONT_SIZE:g}" '
            'xml:space="preserve">',
            *shapes,
            *texts,
            "</g>",
            "</svg>",
            "",
        )
    )


def save_picture(app: App[Any], path: Path) -> None:
    """Write `picture(app)` to `path`."""
    path.write_text(picture(app), encoding="utf-8")


def _draw(shapes: list[str], texts: list[str], text: str, style: Style, column: int, row: int) -> None:
    color = style.color.get_truecolor().hex if style.color and not style.color.is_default else colors().text
    background = (
        style.bgcolor.get_truecolor().hex if style.bgcolor and not style.bgcolor.is_default else colors().background
    )
    if style.reverse:
        color, background = background, color
    if background != colors().background:
        shapes.append(_rect(column, row, cell_len(text), 1.0, background))
    word, word_column = "", column
    for char, count in _runs(text):
        cells = cell_len(char) * count
        shape = _shape(char, column, row, cells, color)
        # One blank is part of a phrase; more of them end it, so that words keep their columns in any font.
        if shape is None and not (char == " " and (count > 1 or not word)):
            if not word:
                word_column = column
            word += char * count
        else:
            _write(texts, word, word_column, row, color, style)
            word = ""
            if shape:
                shapes.append(shape)
        column += cells
    _write(texts, word, word_column, row, color, style)


def _runs(text: str) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for char in text:
        if runs and runs[-1][0] == char:
            runs[-1] = (char, runs[-1][1] + 1)
        else:
            runs.append((char, 1))
    return runs


def _shape(char: str, column: int, row: int, cells: int, color: str) -> str | None:
    """The run of one character as a shape; None where it is a letter."""
    if char in EIGHTHS and char != " ":
        return _rect(column, row, cells, EIGHTHS.index(char) / 8, color)
    if char == "▒":
        return _rect(column, row, cells, 1.0, color, opacity=0.55)
    path = _LINES.get(char)
    if path is None:
        return None
    left, top = column * _CELL_WIDTH, row * _CELL_HEIGHT
    right, bottom = left + cells * _CELL_WIDTH, top + _CELL_HEIGHT
    middle, center = top + _CELL_HEIGHT / 2, left + _CELL_WIDTH / 2
    if path == "H":
        thickness = 4 if char == "━" else 1.2
        return _line(f"M{left:.1f},{middle:.1f} L{right:.1f},{middle:.1f}", color, thickness)
    if path == "V":
        bars = (left + _CELL_WIDTH * (index + 0.5) for index in range(cells))
        return _line(" ".join(f"M{x:.1f},{top:.1f} L{x:.1f},{bottom:.1f}" for x in bars), color, 1.2)
    names = {"l": left, "r": right, "t": top, "b": bottom, "m": middle, "c": center}
    return _line(path.format(**{name: f"{value:.1f}" for name, value in names.items()}), color, 1.2)


def _line(path: str, color: str, thickness: float) -> str:
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{thickness:g}"/>'


def _rect(column: int, row: int, cells: int, share: float, color: str, *, opacity: float = 1.0) -> str:
    """A box over `cells` cells that fills their lower `share`."""
    height = _CELL_HEIGHT * share
    y = (row + 1) * _CELL_HEIGHT - height
    faded = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return (
        f'<rect x="{column * _CELL_WIDTH:.1f}" y="{y:.1f}" width="{cells * _CELL_WIDTH:.1f}" height="{height:.1f}" '
        f'fill="{color}"{faded} shape-rendering="crispEdges"/>'
    )


def _write(texts: list[str], word: str, column: int, row: int, color: str, style: Style) -> None:
    word = word.rstrip()
    if not word:
        return
    lines = [name for name, has in (("underline", style.underline), ("line-through", style.strike)) if has]
    attributes = (
        (' font-weight="bold"' if style.bold else "")
        + (' font-style="italic"' if style.italic else "")
        + (' fill-opacity="0.6"' if style.dim else "")
        + (f' text-decoration="{" ".join(lines)}"' if lines else "")
    )
    texts.append(
        f'<text x="{column * _CELL_WIDTH:.1f}" y="{row * _CELL_HEIGHT + _BASELINE:.1f}" fill="{color}"{attributes} '
        f'textLength="{cell_len(word) * _CELL_WIDTH:.1f}">{escape(word)}</text>'
    )
