"""The engine: what its thread does with its time, and what the tiers of the KV cache hold.

Owner: the event loop. Every figure is of snapshots alone; those of the last seconds are differences between them.
"""

from __future__ import annotations

from collections import deque

from kvd.tui.figures import LABEL_WIDTH, bytes_of, fact, gauge, part_of, share_graph, share_text
from kvd.tui.format import age, clean, duration, exact, rate, short_count, size
from kvd.tui.panel import Panel, Spans
from kvd.tui.view import MAX_COLUMNS, Link, View
from kvd.views import DiskFacts, Snapshot

_WINDOW_SECONDS = 10.0


class StepClock:
    """How much of the time on the clock the engine thread spends in steps, over the snapshots of the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, float]] = deque()
        self.history: deque[float | None] = deque(maxlen=MAX_COLUMNS)
        """The busy share between two snapshots that followed each other, oldest first."""

    def add(self, snapshot: Snapshot) -> None:
        point = (snapshot.time, snapshot.counters.num_steps, snapshot.counters.step_seconds)
        points = self._points
        if points and point[0] == points[-1][0]:
            return
        if points and (not 0 < point[0] - points[-1][0] <= _WINDOW_SECONDS or point[1] < points[-1][1]):
            points.clear()  # nobody has looked for a while, or it is another engine
        if points:
            self.history.append(min(1.0, (point[2] - points[-1][2]) / (point[0] - points[-1][0])))
        points.append(point)
        while len(points) > 2 and points[1][0] <= point[0] - _WINDOW_SECONDS:
            points.popleft()

    @property
    def busy_share(self) -> float | None:
        """Of the time on the clock, 0 to 1; None before there are two snapshots."""
        seconds = self._span(0)
        return min(1.0, self._span(2) / seconds) if seconds > 0 else None

    @property
    def steps_per_second(self) -> float | None:
        seconds = self._span(0)
        return self._span(1) / seconds if seconds > 0 else None

    @property
    def mean_step_seconds(self) -> float | None:
        """Of the steps of the window; None where there was none."""
        steps = self._span(1)
        return self._span(2) / steps if steps > 0 else None

    def _span(self, index: int) -> float:
        return self._points[-1][index] - self._points[0][index] if self._points else 0.0


class StepPanel(Panel):
    """The engine thread: how busy it is, what a step takes, and what it gets done."""

    def __init__(self, *, id: str, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._clock = StepClock()

    def show(self, view: View | None, link: Link) -> int:
        if view is not None:
            self._clock.add(view.snapshot)
        return super().show(view, link)

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "Engine thread", f"last {_WINDOW_SECONDS:.0f} s"

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        snapshot, clock = view.snapshot, self._clock
        busy, step = clock.busy_share, snapshot.last_step
        measured = snapshot.prefill_tokens_per_second
        allowed = f" of {exact(snapshot.step_budget)}" if snapshot.step_budget else ""
        limit = exact(snapshot.running_limit or snapshot.info.max_num_seqs)
        waiting = f"{exact(snapshot.num_waiting)} waiting"
        spent = f"{age(snapshot.counters.step_seconds)} in all, up {age(snapshot.uptime_seconds)}"
        lines = [
            gauge("in steps", busy, share_text(busy), width, "decode"),
            fact("a step", duration(clock.mean_step_seconds), width, "bright", f"{rate(clock.steps_per_second)}/s"),
            fact("the latest", duration(step.seconds or None), width, "text",
                 f"{step.num_decode_tokens} decode + {step.num_prefill_tokens} prefill{allowed}",
                 f"{step.num_decode_tokens} dec + {step.num_prefill_tokens} pre"),
            fact("prefill", f"{rate(view.prefill_rate)} tok/s", width, "prefill",
                 f"measured {short_count(measured)} tok/s" if measured else "rate not measured yet",
                 f"{short_count(measured)} measured" if measured else ""),
            fact("decode", f"{rate(view.decode_rate)} tok/s", width, "decode"),
            fact("running", exact(snapshot.num_running), width, "text", f"{waiting}, limit {limit}", waiting),
            fact("steps", exact(snapshot.counters.num_steps), width, "text", spent),
        ]  # fmt: skip
        return [*lines, *share_graph("in steps", tuple(clock.history), width, height - len(lines), "decode")]


class TiersPanel(Panel):
    """Where blocks of the KV cache are: the pool, RAM, disk; and what moved between them."""

    def titles(self, view: View | None, link: Link) -> tuple[str, str]:
        return "KV tiers", ""

    def draw(self, view: View | None, link: Link, width: int, height: int) -> list[Spans]:
        if view is None:
            return []
        snapshot = view.snapshot
        lines = [*_pool_lines(snapshot, width), *_ram_lines(snapshot, width), *_disk_lines(snapshot.disk, width)]
        used = tuple(a + b for a, b in zip(view.series.active, view.series.cached, strict=True))
        return [*lines, *share_graph("pool in use", used, width, height - len(lines), "hits")]


def _pool_lines(snapshot: Snapshot, width: int) -> list[Spans]:
    used = snapshot.num_blocks_active + snapshot.num_blocks_cached
    use = f"{short_count(snapshot.num_blocks_active)} active, {short_count(snapshot.num_blocks_cached)} cached"
    return [
        _tier("pool", used, snapshot.num_blocks, snapshot.info.budget.block_bytes, width),
        fact("", use, width, "muted", f"{short_count(snapshot.num_blocks_free)} free"),
    ]


def _ram_lines(snapshot: Snapshot, width: int) -> list[Spans]:
    counters = snapshot.counters
    if not snapshot.num_ram_blocks:
        return [fact("RAM", "off", width, "text", "swap_space makes one", "see swap_space")]
    moved = f"{short_count(counters.num_saved_blocks)} saved, {short_count(counters.num_restored_blocks)} restored"
    held = f"{short_count(counters.num_unsaved_blocks)} not saved: no slot" if counters.num_unsaved_blocks else ""
    return [
        _tier("RAM", snapshot.num_ram_blocks_used, snapshot.num_ram_blocks, snapshot.info.budget.block_bytes, width),
        fact("", moved, width, "muted", held),
    ]


def _disk_lines(disk: DiskFacts | None, width: int) -> list[Spans]:
    if disk is None:
        return [fact("disk", "off", width, "text", "disk_cache makes one", "see disk_cache")]
    kept = bytes_of(disk.num_bytes, disk.max_bytes)
    lines = [
        gauge("disk", part_of(disk.num_bytes, disk.max_bytes), kept, width, "cached"),
        fact("", f"{size(disk.num_written_bytes)} written", width, "muted", f"{size(disk.num_read_bytes)} read"),
    ]
    if disk.num_corrupt_blocks:
        lines.append(fact("", f"! {exact(disk.num_corrupt_blocks)} damaged blocks found", width, "warning-bold"))
    if disk.problem:
        lines.append(fact("", "! " + clean(disk.problem), width, "warning-bold"))
    return lines


def _tier(name: str, used: int, total: int, block_bytes: int, width: int) -> Spans:
    """Blocks and bytes of a tier, as many words as fit."""
    text = f"{exact(used)} of {exact(total)}"
    whole = f"{text} blocks, {bytes_of(used * block_bytes, total * block_bytes)}"
    texts = (whole, f"{text} blocks", text)
    text = next((words for words in texts if len(words) + LABEL_WIDTH + 6 <= width), text)
    return gauge(name, used / total if total else None, text, width, "active")
