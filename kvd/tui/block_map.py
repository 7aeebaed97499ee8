"""Block map: the KV pool in the order of its block ids, by owner, by sharing, or by age. Owner: the event loop.

Every cell stands for as many neighbouring blocks as are needed for the whole pool to fit. Invariants: a cell is drawn
as free only if all of its blocks are; a client keeps its letter for as long as it has blocks; colour only repeats what
the character says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from string import ascii_uppercase
from typing import Literal

from kvd.insight import BlockMap, MapCell
from kvd.tui import glyphs
from kvd.tui.format import exact, fit, short_count
from kvd.tui.page import Refetch
from kvd.tui.panel import Panel, Span, Spans, crop, span_width
from kvd.tui.view import Link, View

MapMode = Literal["owner", "sharing", "age"]
MODES: tuple[MapMode, ...] = ("owner", "sharing", "age")

MAX_CELLS = 1024
"""More would hold up the event loop for longer than 2 ms, and say no more to a person."""

_MAX_CELL_WIDTH = 3
_MIN_HEIGHT_WITH_TWO_LEGEND_LINES = 9
_MORE_OWNERS = "+"
_FREE = "·"
_OWNER_STYLES = (("active", "active-bold"), ("prefill", "prefill-bold"), ("cached", "cached-bold"),
                 ("decode", "decode-bold"), ("warning", "warning-bold"), ("text", "bright"))  # fmt: skip
_AGES = (
    # used less than so many seconds ago, its glyph, style, and how the legend calls it
    (10.0, "▇", "prefill-7", "<10s"),
    (60.0, "▆", "prefill-5", "<1m"),
    (600.0, "▅", "prefill-3", "<10m"),
    (3600.0, "▃", "prefill-1", "<1h"),
    (float("inf"), "▁", "prefill-0", "older"),
)
_AGE_BOUNDS = tuple(below for below, _, _, _ in _AGES[:-1])
_SUBTITLES: dict[MapMode, str] = {
    "owner": "by owner; small letter: only cached",
    "sharing": "by sharing",
    "age": "by time since the cached were used",
}


class Letters:
    """Which client has which letter; remembers it from one map to the next."""

    def __init__(self) -> None:
        self._indexes: dict[str, int] = {}

    def assign(self, owners: tuple[str, ...]) -> tuple[int, ...]:
        """Per owner its number, the lowest that is free for a new one; owners that are gone give theirs back."""
        kept = {owner: self._indexes[owner] for owner in owners if owner in self._indexes}
        free = iter(sorted(set(range(len(owners))) - set(kept.values())))
        for owner in owners:
            if owner not in kept:
                kept[owner] = next(free)
        self._indexes = kept
        return tuple(kept[owner] for owner in owners)


def letter(index: int) -> str:
    """The letter of an owner's number; the owners beyond Z share a sign."""
    return ascii_uppercase[index] if index < len(ascii_uppercase) else _MORE_OWNERS


def layout(num_cells: int, width: int, height: int) -> tuple[int, int]:
    """Cells per line, and characters per cell: as many as let every cell be seen; a small pool fills its place."""
    for cell_width in range(_MAX_CELL_WIDTH, 1, -1):
        columns = width // cell_width
        if columns and -(-num_cells // columns) <= height:
            return columns, cell_width
    return max(1, width), 1


def _cached_sign() -> str:
    # In ASCII the lightest shade and the dot of free blocks are the same.
    return "▒" if glyphs.is_ascii() else "░"


def _mostly_used(cell: MapCell) -> bool:
    return cell.num_cached + cell.num_active >= cell.num_free


def by_owner(cell: MapCell, numbers: tuple[int, ...]) -> Span:
    """The letter of the client with most blocks of the cell: small where none is active, bold where half are used."""
    if not cell.num_active and not cell.num_cached:
        return _FREE, "free"
    number = numbers[cell.owner] if 0 <= cell.owner < len(numbers) else len(ascii_uppercase)
    sign = letter(number)
    return sign if cell.num_active else sign.lower(), _OWNER_STYLES[number % len(_OWNER_STYLES)][_mostly_used(cell)]


def by_sharing(cell: MapCell) -> Span:
    """Pinned if any block is, else what most of the blocks are that are not free."""
    if cell.num_pinned:
        return "◆", "warning-bold"
    counts = (cell.num_shared, cell.num_active - cell.num_shared, cell.num_cached)
    most = max(counts)
    if most <= 0:
        return _FREE, "free"
    return (
        ("█", "active-bold") if counts[0] == most
        else ("▓", "active") if counts[1] == most
        else (_cached_sign(), "cached")
    )  # fmt: skip


def by_age(cell: MapCell) -> Span:
    """How long ago the cached blocks were used last, in the middle of them; full where more are active than cached."""
    if cell.num_active > cell.num_cached:
        return "█", "active"
    if not cell.num_cached:
        return _FREE, "free"
    _, sign, style, _ = _AGES[bisect_right(_AGE_BOUNDS, cell.idle_seconds)]
    return sign, style


def draw_cells(cells: Sequence[MapCell], mode: MapMode, numbers: tuple[int, ...], cell_width: int) -> Spans:
    """These cells as a line. Neighbours that look the same are one span."""
    if mode == "owner":
        spans = [by_owner(cell, numbers) for cell in cells]
    else:
        spans = list(map(by_sharing if mode == "sharing" else by_age, cells))
    return tuple(
        ("".join(sign * cell_width for sign, _ in run), style) for style, run in groupby(spans, lambda span: span[1])
    )


class BlockMapPanel(Panel):
    """The map and its legend, with the counts of blocks that a cell cannot tell."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="box")
        self.mode: MapMode = "owner"
        self.group_id = 0
        self._map: BlockMap | None = None
        self._letters = Letters()
        self._numbers: tuple[int, ...] = ()
        self._totals = (0, 0, 0, 0, 0)
        self.problem = ""
        """Why there is no map."""
        self._drawn: list[Spans] = []  # the lines of this map so far
        self._drawn_as: tuple[object, ...] = ()

    @property
    def num_cells(self) -> int:
        """How many cells fit now; the engine is asked for no more. 0 before the first layout."""
        width, height = self.size
        return max(0, min(MAX_CELLS, width * (height - _legend_lines(height))))

    @property
    def num_groups(self) -> int:
        return 1 if self._map is None else self._map.num_groups

    def put(self, block_map: BlockMap) -> None:
        """Show this map from the next `show` on."""
        self._map = block_map
        present = tuple(owner for owner, count in zip(block_map.owners, block_map.owner_blocks, strict=True) if count)
        numbers = dict(zip(present, self._letters.assign(present), strict=True))
        self._numbers = tuple(numbers.get(owner, len(ascii_uppercase)) for owner in block_map.owners)
        cells = block_map.cells
        self._totals = (
            sum(cell.num_free for cell in cells),
            sum(cell.num_cached for cell in cells),
            sum(cell.num_active for cell in cells),
            sum(cell.num_shared for cell in cells),
            sum(cell.num_pinned for cell in cells),
        )
        self._drawn_as = ()

    def on_resize(self) -> None:
        super().on_resize()
        self.post_message(Refetch())

    def turn(self) -> MapMode:
        """Draw by the next of the three; returns which."""
        self.mode = MODES[(MODES.index(self.mode) + 1) % len(MODES)]
        self.redraw()
        return self.mode

    def next_group(self) -> int:
        """Ask for the next layer group from now on; returns its id."""
        self.group_id = (self.group_id + 1) % self.num_groups
        return self.group_id

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        block_map = self._map
        if block_map is None:
            return "Block map", ""
        title = f"Block map  {exact(block_map.num_blocks)} blocks, {exact(block_map.blocks_per_cell)} per cell"
        if block_map.num_groups > 1:
            title += f", layer group {block_map.group_id + 1} of {block_map.num_groups}"
        subtitle = _SUBTITLES[self.mode]
        return title, subtitle if len(subtitle) + 4 <= self.size.width else ""

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        block_map = self._map
        if block_map is None:
            return [((fit(self.problem or "waiting for the map of the blocks", width), "muted"),)]
        legend_lines = _legend_lines(height)
        rows = max(0, height - legend_lines)
        lines = self._cells(block_map, width, rows)
        lines += [()] * (rows - len(lines))
        return [*lines, *flow(self._legend(block_map, 24 if legend_lines > 1 else 12), width, legend_lines)]

    def _cells(self, block_map: BlockMap, width: int, num_rows: int) -> list[Spans]:
        # A map that was asked for before the terminal grew smaller is cut off until the next one comes.
        columns, cell_width = layout(len(block_map.cells), width, num_rows)
        key = (self.mode, columns, cell_width, glyphs.is_ascii())
        if self._drawn_as != key:
            self._drawn_as, self._drawn = key, []
        num_rows = min(num_rows, -(-len(block_map.cells) // columns))
        while len(self._drawn) < num_rows:
            start = len(self._drawn) * columns
            cells = block_map.cells[start : start + columns]
            self._drawn.append(draw_cells(cells, self.mode, self._numbers, cell_width))
        return self._drawn[:num_rows]

    def _legend(self, block_map: BlockMap, name_width: int) -> list[Spans]:
        free, cached, active, shared, pinned = self._totals
        end: list[Spans] = [_entry(_FREE, "free", "free", free)]
        if self.mode == "sharing":
            return [
                *end,
                _entry(_cached_sign(), "cached", "cached", cached),
                _entry("▓", "active", "active", active - shared),
                _entry("█", "active-bold", "shared", shared),
                _entry("◆", "warning-bold", "pinned", pinned),
            ]
        if self.mode == "age":
            ages: list[Spans] = [((sign, style), (f" {name}", "muted")) for _, sign, style, name in _AGES]
            return [
                _entry("█", "active", "active", active),
                *ages,
                *end,
            ]
        owners = sorted(
            zip(block_map.owner_blocks, self._numbers, block_map.owners, strict=True), key=lambda owner: -owner[0]
        )
        entries = [
            _entry(
                letter(number), _OWNER_STYLES[number % len(_OWNER_STYLES)][1], fit(name or "unnamed", name_width), count
            )
            for count, number, name in owners
            if count
        ]
        return [*end, *entries]


def _legend_lines(height: int) -> int:
    return 0 if height <= 1 else 2 if height >= _MIN_HEIGHT_WITH_TWO_LEGEND_LINES else 1


def _entry(sign: str, style: str, name: str, count: int) -> Spans:
    return (sign, style), (f" {name.rstrip()} ", "muted"), (short_count(count), "text")


def flow(entries: list[Spans], width: int, num_lines: int) -> list[Spans]:
    """The entries side by side in at most that many lines; where some do not fit, how many those are."""
    if num_lines <= 0:
        return []
    lines: list[Spans] = [()]
    for index, entry in enumerate(entries):
        line = lines[-1]
        is_last_line, is_last = len(lines) == num_lines, index == len(entries) - 1
        # In the last line there has to be room left for the remark about those that do not fit.
        room = width - (10 if is_last_line and not is_last else 0)
        gap: Spans = (("  ", "text"),) if line else ()
        if span_width((*line, *gap, *entry)) <= room:
            lines[-1] = (*line, *gap, *entry)
        elif not is_last_line:
            lines.append(entry)
        else:
            lines[-1] = (*line, (f"  {len(entries) - index} more", "muted"))
            break
    return [crop(line, width) for line in lines]
