"""Requests: one line for each, with a cursor. Owner: the event loop.

Only the lines in view are ever formatted, so that five hundred requests cost what twenty do. Invariant: the
cursor stays with its request, wherever that moves; when the request ends, the cursor stays where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from kvd.tui.columns import Column, columns_for
from kvd.tui.format import exact, fit, fit_right
from kvd.tui.palette import CURSOR_STYLES, STYLES
from kvd.tui.panel import Panel, Spans
from kvd.tui.view import Link, View
from kvd.views import RequestView

_HEADING_LINES = 1


class RequestsPanel(Panel, can_focus=True):
    """The table of requests; posts `AbortRequested` for the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
        Binding("x,delete", "abort", show=False),
    ]

    class AbortRequested(Message):
        """The operator wants to end this request."""

        def __init__(self, row: RequestView) -> None:
            super().__init__()
            self.row = row

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._cursor = 0
        self._cursor_id: str | None = None
        self._top = 0

    # ------------------------------------------------------------------ what is selected

    @property
    def rows(self) -> tuple[RequestView, ...]:
        return self._view.requests if self._view is not None else ()

    @property
    def selected(self) -> RequestView | None:
        """The request under the cursor."""
        return self.rows[self._cursor] if self.rows else None

    @property
    def _page(self) -> int:
        return max(1, self.size.height - _HEADING_LINES)

    def show(self, view: View | None, link: Link) -> int:
        rows = view.requests if view is not None else ()
        if self._cursor_id is not None:
            for index, row in enumerate(rows):
                if row.request_id == self._cursor_id:
                    self._cursor = index
                    break
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        self._cursor_id = rows[self._cursor].request_id if rows else None
        return super().show(view, link)

    def action_move(self, delta: int) -> None:
        rows = self.rows
        if rows:
            self._cursor = max(0, min(self._cursor + delta, len(rows) - 1))
            self._cursor_id = rows[self._cursor].request_id
            self.redraw()

    def action_page(self, direction: int) -> None:
        self.action_move(direction * self._page)

    def action_abort(self) -> None:
        if self.selected is not None:
            self.post_message(self.AbortRequested(self.selected))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and offset.y >= _HEADING_LINES:
            self.action_move(self._top + offset.y - _HEADING_LINES - self._cursor)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    # ------------------------------------------------------------------ drawing

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        if view is None:
            return "Requests", ""
        snapshot = view.snapshot
        title = f"Requests  {exact(snapshot.num_running)} running, {exact(snapshot.num_waiting)} waiting"
        if snapshot.running_limit:
            title += f", limit {exact(snapshot.running_limit)}"
        last = min(len(view.requests), self._top + self._page)
        return title, f"{self._top + 1}–{last} of {len(view.requests)}" if view.requests else ""

    def styles_of_line(self, y: int) -> Mapping[str, Style]:
        is_cursor = bool(self.rows) and y - _HEADING_LINES + self._top == self._cursor and y >= _HEADING_LINES
        return CURSOR_STYLES if is_cursor else STYLES

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        if not view.requests:
            return _invitation(link, width)
        page = max(1, height - _HEADING_LINES)
        self._top = max(0, min(self._top, self._cursor, len(view.requests) - page))
        self._top = max(self._top, self._cursor - page + 1)
        columns = columns_for(width - 2)
        lines = [_heading(columns)]
        for index, row in enumerate(view.requests[self._top : self._top + page], self._top):
            lines.append(_line(columns, row, is_cursor=index == self._cursor))
        return lines


def _heading(columns: tuple[tuple[Column, int], ...]) -> Spans:
    cells = (fit(c.title, width) if c.is_left else fit_right(c.title, width) for c, width in columns)
    return ((" " + " ".join(cells), "muted"),)


def _line(columns: tuple[tuple[Column, int], ...], row: RequestView, *, is_cursor: bool) -> Spans:
    # The mark also makes the line differ from the same line without the cursor, so that it is repainted.
    spans = [("▸", "key") if is_cursor else (" ", "text")]
    for index, (column, width) in enumerate(columns):
        text, style = column.cell(row, width)
        text = fit(text, width) if column.is_left else fit_right(text, width)
        spans.append((" " * (index > 0) + text, style))
    return tuple(spans)


def _invitation(link: Link, width: int) -> list[Spans]:
    """What stands in the table while there is nothing to show: how to change that."""
    return [
        ((fit("No requests at the moment. Point any OpenAI client here:", width), "muted"),),
        (("  base URL  ", "muted"), (link.address, "key")),
        (("  model     ", "muted"), (link.model, "bright")),
    ]
