"""A panel of rows with a cursor, below a heading and above a footing. Owner: the event loop.

Only the rows in view are ever formatted, so that a thousand cost what twenty do. Invariant: the cursor is on a row as
long as there is one; a list that follows has it on the last row until the operator moves it away.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType

from kvd.tui.format import clean, fit
from kvd.tui.palette import CURSOR_STYLES, STYLES
from kvd.tui.panel import Panel, Spans
from kvd.tui.view import Link, View


class ListPanel(Panel, can_focus=True):
    """Subclasses implement `num_rows` and `row`, and what stands above, below, and in place of the rows."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    def __init__(self, *, id: str, follows: bool = False, classes: str = "") -> None:
        """follows: new rows come in at the end, and the newest is what the operator wants to see."""
        super().__init__(id=id, classes=classes)
        self.cursor = 0
        self.can_follow = follows
        self.is_following = follows
        self._top = 0
        self._first_line = 0  # of the rows
        self._page = 1

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """How many there are now."""

    @abstractmethod
    def row(self, index: int, width: int, *, is_cursor: bool) -> Spans:
        """Row `index`; the row under the cursor must differ from the same row without it, to be repainted."""

    def heading(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        """The lines above the rows."""
        return []

    def footing(self, width: int, height: int) -> list[Spans]:
        """The lowest lines: more about the row under the cursor. Not asked for where there are no rows."""
        return []

    def absence(self, view: View | None, link: Link, width: int) -> list[Spans]:
        """What stands where the rows would, while there are none."""
        return []

    @property
    def span_in_view(self) -> str:
        """`1–20 of 500`: the rows that can be seen; empty where there are none."""
        last = min(self.num_rows, self._top + self._page)
        return f"{self._top + 1}–{last} of {self.num_rows:,}" if self.num_rows else ""

    # ------------------------------------------------------------------ the cursor

    def place(self, index: int) -> None:
        """Put the cursor on a row without a word about following."""
        self.cursor = max(0, min(index, self.num_rows - 1))

    def action_move(self, delta: int) -> None:
        if self.num_rows:
            self.place(self.cursor + delta)
            self.is_following = self.can_follow and self.cursor == self.num_rows - 1
            self.redraw()

    def action_page(self, direction: int) -> None:
        self.action_move(direction * self._page)

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and self._first_line <= offset.y < self._first_line + self._page:
            self.action_move(self._top + offset.y - self._first_line - self.cursor)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    # ------------------------------------------------------------------ drawing

    def styles_of_line(self, y: int) -> Mapping[str, Style]:
        is_row = self._first_line <= y < self._first_line + self._page
        is_cursor = is_row and self.num_rows > 0 and y - self._first_line + self._top == self.cursor
        return CURSOR_STYLES if is_cursor else STYLES

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        head = self.heading(view, link, width, height)
        if not self.num_rows:
            return [*head, *self.absence(view, link, width)]
        self.place(self.num_rows - 1 if self.is_following else self.cursor)
        # The row under the cursor is worth more than what is said about it.
        foot = self.footing(width, height)[: max(0, height - len(head) - 1)]
        self._first_line = len(head)
        self._page = page = max(1, height - len(head) - len(foot))
        self._top = max(0, min(self._top, self.cursor, self.num_rows - page), self.cursor - page + 1)
        shown = range(self._top, min(self.num_rows, self._top + page))
        lines = [*head, *(self.row(index, width, is_cursor=index == self.cursor) for index in shown)]
        if foot:
            lines += [()] * (height - len(foot) - len(lines))
        return [*lines, *foot]


def wrap(text: str, width: int, max_lines: int = 1_000) -> list[str]:
    """The cleaned text in at most `max_lines` lines of at most `width` cells, broken at blanks where there are some; an
    ellipsis marks what is left out.
    """
    rest = " ".join(clean(text).split())
    lines: list[str] = []
    while rest and width > 1 and len(lines) < max_lines:
        if cell_len(rest) <= width:
            return [*lines, rest]
        if len(lines) == max_lines - 1:
            return [*lines, fit(rest, width).rstrip()]
        head = set_cell_size(rest, width).rstrip()
        is_whole_word = rest[len(head)] == " "
        end = len(head) if is_whole_word else head.rfind(" ")
        end = end if end > 0 else len(head)
        lines.append(rest[:end])
        rest = rest[end:].lstrip()
    return lines
