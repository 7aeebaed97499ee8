"""The columns of the request table and which of them fit. Pure functions, callable from any thread.

Invariant: what `columns_for` returns fits the width it was asked for, from 60 cells on; the essential columns are
all there at 80 columns of terminal.
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
    """One column; `shown_from` is the table width in cells at which it appears."""

    title: str
    width: int
    cell: Callable[[RequestView, int], Cell]
    is_left: bool = False
    shown_from: int = 0


def prefill_fraction(row: RequestView) -> float:
    """How much of the prompt is computed or was cached, 0 … 1."""
    return min(1.0, row.num_computed_tokens / row.num_prompt_tokens) if row.num_prompt_tokens else 1.0


def _state(row: RequestView, width: int) -> Cell:
    style = _STATE_STYLES[row.state]
    if row.state == "prefill":
        return f"prefill {percent(row.num_computed_tokens, row.num_prompt_tokens)}", style
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
    return str(row.num_preemptions), "warning" if row.num_preemptions else "faint"


_COLUMNS = (
    Column("id", 6, lambda row, width: (short_id(row.request_id, width), "bright"), is_left=True),
    Column("client", 8, lambda row, width: (row.client or "–", "text"), is_left=True),
    Column("api", 4, lambda row, width: (row.endpoint[:width], "muted"), is_left=True),
    Column("state", 11, _state, is_left=True),
    Column("progress", 14, _progress, is_left=True, shown_from=110),
    Column("prompt", 6, lambda row, width: (short_count(row.num_prompt_tokens), "text"), shown_from=92),
    Column("hit", 4, _cached),
    Column("output", 9, _output),
    Column("tok/s", 5, lambda row, width: (rate(row.tokens_per_second), "decode")),
    Column("TTFT", 5, lambda row, width: (duration(row.ttft_seconds), "text")),
    Column("blks", 5, lambda row, width: (short_count(row.num_blocks).replace(",", ""), "active")),
    Column("pre", 3, _preemptions),
    Column("prio", 4, lambda row, width: (str(row.priority), "muted"), shown_from=120),
    Column("age", 5, lambda row, width: (age(row.age_seconds), "muted")),
)

_GROWTH = (("client", 16), ("id", 12), ("api", 11), ("client", 40), ("progress", 30), ("client", 60))
"""Which columns take the room that is left over, in this order, each up to this width."""


@lru_cache(maxsize=64)
def columns_for(width: int) -> tuple[tuple[Column, int], ...]:
    """The columns with their widths, one cell between neighbours, for a table of `width` cells."""
    shown = [column for column in _COLUMNS if column.shown_from <= width]
    spare = width - sum(column.width + 1 for column in shown) + 1
    widths = {column.title: column.width for column in shown}
    for title, width_wanted in _GROWTH:
        extra = max(0, min(spare, width_wanted - widths.get(title, width_wanted)))
        if extra:
            widths[title] += extra
            spare -= extra
    return tuple((column, widths[column.title]) for column in shown)
