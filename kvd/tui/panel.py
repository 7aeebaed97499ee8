"""The base of all panels: lines of styled spans, repainted line by line. Owner: the event loop.

A panel's `draw` is a pure function of view, link and size; what it returns is compared with what is on the screen,
and only lines that differ are repainted. Textual's own widgets would lay out and repaint whole tables twice a
second in the loop that also serves requests.

Invariant: `show` never raises for any view, however small the panel is, and never asks for a layout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
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


class Panel(Widget):
    """A widget that draws a `View`. Subclasses implement `draw`, and `titles` where they have a border."""

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._view: View | None = None
        self._link: Link | None = None
        self._lines: list[Spans] = []
        self._titles = ("", "")

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
        """Repaint the lines that have changed; returns how many those are."""
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
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))
        titles = self.titles(self._view, self._link)
        if titles != self._titles:
            self._titles = titles
            self.border_title, self.border_subtitle = titles
        return len(changed)

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        styles = self.styles_of_line(y)
        width = self.size.width
        spans = self._lines[y] if y < len(self._lines) else ()
        strip = Strip(Segment(clean(text), styles.get(style, STYLES["text"])) for text, style in spans if text)
        return strip.adjust_cell_length(width, styles["text"])
