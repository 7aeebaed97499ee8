"""Which theme is shown, and what it makes of colours and glyphs. Owner: the event loop."""

from __future__ import annotations

import os

from kvd.tui import glyphs, palette
from kvd.tui.terminal import TerminalFilter


class Looks:
    """The theme of one dashboard; the palette and the glyphs of the process follow it.

    NO_COLOR, as https://no-color.org has it: set and not empty means that no colour is ever shown.
    """

    def __init__(self, *, is_ascii: bool) -> None:
        self._has_color = not os.environ.get("NO_COLOR")
        self._wants_ascii = is_ascii
        self.theme = palette.THEME_NAMES[0]
        self._apply()

    @property
    def is_fixed(self) -> bool:
        """There is nothing to choose from, as all themes look alike without colour."""
        return not self._has_color

    @property
    def is_mono(self) -> bool:
        return self.theme == "mono" or not self._has_color

    def turn(self) -> str:
        """Go to the next theme; returns its name."""
        names = palette.THEME_NAMES
        self.theme = names[(names.index(self.theme) + 1) % len(names)]
        self._apply()
        return self.theme

    def line_filter(self) -> TerminalFilter:
        """The same one until the theme changes: Textual keeps what a line became by the filter that it passed."""
        return self._line_filter

    def _apply(self) -> None:
        glyphs.use_ascii(self._wants_ascii or self.theme == "mono")
        palette.use(self.theme, has_color=self._has_color)
        self._line_filter = TerminalFilter(is_ascii=glyphs.is_ascii(), has_color=not self.is_mono)
