"""Top prefixes: the chains of cached blocks that were found most often, and what to do with one. Owner: the event loop.

Invariant: no text of a prompt is asked for but by the reveal key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from kvd.core import BLOCK_SIZE
from kvd.insight import Console
from kvd.tui.format import age, clean, exact, fit, fit_right, percent, short_count
from kvd.tui.listing import ListPanel
from kvd.tui.page import Do
from kvd.tui.panel import Spans
from kvd.tui.question import Answer, Question
from kvd.tui.reveal import show_text
from kvd.tui.view import Link, View
from kvd.views import PrefixView

LIMIT = 200
"""How many chains are asked for."""

Cell = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Column:
    """sort: by what its rows are sorted; falls: whether the largest comes first unless it is reversed."""

    title: str
    width: int
    cell: Callable[[PrefixView, int], Cell]
    sort: Callable[[PrefixView], Any]
    falls: bool = True
    is_left: bool = False


def _flags(row: PrefixView, capacity: int) -> Cell:
    if row.is_pinned:
        return "◆ pinned", "warning"
    return ("▓ active", "active") if row.is_active else ("  cached", "cached")


_COLUMNS = (
    _Column("tokens", 7, lambda row, _: (short_count(row.num_tokens), "bright"), lambda row: row.num_tokens),
    _Column("hits", 6, lambda row, _: (short_count(row.num_hits), "text"), lambda row: row.num_hits),
    _Column("pool", 5, lambda row, pool: (percent(row.num_tokens, pool), "text"), lambda row: row.num_tokens),
    _Column("age", 6, lambda row, _: (age(row.age_seconds), "muted"), lambda row: row.age_seconds),
    _Column("idle", 6, lambda row, _: (age(row.idle_seconds), "text"), lambda row: row.idle_seconds, falls=False),
    _Column("state", 8, _flags, lambda row: (row.is_pinned, row.is_active), is_left=True),
    _Column(
        "owner", 8, lambda row, _: (row.client or "unnamed", "text"), lambda row: row.client, falls=False, is_left=True
    ),
    _Column("id", 8, lambda row, _: (row.prefix_id, "muted"), lambda row: row.prefix_id, falls=False, is_left=True),
)
_HITS = 1
_ID_WIDTH = 32
_OWNER_WIDTH = 28


class PrefixPanel(ListPanel):
    """The table of chains, sorted as the operator likes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "sort(-1)", show=False),
        Binding("right", "sort(1)", show=False),
        Binding("r", "reverse", show=False),
        Binding("p", "pin", show=False),
        Binding("d,delete", "drop", show=False),
        Binding("v", "reveal", show=False),
    ]

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="box")
        self._all: tuple[PrefixView, ...] | None = None
        self._prefixes: tuple[PrefixView, ...] = ()
        self._filter = ""
        self.problem = ""
        """Why there is no list."""
        self._sorted_by = _HITS
        self._is_reversed = False

    # ------------------------------------------------------------------ rows

    @property
    def num_rows(self) -> int:
        return len(self._prefixes)

    @property
    def selected(self) -> PrefixView | None:
        """The chain under the cursor."""
        return self._prefixes[self.cursor] if self._prefixes else None

    def put(self, prefixes: tuple[PrefixView, ...]) -> None:
        """Show these chains from the next `show` on; the cursor stays with its chain."""
        self._all = prefixes
        self._arrange()

    def set_filter(self, text: str) -> None:
        """Show only chains whose owner or id has this in it."""
        self._filter = text.casefold()
        self._arrange()
        self.redraw()

    def _arrange(self) -> None:
        selected = self.selected
        column = _COLUMNS[self._sorted_by]
        rows = [row for row in self._all or () if self._filter in f"{row.client} {row.prefix_id}".casefold()]
        rows.sort(key=lambda row: row.prefix_id)
        rows.sort(key=column.sort, reverse=column.falls != self._is_reversed)
        self._prefixes = tuple(rows)
        names = [row.prefix_id for row in rows]
        is_kept = selected is not None and selected.prefix_id in names
        self.place(names.index(selected.prefix_id) if selected is not None and is_kept else self.cursor)

    def action_sort(self, step: int) -> None:
        self._sorted_by = (self._sorted_by + step) % len(_COLUMNS)
        self._is_reversed = False
        self._arrange()
        self.redraw()

    def action_reverse(self) -> None:
        self._is_reversed = not self._is_reversed
        self._arrange()
        self.redraw()

    # ------------------------------------------------------------------ acts

    def action_pin(self) -> None:
        row = self.selected
        if row is None:
            return

        async def pin(console: Console) -> str:
            num_blocks = await console.pin(row.prefix_id)
            if not num_blocks:
                return "not pinned: the chain is gone, or pinning it would leave too little room"
            return f"pinned: {_blocks(num_blocks)} until it is unpinned"

        async def unpin(console: Console) -> str:
            return "unpinned" if await console.unpin(row.prefix_id) else "it was not pinned any more"

        self.post_message(Do("unpin", unpin) if row.is_pinned else Do("pin", pin))

    def action_drop(self) -> None:
        row = self.selected
        if row is None:
            return
        details = (
            f"{exact(row.num_tokens)} tokens of {clean(row.client) or 'an unnamed client'}, "
            f"found {exact(row.num_hits)} {'time' if row.num_hits == 1 else 'times'}",
            "Blocks that are in use, pinned or shared with other chains stay.",
            "A prompt that begins like this is then computed again.",
        )
        answers = (Answer("n", "keep it", ""), Answer("y", "drop it", "yes"))

        async def drop(console: Console) -> str:
            num_blocks = await console.drop_prefix(row.prefix_id)
            return (
                f"dropped: {_blocks(num_blocks)}" if num_blocks else "nothing dropped: in use, pinned, shared or gone"
            )

        self.post_message(Do("drop", drop, question=Question("Drop this prefix", details, answers)))

    def action_reveal(self) -> None:
        if self.selected is not None:
            self.post_message(show_text(self.app, self.selected.prefix_id))

    # ------------------------------------------------------------------ drawing

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "Top prefixes", self.span_in_view

    def heading(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if not self._prefixes:
            return []
        marks = ("▾", "▴") if _COLUMNS[self._sorted_by].falls else ("▴", "▾")
        spans = [(" ", "muted")]
        for index, (column, cells) in enumerate(_widths(width - 2)):
            is_sorted = index == self._sorted_by
            title = column.title + (marks[self._is_reversed] if is_sorted else "")
            text = fit(title, cells) if column.is_left else fit_right(title, cells)
            spans.append((" " * (index > 0) + text, "bright" if is_sorted else "muted"))
        return [tuple(spans)]

    def row(self, index: int, width: int, *, is_cursor: bool) -> Spans:
        prefix = self._prefixes[index]
        capacity = 0 if self._view is None else self._view.snapshot.num_blocks * BLOCK_SIZE
        spans = [("▸", "key") if is_cursor else (" ", "text")]
        for number, (column, cells) in enumerate(_widths(width - 2)):
            text, style = column.cell(prefix, capacity)
            text = fit(text, cells) if column.is_left else fit_right(text, cells)
            spans.append((" " * (number > 0) + text, style))
        return tuple(spans)

    def absence(self, view: View | None, link: Link, width: int) -> list[Spans]:
        if self._all is None:
            return [((fit(self.problem or "waiting for the list of prefixes", width), "muted"),)]
        if view is not None and not view.snapshot.info.prefix_caching:
            return [((fit("prefix caching is off: set enable_prefix_caching: true", width), "warning"),)]
        if self._all:
            return [((fit("No prefix matches the filter.", width), "muted"),)]
        text = "Nothing is cached yet. Whole blocks of 16 tokens stay here for prompts that begin alike."
        return [((fit(text, width), "muted"),)]


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{exact(count)} blocks"


def _widths(width: int) -> list[tuple[_Column, int]]:
    """The columns with their widths, one cell between neighbours; what is left over goes to the owner, then the id."""
    spare = width - sum(column.width + 1 for column in _COLUMNS) + 1
    owner = max(0, min(spare, _OWNER_WIDTH - 8))
    prefix_id = max(0, min(spare - owner, _ID_WIDTH - 8))
    return [(column, column.width + {"owner": owner, "id": prefix_id}.get(column.title, 0)) for column in _COLUMNS]
