"""Lines of the pages that list figures: a name, what it is now, a meter or a graph. Pure functions, any thread."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.tui.charts import area, meter
from kvd.tui.format import percent, size
from kvd.tui.palette import gradient
from kvd.tui.panel import Spans, crop, justify, span_width

ABSENT = "n/a"
"""Shown where nobody told."""
LABEL_WIDTH = 12
_MIN_METER = 3
_MAX_METER = 24
_MIN_GRAPH_HEIGHT = 5
_MAX_GRAPH_ROWS = 12


def fact(name: str, text: str, width: int, style: str = "text", more: str = "", short: str = "") -> Spans:
    """`name        text  more`; what is more in its short form, or left away, where there is no room for it."""
    spans: Spans = ((f"{name:<{LABEL_WIDTH}}", "muted"), (text, style))
    room = width - span_width(spans) - 2
    more = next((words for words in (more, short) if words and len(words) <= room), "")
    return crop((*spans, (f"  {more}", "muted")) if more else spans, width)


def gauge(name: str, share: float | None, text: str, width: int, style: str = "active") -> Spans:
    """A name, a meter, and the figure that it stands for; without a share, or without room, no meter."""
    room = min(_MAX_METER, width - LABEL_WIDTH - len(text) - 1)
    if share is None or room < _MIN_METER:
        return fact(name, text, width)
    filled, empty = meter(min(1.0, max(0.0, share)), room)
    return ((f"{name:<{LABEL_WIDTH}}", "muted"), (filled, style), (empty, "faint"), (" " + text, "text"))


def part_of(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None where one is not known or there is no whole."""
    return None if part is None or not whole else part / whole


def share_text(share: float | None) -> str:
    return ABSENT if share is None else percent(share, 1.0)


def bytes_of(part: int | None, whole: int | None) -> str:
    """`3.8 of 24 GiB`: the unit once where both have the same."""
    left, right = (ABSENT if count is None else size(count) for count in (part, whole))
    number, _, unit = left.partition(" ")
    return f"{number if right.endswith(' ' + unit) and unit else left} of {right}"


def share_graph(name: str, shares: Sequence[float | None], width: int, height: int, colors: str) -> list[Spans]:
    """Shares of 0 to 1, newest at the right, below a blank line and a heading; nothing where there is no room.

    colors: name of a gradient of the palette.
    """
    if height < _MIN_GRAPH_HEIGHT:
        return []
    lines: list[Spans] = [(), crop(justify(((f"{name}, so far", "muted"),), (("top 100%", "faint"),), width), width)]
    rows = area(shares, width, min(_MAX_GRAPH_ROWS, height - 2), 1.0)
    for index, row in enumerate(rows):
        above = len(rows) - 1 - index
        lines.append(((row if above else row.replace(" ", "▁"), gradient(colors, above, len(rows))),))
    return lines
