"""The base of all panels: lines of styled spans, repainted line by line. Owner: the event loop.

A panel's `draw` is a pure function of view, link and size; what it returns is compared with what is on the screen,
and only lines that differ are repainted. Textual's own widgets would lay out and repaint whole tables twice a
second in the loop that also serves requests. Many lines are repainted over several frames.

Invariant: `show` never raises for any view, however small the panel is, and never asks for a layout.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvd.tui.format import clean
from kvd.tui.palette import STYLES
from kvd.tui.view import Link, View

Span = tuple[str, str]
"""Text and the name of its style in the palette."""

Spans = tuple[Span, ...]
"""One line of a panel."""


FRAME_SECONDS = 1 / 40
"""Textual paints sixty times a second at most, and what changed between two frames it paints in one go: with a little
more between them, two slices are never painted together.
"""

CELLS_PER_FRAME = 330
"""So many cells of one panel at most are painted in one go: more would hold up the loop for longer than 2 ms."""


def span_width(spans: Iterable[Span]) -> int:
    return sum(cell_len(text) for text, _ in spans)


def justify(left: Spans, right: Spans, width: int) -> Spans:
    """`left` and `right` at the two ends of a line; where they do not both fit, `left` is cropped."""
    gap = width - span_width(left) - span_width(right)
    if gap >= 1:
        return (*left, (" " * gap, "text"), *right)
    return (*crop(left, width - span_width(right) - 1), (" ", "text"), *right)


def crop(spans: Spans, width: int) -> Spans:
    """The first `width` cells of a line, an ellipsis marking what is missing."""
    if span_width(spans) <= width:
        return spans
    result: list[Span] = []
    left = width - 1
    for text, style in spans:
        kept = ""
        for char in text:
            left -= cell_len(char)
            if left < 0:
                break
            kept += char
        if kept:
            result.append((kept, style))
        if left < 0:
            break
    if width > 0:
        result.append(("…", "muted"))
    return tuple(result)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours in ascending numbers; a region costs more than a line in it."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


class Panel(Widget):
    """A widget that draws a `View`. Subclasses implement `draw`, and `titles` where they have a border."""

    def __init__(self, *, id: str, classes: str = "") -> None:
        self._rendered: tuple[Region, list[Strip]] | None = None
        super().__init__(id=id, classes=classes)
        self._view: View | None = None
        self._link: Link | None = None
        self._lines: list[Spans] = []
        self._titles = ("", "")
        self._waiting: set[int] = set()
        self.is_painting = False
        """Some lines are repainted in this frame, or will be in the next ones."""

    @property
    def view(self) -> View | None:
        """What was shown last; None before the first snapshot."""
        return self._view

    @abstractmethod
    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        """The panel's lines, from the top; lines beyond `height` are not shown. `view` is None at first."""

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        """Texts in the upper and in the lower border; plain text of ours, never of a client."""
        return "", ""

    def styles_of_line(self, y: int) -> Mapping[str, Style]:
        """The palette for line `y`."""
        return STYLES

    def show(self, view: View | None, link: Link) -> int:
        """Draw this view from now on; returns how many lines changed."""
        self._view, self._link = view, link
        return self.redraw()

    def redraw(self) -> int:
        """Repaint the lines that have changed, some per frame; returns how many those are."""
        if self._link is None:
            return 0
        width, height = self.size
        if width <= 0 or height <= 0:
            return 0
        lines = self.draw(self._view, self._link, width, height)[:height]
        old = self._lines
        self._lines = lines
        changed = [
            y for y in range(max(len(lines), len(old))) if y >= len(old) or y >= len(lines) or lines[y] != old[y]
        ]
        self._waiting.update(changed)
        titles = self.titles(self._view, self._link)
        if titles != self._titles:
            self._titles = titles
            self._set_titles(height)
        if not self.is_painting:
            self._paint_some()
        return len(changed)

    def _set_titles(self, height: int) -> None:
        # Assigned to the public names, they would be read as markup, and all of the panel would be repainted.
        self._border_title, self._border_subtitle = (Content(clean(title)) for title in self._titles)
        self._waiting |= {-1, height}

    def _paint_some(self) -> None:
        """Repaint as many of the lines that wait for it as one frame allows, and the others in the next ones.

        Line -1 is the upper border, and the line after the last one the lower border. Textual goes through all lines
        between the first and the last one that it paints, so those of one frame are near each other.
        """
        width, height = self.size
        self._waiting = {line for line in self._waiting if line <= height}  # it may have been taller
        self.is_painting = bool(self._waiting)
        if not self._waiting:
            return
        first = min(self._waiting)
        end = first + max(2, CELLS_PER_FRAME // max(1, width))
        lines = sorted(line for line in self._waiting if line < end)
        self._waiting.difference_update(lines)
        self.refresh(*(self._region(first, last, width, height) for first, last in _runs(lines)))
        self.in_next_frame(self._paint_some)

    def _region(self, first: int, last: int, width: int, height: int) -> Region:
        if first >= 0 and last < height:
            return Region(0, first, width, last - first + 1)
        left, top = self.content_offset
        first, last = (first if first >= 0 else -top), (last if last < height else self.outer_size.height - top - 1)
        return Region(-left, first, self.outer_size.width, last - first + 1)

    def in_next_frame(self, act: Callable[[], object]) -> None:
        """Do this when the next frame is due, unless the panel is gone by then.

        Textual's own timers never fire when the loop is late by more than their delay.
        """

        def act_if_there() -> None:
            if self.is_attached:
                act()

        asyncio.get_running_loop().call_later(FRAME_SECONDS, act_if_there)

    def on_resize(self) -> None:
        self.redraw()

    def render_lines(self, crop: Region) -> list[Strip]:
        # Whenever a widget has changed, Textual asks all on the screen for their lines; most have the same as before.
        if self._rendered is None or self._rendered[0] != crop:
            self._rendered = (crop, super().render_lines(crop))
        return self._rendered[1]

    def _set_dirty(self, *regions: Region) -> None:
        # What empties Textual's own cache of lines empties this one.
        self._rendered = None
        super()._set_dirty(*regions)

    def render_line(self, y: int) -> Strip:
        styles = self.styles_of_line(y)
        width = self.size.width
        spans = self._lines[y] if y < len(self._lines) else ()
        # Neighbours of one style are one segment: what a line costs is its segments.
        runs = groupby((span for span in spans if span[0]), key=lambda span: span[1])
        strip = Strip(
            Segment(clean("".join(text for text, _ in run)), styles.get(style, STYLES["text"])) for style, run in runs
        )
        return strip.adjust_cell_length(width, styles["text"])
