"""KV blocks: how each tier is split into active, cached and free, and the pool's share over the recent polls.

Active is what requests use: blocks that they read and write, and in RAM those of requests that were swapped out.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from kvd.core import BLOCK_SIZE
from kvd.tui.charts import EIGHTHS, divide, levels
from kvd.tui.device import pool_name
from kvd.tui.format import exact, fit, percent, short_count, size
from kvd.tui.palette import gradient
from kvd.tui.panel import Panel, Span, Spans, crop
from kvd.tui.view import Link, View
from kvd.views import Snapshot

_KINDS = (
    # letter, name, glyph of the bar, style of the glyph, style of text on the bar, style of its name
    ("A", "active", "█", "active", "active-label", "active-bold"),
    ("C", "cached", "▒", "cached-pattern", "cached-label", "cached-bold"),
    ("F", "free", "·", "free", "free-label", "muted"),
)
_MIN_HEIGHT_WITH_GRAPH = 7
_MIN_GRAPH_ROWS = 2
_NAME_WIDTH = 5


class Tier(NamedTuple):
    """A place that keeps blocks. counts: active, cached, free; `unit_bytes` are what one of these is."""

    name: str
    counts: tuple[int, int, int]
    unit_bytes: float

    @property
    def num_bytes(self) -> float:
        return sum(self.counts) * self.unit_bytes


def tiers_of(snapshot: Snapshot) -> list[Tier]:
    """The pool, and the tiers below it that there are. The disk is full when its bytes are, so bytes are its unit."""
    block_bytes = snapshot.info.budget.block_bytes
    pool = (snapshot.num_blocks_active, snapshot.num_blocks_cached, snapshot.num_blocks_free)
    tiers = [Tier(pool_name(snapshot.info), pool, block_bytes)]
    if snapshot.num_ram_blocks:
        held = min(snapshot.num_ram_blocks_held, snapshot.num_ram_blocks_used)
        idle, free = snapshot.num_ram_blocks_used - held, snapshot.num_ram_blocks - snapshot.num_ram_blocks_used
        tiers.append(Tier("RAM", (held, idle, free), block_bytes))
    if snapshot.disk is not None:
        used = snapshot.disk.num_bytes
        tiers.append(Tier("disk", (0, used, max(0, snapshot.disk.max_bytes - used)), 1))
    return tiers


class BlocksPanel(Panel):
    """A bar for each tier with the three states of a block, their numbers, and a graph where there is room."""

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        if view is None:
            return "KV blocks", ""
        blocks = view.snapshot.num_blocks
        capacity = size(blocks * view.snapshot.info.budget.block_bytes)
        return f"KV blocks  {exact(blocks)} × {BLOCK_SIZE} = {exact(blocks * BLOCK_SIZE)} tokens, {capacity}", (
            f"one column per {link.interval_seconds:g}s" if self.size.height >= _MIN_HEIGHT_WITH_GRAPH else ""
        )

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        snapshot = view.snapshot
        tiers = tiers_of(snapshot)
        has_graph = height >= _MIN_HEIGHT_WITH_GRAPH
        if len(tiers) == 1:
            counts = tiers[0].counts
            lines = [_bar(counts, width)]
            if has_graph:
                lines.append(_bar(counts, width, with_labels=False))
            lines += _legend(counts, snapshot.info.budget.block_bytes, width)
        else:
            lines = []
            for tier in tiers:
                lines.append(_tier_bar(tier, width))
                if has_graph:
                    lines.append(_tier_legend(tier, width))
            if len(lines) < height and not has_graph:
                lines.append(_tier_legend(tiers[0], width))
        rows = height - len(lines) - 1
        if has_graph and rows >= _MIN_GRAPH_ROWS:
            lines += [(), *_graph(view.series.active, view.series.cached, width, rows)]
        return lines


def _tier_bar(tier: Tier, width: int) -> Spans:
    capacity = f" {size(tier.num_bytes):>8}"
    return (
        (f"{tier.name:<{_NAME_WIDTH}}", "bright"),
        *_bar(tier.counts, max(0, width - _NAME_WIDTH - len(capacity))),
        (capacity, "muted"),
    )


def _tier_legend(tier: Tier, width: int) -> Spans:
    """`     A 700 active, 8 MiB   C …`: the bar's parts in figures, under the bar."""
    spans: list[Span] = [(" " * _NAME_WIDTH, "text")]
    for count, (letter, name, _, _, _, name_style) in zip(tier.counts, _KINDS, strict=True):
        figures = size(count * tier.unit_bytes)
        if tier.unit_bytes > 1:
            figures = f"{exact(count)}, {figures}"
        spans += [(f"{letter} {name} ", name_style), (f"{figures}   ", "text")]
    return crop(tuple(spans), width)


def _bar(counts: tuple[int, ...], width: int, *, with_labels: bool = True) -> Spans:
    spans: list[Span] = []
    total = sum(counts)
    for count, cells, (letter, name, glyph, style, label_style, _) in zip(
        counts, divide(width, counts), _KINDS, strict=True
    ):
        label = f" {name} {percent(count, total)} "
        if len(label) + 2 > cells:
            label = f" {letter} " if cells >= 5 else letter if cells >= 1 else ""
        if not with_labels:
            label = ""
        left = (cells - len(label)) // 2
        spans += [(glyph * left, style), (label, label_style), (glyph * (cells - left - len(label)), style)]
    return tuple(span for span in spans if span[0])


def _legend(counts: tuple[int, ...], block_bytes: int, width: int) -> list[Spans]:
    total = sum(counts)
    first: list[Span] = []
    second: list[Span] = []
    for index, (count, (letter, name, glyph, style, _, name_style)) in enumerate(zip(counts, _KINDS, strict=True)):
        column = width * (index + 1) // 3 - width * index // 3
        text = f"{exact(count)} {percent(count, total):>5}"
        if len(name) + 5 + len(text) > column - 1:
            text = f"{short_count(count)} {percent(count, total)}"
        below = f"  {exact(count * BLOCK_SIZE)} tok, {size(count * block_bytes)}"
        if len(below) > column - 1:
            below = f"  {size(count * block_bytes)}"
        first += [
            ("■" if glyph == "█" else glyph, style),
            (f" {letter} {name} ", name_style),
            (fit(text, max(0, column - 5 - len(name))), "text"),
        ]
        second.append((fit(below, column), "muted"))
    return [tuple(first), tuple(second)]


def _graph(active: tuple[float, ...], cached: tuple[float, ...], width: int, height: int) -> list[Spans]:
    """Occupancy per poll, newest at the right: active below, cached on top of it."""
    if height <= 0:
        return []
    shown = active[-width:]
    lower = levels(shown, height, 1.0)
    both = [a + c for a, c in zip(shown, cached[-width:], strict=True)]
    upper = levels(both, height, 1.0)
    empty = width - len(shown)
    lines = []
    for row in reversed(range(height)):
        style = gradient("pool", row, height)
        cells = [_cell(a - 8 * row, t - 8 * row, style) for a, t in zip(lower, upper, strict=True)]
        spans: list[Span] = [(" " * empty, "text")] if empty else []
        for name, run in groupby(cells, key=lambda cell: cell[1]):
            spans.append(("".join(glyph for glyph, _ in run), name))
        lines.append(tuple(spans))
    return lines


def _cell(active: int, total: int, style: str) -> Span:
    """One cell of the graph from two heights in eighths above its floor."""
    if active >= 8:
        return "█", style
    if total <= 0:
        return " ", "text"
    if active > 0:
        return EIGHTHS[active], f"{style}-on-cached" if total >= 8 else style
    return ("▒" if total >= 8 else EIGHTHS[total]), "pool-cached"
