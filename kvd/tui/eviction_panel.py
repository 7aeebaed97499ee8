"""Evictions: how many and why, how long blocks stay against when they are wanted, and the tiers below the pool."""

from __future__ import annotations

from kvd.tui.charts import area
from kvd.tui.format import NOTHING, clean, duration, exact, percent, rate, short_count, size
from kvd.tui.listing import wrap
from kvd.tui.panel import Panel, Span, Spans, crop, justify, span_width
from kvd.tui.rates import Quantile, quantile
from kvd.tui.retention import GAPS, IDLE, LIFETIME, bucket_counts, verdict
from kvd.tui.view import Link, View
from kvd.views import DiskFacts, Histogram, Snapshot

_HISTOGRAMS = ((LIFETIME, "lifetime", "prefill"), (IDLE, "unused", "muted"), (GAPS, "found after", "cached"))
_NAME_WIDTH = 12
_AXIS = ((1.0, "1s"), (60.0, "1m"), (3600.0, "1h"))
_MIN_HEIGHT_WITH_AXIS = 11


class EvictionPanel(Panel, can_focus=True):
    """Where it is low, the sentences give way first and the tiers stay."""

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "Evictions and tiers", ""

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        snapshot = view.snapshot
        head = _counts(view, width)
        present = [
            (snapshot.cache_histograms[name], label, style)
            for name, label, style in _HISTOGRAMS
            if name in snapshot.cache_histograms
        ]
        head += [_histogram(histogram, label, style, width) for histogram, label, style in present]
        if present and height >= _MIN_HEIGHT_WITH_AXIS:
            head.append(_axis(present[0][0], width))
        tiers = [line for each in (_ram(snapshot, width), _disk(snapshot.disk, width)) for line in each]
        room = height - len(head) - len(tiers)
        return [*head, *_words(verdict(snapshot), width, room), *tiers]


def _words(sentences: tuple[str, ...], width: int, num_lines: int) -> list[Spans]:
    """As many of the sentences as fit whole; the first is cut off where even that does not fit."""
    lines: list[str] = []
    for count in range(1, len(sentences) + 1):
        longer = wrap(" ".join(sentences[:count]), width, num_lines + 1)
        if len(longer) > num_lines:
            break
        lines = longer
    lines = lines or wrap(" ".join(sentences[:1]), width, max(0, num_lines))
    return [((line, "text"),) for line in lines]


def _counts(view: View, width: int) -> list[Spans]:
    counters, recent = view.snapshot.counters, view.recent
    total = sum(blocks for _, blocks in counters.evicted_blocks) or counters.num_evicted_blocks
    per_second = recent.evicted_blocks / recent.seconds if recent.seconds > 0 else None
    style = "bright" if recent.evicted_blocks else "muted"
    left: Spans = ((f"{'evicted':<{_NAME_WIDTH}}", "muted"), (exact(total), "bright"), (" blocks", "muted"))
    right: Spans = () if per_second is None else ((f"{rate(per_second)}/s", style), (" lately", "muted"))
    lines = [crop(justify(left, right, width), width)]
    reasons = [f"{clean(reason)} {short_count(blocks)}" for reason, blocks in counters.evicted_blocks if blocks]
    if reasons:
        lines.append(crop((("└ ", "muted"), (", ".join(reasons), "text")), width))
    return lines


def _histogram(histogram: Histogram, label: str, style: str, width: int) -> Spans:
    counts = bucket_counts(histogram)
    spans: list[Span] = [
        (f"{label:<{_NAME_WIDTH}}", "muted"),
        ("p50 ", "muted"),
        (f"{_time(quantile(histogram, 0.5)):<6} ", "bright"),
        ("p95 ", "muted"),
        (f"{_time(quantile(histogram, 0.95)):<6} ", "text"),
    ]
    room = width - span_width(spans)
    if room >= len(counts):
        spans.append((area(counts, len(counts), 1, max(1, *counts))[0], style))
    return crop(tuple(spans), width)


def _axis(histogram: Histogram, width: int) -> Spans:
    """Where a second, a minute and an hour are below the little histograms."""
    start = _NAME_WIDTH + 22
    line = ""
    for bound, name in _AXIS:
        if bound in histogram.bounds:
            line = line.ljust(histogram.bounds.index(bound)) + name
    return ((" " * start + line, "faint"),) if start + len(histogram.bounds) <= width else ()


def _time(value: Quantile | None) -> str:
    if value is None:
        return NOTHING
    return (">" if value.is_lower_bound else "") + duration(value.value)


def _ram(snapshot: Snapshot, width: int) -> list[Spans]:
    if not snapshot.num_ram_blocks:
        return [crop((("RAM  ", "muted"), ("no tier: set swap_space to keep what is evicted", "muted")), width)]
    used, slots, counters = snapshot.num_ram_blocks_used, snapshot.num_ram_blocks, snapshot.counters
    spans: list[Span] = [
        ("RAM  ", "muted"),
        (f"{short_count(used)} of {short_count(slots)} blocks ", "text"),
        (percent(used, slots), "bright"),
        (f"  saved {short_count(counters.num_saved_blocks)}", "text"),
        (f"  restored {short_count(counters.num_restored_blocks)}", "text"),
    ]
    if counters.num_unsaved_blocks:
        spans.append((f"  unsaved {short_count(counters.num_unsaved_blocks)}", "warning-bold"))
    return [crop(tuple(spans), width)]


def _disk(disk: DiskFacts | None, width: int) -> list[Spans]:
    if disk is None:
        return [crop((("disk ", "muted"), ("no tier: set disk_cache to keep it across restarts", "muted")), width)]
    spans: list[Span] = [
        ("disk ", "muted"),
        (f"{size(disk.num_bytes)} of {size(disk.max_bytes)} ", "text"),
        (percent(disk.num_bytes, disk.max_bytes), "bright"),
        (f"  written {size(disk.num_written_bytes)}", "text"),
        (f"  read {size(disk.num_read_bytes)}", "text"),
    ]
    if disk.num_corrupt_blocks:
        spans.append((f"  corrupt {short_count(disk.num_corrupt_blocks)}", "warning-bold"))
    lines = [crop(tuple(spans), width)]
    if disk.problem:
        lines.append(crop((("     not used: ", "warning-bold"), (disk.problem, "warning")), width))
    return lines
