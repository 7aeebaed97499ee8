"""The columns of the request table, which of them fit, and what they are sorted by. Pure functions, any thread.

Invariant: what `columns_for` returns fits the width it was asked for, from 33 cells on; the essential columns are
all there at 80 columns of terminal, and below that those go first that say least about one request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvd.tui.charts import meter
from kvd.tui.format import age, duration, percent, rate, short_count, short_id
from kvd.views import RequestState, RequestView

Cell = tuple[str, str]
"""Text and style name."""

_STATE_STYLES: dict[RequestState, str] = {
    "decode": "decode",
    "prefill": "prefill",
    "restoring": "cached",
    "waiting": "muted",
    "preempted": "warning",
    "swapped": "warning",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `shown_from` is the table width in cells at which it appears.

    value: what the column is sorted by; numbers come largest first, texts in the order of the alphabet.
    """

    title: str
    width: int
    cell: Callable[[RequestView, int], Cell]
    value: Callable[[RequestView], float | str | None]
    is_left: bool = False
    shown_from: int = 0

    @property
    def is_descending(self) -> bool:
        """Whether sorting by it begins with the largest."""
        return not self.is_left or self.title == "progress"


def prefill_fraction(row: RequestView) -> float:
    """How much of what its prefill has to reach is computed or was cached, 0 … 1."""
    goal = _prefill_goal(row)
    return min(1.0, row.num_computed_tokens / goal) if goal else 1.0


def _prefill_goal(row: RequestView) -> int:
    """Tokens of the prompt; after a preemption also those that were generated before it."""
    return row.num_prefill_tokens or row.num_prompt_tokens


def _state(row: RequestView, width: int) -> Cell:
    style = _STATE_STYLES[row.state]
    if row.state == "prefill":
        return f"prefill {percent(min(row.num_computed_tokens, _prefill_goal(row)), _prefill_goal(row))}", style
    return row.state, style


def _progress(row: RequestView, width: int) -> Cell:
    if row.state == "waiting":
        return "", "faint"
    is_output = row.state == "decode"
    fraction = row.num_output_tokens / max(1, row.max_tokens) if is_output else prefill_fraction(row)
    return "".join(meter(fraction, width)), _STATE_STYLES[row.state]


def _cached(row: RequestView, width: int) -> Cell:
    style = "cached" if row.num_cached_tokens else "faint"
    return percent(row.num_cached_tokens, row.num_prompt_tokens), style


def _output(row: RequestView, width: int) -> Cell:
    style = "text" if row.num_output_tokens else "faint"
    return f"{short_count(row.num_output_tokens)}/{short_count(row.max_tokens)}".replace(",", ""), style


def _preemptions(row: RequestView, width: int) -> Cell:
    """How often, and by which way: computed again (r) or kept in RAM (s, swapped)."""
    if not row.num_preemptions:
        return "0", "faint"
    ways = ((row.num_preemptions - row.num_swaps, "r"), (row.num_swaps, "s"))
    return "".join(f"{count}{letter}" for count, letter in ways if count), "warning"


def _share_done(row: RequestView) -> float:
    return 1 + row.num_output_tokens / max(1, row.max_tokens) if row.state == "decode" else prefill_fraction(row)


COLUMNS = (
    Column(
        "id",
        6,
        lambda row, width: (short_id(row.request_id, width), "bright"),
        lambda row: row.request_id,
        is_left=True,
    ),
    Column("client", 8, lambda row, width: (row.client or "–", "text"), lambda row: row.client.lower(), is_left=True),
    Column(
        "api",
        4,
        lambda row, width: (row.endpoint[:width], "muted"),
        lambda row: row.endpoint,
        is_left=True,
        shown_from=76,
    ),
    Column("state", 11, _state, lambda row: row.state, is_left=True),
    Column("progress", 14, _progress, _share_done, is_left=True, shown_from=110),
    Column(
        "prompt",
        6,
        lambda row, width: (short_count(row.num_prompt_tokens), "text"),
        lambda row: row.num_prompt_tokens,
        shown_from=92,
    ),
    Column("hit", 4, _cached, lambda row: row.num_cached_tokens / max(1, row.num_prompt_tokens), shown_from=60),
    Column("output", 9, _output, lambda row: row.num_output_tokens, shown_from=43),
    Column(
        "tok/s",
        5,
        lambda row, width: (rate(row.tokens_per_second), "decode"),
        lambda row: row.tokens_per_second,
        shown_from=49,
    ),
    Column(
        "TTFT", 5, lambda row, width: (duration(row.ttft_seconds), "text"), lambda row: row.ttft_seconds, shown_from=55
    ),
    Column(
        "blks",
        5,
        lambda row, width: (short_count(row.num_blocks).replace(",", ""), "active"),
        lambda row: row.num_blocks,
        shown_from=71,
    ),
    Column("pre", 4, _preemptions, lambda row: row.num_preemptions, shown_from=65),
    Column("prio", 4, lambda row, width: (str(row.priority), "muted"), lambda row: row.priority, shown_from=120),
    Column("age", 5, lambda row, width: (age(row.age_seconds), "muted"), lambda row: row.age_seconds),
)

_GROWTH = (("client", 16), ("id", 12), ("api", 11), ("client", 40), ("progress", 30), ("client", 60))
"""Which columns take the room that is left over, in this order, each up to this width."""


@lru_cache(maxsize=64)
def columns_for(width: int) -> tuple[tuple[Column, int], ...]:
    """The columns with their widths, one cell between neighbours, for a table of `width` cells."""
    shown = [column for column in COLUMNS if column.shown_from <= width]
    spare = width - sum(column.width + 1 for column in shown) + 1
    widths = {column.title: column.width for column in shown}
    for title, width_wanted in _GROWTH:
        extra = max(0, min(spare, width_wanted - widths.get(title, width_wanted)))
        if extra:
            widths[title] += extra
            spare -= extra
    return tuple((column, widths[column.title]) for column in shown)
