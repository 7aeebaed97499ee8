"""Requests: one line for each, with a cursor, an order and a filter. Owner: the event loop.

Only the lines in view are ever formatted, so that five hundred requests cost what twenty do. Invariant: the
cursor stays with its request, wherever that moves; when the request ends, the cursor stays where it was.

For a page that has the table: `select` puts the cursor on a request, `selected` is the one under it, `set_filter` and
`copied` are what the page's own are, `keys` are for the key line. `Opened` is posted on enter, and is the page's to
handle; `x` posts the `Do` that ends the request, question included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from kvd.tui.acts import abort
from kvd.tui.columns import COLUMNS, Column, columns_for
from kvd.tui.format import clean, exact, fit, fit_right
from kvd.tui.palette import CURSOR_STYLES, STYLES
from kvd.tui.panel import Panel, Span, Spans
from kvd.tui.view import Link, View, matching, sorted_by
from kvd.views import RequestView

_HEADING_LINES = 1


class RequestsPanel(Panel, can_focus=True):
    """The table of requests; posts `Opened` and `Do` for the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
        Binding("left", "sort(-1)", show=False),
        Binding("right", "sort(1)", show=False),
        Binding("r", "reverse", show=False),
        Binding("enter", "open", show=False),
        Binding("x,delete", "abort", show=False),
    ]

    keys: ClassVar[tuple[tuple[str, str], ...]] = (("enter", "open"), ("x", "abort"), ("←→ r", "sort"))

    class Opened(Message):
        """The operator wants to know more of this request."""

        def __init__(self, request_id: str) -> None:
            super().__init__()
            self.request_id = request_id

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._cursor = 0
        self._cursor_id: str | None = None
        self._top = 0
        self._sorted_by = ""  # title of a column; empty: reading order
        self._is_reversed = False
        self._filter = ""
        self._source: tuple[RequestView, ...] = ()
        self._rows: tuple[RequestView, ...] = ()

    # ------------------------------------------------------------------ what is shown, and selected

    @property
    def rows(self) -> tuple[RequestView, ...]:
        """The requests that match the filter, in the order that the operator chose."""
        return self._rows

    @property
    def selected(self) -> RequestView | None:
        """The request under the cursor."""
        return self._rows[self._cursor] if self._rows else None

    @property
    def _page(self) -> int:
        return max(1, self.size.height - _HEADING_LINES)

    def select(self, request_id: str) -> bool:
        """Put the cursor on this request; False where it is not in the table."""
        for index, row in enumerate(self._rows):
            if row.request_id == request_id:
                self.action_move(index - self._cursor)
                return True
        return False

    def set_filter(self, text: str) -> None:
        """Show only the requests that match."""
        self._filter = text
        self._arrange()
        self.redraw()

    def copied(self) -> str:
        """The id of the request under the cursor."""
        return self.selected.request_id if self.selected is not None else ""

    def show(self, view: View | None, link: Link) -> int:
        requests = view.requests if view is not None else ()
        if requests is not self._source:
            self._source = requests
            self._arrange()
        return super().show(view, link)

    def _arrange(self) -> None:
        rows = matching(self._source, self._filter)
        column = self._column()
        if column is not None:
            rows = sorted_by(rows, column.value, is_descending=column.is_descending != self._is_reversed)
        elif self._is_reversed:
            rows = rows[::-1]
        self._rows = rows
        if self._cursor_id is not None:
            for index, row in enumerate(rows):
                if row.request_id == self._cursor_id:
                    self._cursor = index
                    break
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        self._cursor_id = rows[self._cursor].request_id if rows else None

    def _column(self) -> Column | None:
        return next((column for column in COLUMNS if column.title == self._sorted_by), None)

    # ------------------------------------------------------------------ keys

    def action_move(self, delta: int) -> None:
        rows = self._rows
        if rows:
            self._cursor = max(0, min(self._cursor + delta, len(rows) - 1))
            self._cursor_id = rows[self._cursor].request_id
            self.redraw()

    def action_page(self, direction: int) -> None:
        self.action_move(direction * self._page)

    def action_sort(self, delta: int) -> None:
        titles = ["", *(column.title for column, _ in columns_for(self.size.width - 2))]
        index = titles.index(self._sorted_by) if self._sorted_by in titles else 0
        self._sorted_by = titles[(index + delta) % len(titles)]
        self._is_reversed = False
        self._arrange()
        self.redraw()

    def action_reverse(self) -> None:
        self._is_reversed = not self._is_reversed
        self._arrange()
        self.redraw()

    def action_open(self) -> None:
        if self.selected is not None:
            self.post_message(self.Opened(self.selected.request_id))

    def action_abort(self) -> None:
        if self.selected is not None:
            self.post_message(abort(self.selected))

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
        return title, self._position()

    def _position(self) -> str:
        parts = []
        if self._sorted_by or self._is_reversed:
            column = self._column()
            is_descending = (column is not None and column.is_descending) != self._is_reversed
            parts.append(f"by {self._sorted_by or 'state'} {'▼' if is_descending else '▲'}")
        if self._filter:
            parts.append(f"/{fit(self._filter, min(20, cell_len(clean(self._filter))))}")
        if self._rows:
            last = min(len(self._rows), self._top + self._page)
            parts.append(f"{self._top + 1}–{last} of {len(self._rows)}")
        return "  ".join(parts)

    def styles_of_line(self, y: int) -> Mapping[str, Style]:
        is_cursor = bool(self._rows) and y - _HEADING_LINES + self._top == self._cursor and y >= _HEADING_LINES
        return CURSOR_STYLES if is_cursor else STYLES

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        rows = self._rows
        if not rows:
            if self._source:
                return _nothing_matches(width)
            return _silence(width) if link.problem else _invitation(link, width)
        page = max(1, height - _HEADING_LINES)
        self._top = max(0, min(self._top, self._cursor, len(rows) - page))
        self._top = max(self._top, self._cursor - page + 1)
        columns = columns_for(width - 2)
        lines = [_heading(columns, self._sorted_by)]
        for index, row in enumerate(rows[self._top : self._top + page], self._top):
            lines.append(_line(columns, row, is_cursor=index == self._cursor))
        return lines


def _heading(columns: tuple[tuple[Column, int], ...], sorted_by: str) -> Spans:
    spans: list[Span] = [(" ", "muted")]
    for index, (column, width) in enumerate(columns):
        text = fit(column.title, width) if column.is_left else fit_right(column.title, width)
        spans.append((" " * (index > 0) + text, "bright" if column.title == sorted_by else "muted"))
    return tuple(spans)


def _line(columns: tuple[tuple[Column, int], ...], row: RequestView, *, is_cursor: bool) -> Spans:
    # The mark also makes the line differ from the same line without the cursor, so that it is repainted.
    spans = [("▸", "key") if is_cursor else (" ", "text")]
    for index, (column, width) in enumerate(columns):
        text, style = column.cell(row, width)
        text = fit(text, width) if column.is_left else fit_right(text, width)
        spans.append((" " * (index > 0) + text, style))
    return tuple(spans)


def _nothing_matches(width: int) -> list[Spans]:
    return [((fit(" No request matches the filter; escape clears it.", width), "muted"),)]


def _silence(width: int) -> list[Spans]:
    return [((fit(" There was no request when the server was seen last.", width), "muted"),)]


def _invitation(link: Link, width: int) -> list[Spans]:
    """What stands in the table while there is nothing to show: how to change that."""
    return [
        ((fit(" No requests at the moment. Point any OpenAI client here:", width), "muted"),),
        (("   base URL  ", "muted"), (link.address, "key")),
        (("   model     ", "muted"), (link.model, "bright")),
    ]
