"""The machine: what computes, the host of the server, and where the memory goes.

Owner: the event loop. Every figure is of the snapshot alone, so that a dashboard elsewhere shows the server's machine
and not its own. What nobody told reads n/a.
"""

from __future__ import annotations

from collections import deque

from kvd.core import BLOCK_SIZE
from kvd.device_facts import DeviceFacts, HostFacts
from kvd.tui.charts import divide
from kvd.tui.figures import ABSENT, LABEL_WIDTH, bytes_of, fact, gauge, part_of, share_graph, share_text
from kvd.tui.format import NOTHING, clean, exact, percent, size
from kvd.tui.panel import Panel, Spans, crop
from kvd.tui.view import MAX_COLUMNS, Link, View
from kvd.views import MemoryBudget

_MIN_HEIGHT_IN_FULL = 16
"""From here on there is a line for every figure of a card, and the host's lines below."""
_MIN_HEIGHT_WITH_THICK_BAR = 14


def _bytes(count: int | None) -> str:
    return ABSENT if count is None else size(count)


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0f}"


class DevicePanel(Panel):
    """The card that computes, and the host; the host alone where that computes."""

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._busy: deque[float | None] = deque(maxlen=MAX_COLUMNS)  # one for each snapshot while the panel is shown
        self._time = 0.0

    def show(self, view: View | None, link: Link) -> int:
        if view is not None and view.snapshot.time != self._time:
            self._time = view.snapshot.time
            facts = view.snapshot.device or view.snapshot.host
            self._busy.append(None if facts is None else facts.utilization)
        return super().show(view, link)

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "Device", ""

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        snapshot = view.snapshot
        lines: list[Spans] = []
        if snapshot.device is not None:
            lines = [*_device_lines(snapshot.device, width, is_low=height < _MIN_HEIGHT_IN_FULL), ()]
        lines.insert(0, fact("backend", clean(snapshot.info.backend), width, "bright", clean(snapshot.info.device)))
        lines += _host_lines(snapshot.host, width)
        if len(lines) > height:  # a blank line is the first that a low panel does without
            return [line for line in lines if line]
        return [*lines, *share_graph("busy", tuple(self._busy), width, height - len(lines), "pool")]


def _device_lines(facts: DeviceFacts, width: int, *, is_low: bool) -> list[Spans]:
    busy = facts.utilization
    used, total, own = facts.memory_used_bytes, facts.memory_total_bytes, facts.memory_own_bytes
    memory, others = bytes_of(used, total), ""
    if used is not None and own is not None and used > own:
        others = f"{size(used - own)} of other processes"
    watts = f"{_number(facts.power_watts)} of {_number(facts.power_limit_watts)} W"
    heat = f"{_number(facts.temperature_celsius)} °C"
    clocks = f"{_number(facts.sm_clock_mhz)} MHz"
    memory_clock = f"memory {_number(facts.memory_clock_mhz)} MHz"
    if facts.throttle_reasons is None:
        throttled: Spans = fact("throttled", ABSENT, width)
    elif facts.throttle_reasons:
        throttled = fact("throttled", "! " + clean(", ".join(facts.throttle_reasons)), width, "warning-bold")
    else:
        throttled = fact("throttled", "no", width)
    lines = [
        fact("card", clean(facts.name or ABSENT), width, "bright"),
        throttled,
        gauge("busy", busy, share_text(busy), width),
        gauge("memory", part_of(used, total), memory, width, "cached"),
        gauge("power", part_of(facts.power_watts, facts.power_limit_watts), watts, width, "prefill"),
    ]
    if is_low:
        return [*lines, fact("heat, clock", f"{heat}, {clocks}", width)]
    if others:
        lines.insert(4, fact("", others, width, "muted"))
    return [*lines, fact("temperature", heat, width), fact("clocks", clocks, width, "text", memory_clock)]


def _host_lines(facts: HostFacts | None, width: int) -> list[Spans]:
    if facts is None:
        return [fact("host", "not read (yet)", width, "muted")]
    total, free = facts.memory_total_bytes, facts.memory_available_bytes
    used = None if total is None or free is None else max(0, total - free)
    count = "" if facts.num_cpus is None else f"{facts.num_cpus} processor{'s' if facts.num_cpus > 1 else ''}"
    return [
        fact("host", clean(facts.cpu_name or ABSENT), width, "bright", count),
        gauge("busy", facts.utilization, share_text(facts.utilization), width),
        gauge("of it kvd", facts.own_utilization, share_text(facts.own_utilization), width, "decode"),
        gauge("memory", part_of(used, total), bytes_of(used, total), width, "cached"),
        gauge("of it kvd", part_of(facts.memory_own_bytes, total), _bytes(facts.memory_own_bytes), width, "active"),
    ]


_PARTS = (
    # letter, pattern, style, name
    ("W", "█", "active", "weights"),
    ("K", "▓", "cached", "KV cache"),
    ("A", "▒", "prefill", "activations"),
    ("O", "░", "muted", "other, free"),
)


class MemoryPanel(Panel):
    """The memory budget as it was settled at the start, and what a token of context costs."""

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        if view is None:
            return "Memory", ""
        budget = view.snapshot.info.budget
        return "Memory", f"{size(budget.total_bytes)} by {clean(budget.setting)}"

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        budget = view.snapshot.info.budget
        lines = memory_lines(budget, width, thickness=3 if height >= _MIN_HEIGHT_WITH_THICK_BAR else 1)
        tokens = budget.num_blocks * BLOCK_SIZE
        longest = view.snapshot.info.max_model_len
        fits = f"{tokens / max(1, longest):.1f}×"
        token, saved = f"{size(budget.bytes_per_token)} of {clean(view.snapshot.info.kv_cache_dtype)}", ""
        if 0 < budget.bytes_per_token < budget.bytes_per_token_16bit:
            saved = f"{size(budget.bytes_per_token_16bit)} in 16 bits"
        return [
            *lines,
            fact("a token", token, width, "text", saved),
            fact("pool", f"{exact(tokens)} tokens", width, "text", f"{exact(budget.num_blocks)} blocks"),
            fact("longest", f"{exact(longest)} tokens", width, "text", f"fits {fits[:-1]} times", fits),
        ]  # fmt: skip


def memory_lines(budget: MemoryBudget, width: int, *, thickness: int = 1) -> list[Spans]:
    """A bar of the budget, `thickness` lines high, and one line for each part: letter, pattern, bytes, share."""
    known = budget.weight_bytes + budget.kv_bytes + budget.activation_bytes
    amounts = (budget.weight_bytes, budget.kv_bytes, budget.activation_bytes, max(0, budget.total_bytes - known))
    cells = divide(width, amounts)
    # The letter stands in its part, where that has room for it.
    lettered: Spans = tuple(
        (f"{pattern}{letter}{pattern * (count - 2)}" if count >= 3 else pattern * count, style)
        for count, (letter, pattern, style, _) in zip(cells, _PARTS, strict=True)
    )
    plain: Spans = tuple((pattern * count, style) for count, (_, pattern, style, _) in zip(cells, _PARTS, strict=True))
    lines = [lettered if line == thickness // 2 else plain for line in range(thickness)]
    if thickness > 1:
        lines.append(())
    for amount, (letter, pattern, style, name) in zip(amounts, _PARTS, strict=True):
        share = percent(amount, sum(amounts)) if amount else NOTHING
        lines.append(
            crop(
                (
                    (f"{letter} {pattern} ", style),
                    (f"{name:<{LABEL_WIDTH}}", "muted"),
                    (f"{size(amount):>9}", "text"),
                    (f"  {share:>4}", "bright"),
                ),
                width,
            )
        )
    return lines
