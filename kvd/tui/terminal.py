"""The last thing before the terminal: what it cannot or must not show is taken out of every line.

Textual passes each line that it has drawn, borders and its own widgets included, through the filters of the app.
Owner: the event loop. Invariant: with `is_ascii` no character above 127 leaves, without colour no colour does, whatever
a widget drew.
"""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

from kvd.tui.glyphs import plain


class TerminalFilter(LineFilter):
    """Takes out non-ASCII characters, or colours, or both."""

    def __init__(self, *, is_ascii: bool, has_color: bool) -> None:
        super().__init__(enabled=is_ascii or not has_color)
        self._is_ascii = is_ascii
        self._has_color = has_color

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if not self.enabled:
            return segments
        return [
            segment
            if segment.control
            else Segment(
                plain(segment.text) if self._is_ascii else segment.text,
                segment.style if self._has_color or segment.style is None else _colorless(segment.style),
            )
            for segment in segments
        ]


@lru_cache(maxsize=1024)
def _colorless(style: Style) -> Style:
    """The style with its bold, reverse and underline, in the terminal's own two colours."""
    return style.without_color
