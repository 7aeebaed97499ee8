"""What the panels show: a frozen `View` made of the latest snapshot and of the polls before it.

Owner: the event loop; `History` is fed by the app alone, once per poll. Invariant: panels see only `View`s,
every figure of a panel is of one poll, and no figure spans a restart of the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from kvd.tui import rates
from kvd.tui.rates import Point, Quantile
from kvd.views import RequestState, RequestView, Snapshot

RECENT_SECONDS = 60.0
"""Window of "recent" figures: latencies, hit rate, preemptions."""

SMOOTHING_SECONDS = 2.0
"""Window of the throughput figures, so that they can be read while the polls are faster than the steps."""

MAX_COLUMNS = 400
"""Polls kept for graphs: more than the cells of the widest graph that anybody looks at."""

_STATE_ORDER: dict[RequestState, int] = {
    "decode": 0, "prefill": 0, "restoring": 0, "preempted": 1, "swapped": 1, "waiting": 2
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Latency:
    """Median and 95th percentile in seconds; None where nothing was ever observed."""

    p50: Quantile | None
    p95: Quantile | None
    is_recent: bool  # False: nothing was observed lately, the figures are those since the start


@dataclass(frozen=True, slots=True)
class Series:
    """One value per poll, oldest first; None where nothing could be computed."""

    prefill: tuple[float | None, ...] = ()  # tokens/s
    decode: tuple[float | None, ...] = ()  # tokens/s
    active: tuple[float, ...] = ()  # share of the blocks, 0 … 1
    cached: tuple[float, ...] = ()  # share of the blocks, 0 … 1
    hit_ratio: tuple[float | None, ...] = ()  # over the recent window, 0 … 1
    ttft: tuple[float | None, ...] = ()  # seconds, median over the recent window
    itl: tuple[float | None, ...] = ()  # the same
    queue: tuple[float | None, ...] = ()  # the same


@dataclass(frozen=True, slots=True)
class Recent:
    """What changed within the recent window."""

    seconds: float = 0.0  # what the window really spans
    query_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    step_seconds: float = 0.0  # of the window, what the engine spent in steps


@dataclass(frozen=True, slots=True)
class View:
    """Everything a panel may draw."""

    snapshot: Snapshot
    requests: tuple[RequestView, ...]
    prefill_rate: float | None  # tokens/s
    decode_rate: float | None  # tokens/s
    ttft: Latency
    itl: Latency
    queue: Latency  # from arrival to the first step
    recent: Recent
    series: Series


@dataclass(frozen=True, slots=True)
class Link:
    """How the dashboard gets its snapshots at the moment."""

    address: str
    model: str
    interval_seconds: float
    is_paused: bool = False
    problem: str = ""  # why the source does not answer; empty while it does
    is_read_only: bool = False  # nothing may be changed from here
    show_prompts: bool = False  # text of prompts may be shown without a key for it


def in_reading_order(requests: tuple[RequestView, ...]) -> tuple[RequestView, ...]:
    """Running before preempted before waiting, each the oldest first: rows move as little as possible."""
    return tuple(sorted(requests, key=lambda row: (_STATE_ORDER[row.state], -row.age_seconds, row.request_id)))


def matching(requests: tuple[RequestView, ...], text: str) -> tuple[RequestView, ...]:
    """The requests with every word of `text` in their id, client, endpoint or state; upper and lower case alike."""
    words = text.lower().split()
    if not words:
        return requests

    def has_all(row: RequestView) -> bool:
        names = f"{row.request_id} {row.client} {row.endpoint} {row.state}".lower()
        return all(word in names for word in words)

    return tuple(filter(has_all, requests))


def sorted_by(
    requests: tuple[RequestView, ...], key: Callable[[RequestView], float | str | None], *, is_descending: bool
) -> tuple[RequestView, ...]:
    """The requests by `key`, equal ones in the order that they had; those without a value come last either way."""
    known = [row for row in requests if key(row) is not None]
    unknown = [row for row in requests if key(row) is None]
    known.sort(key=key, reverse=is_descending)  # type: ignore[arg-type]  # numbers or texts, never both in a column
    return (*known, *unknown)


class History:
    """The recent polls of one engine."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque()
        self._requests: tuple[RequestView, ...] = ()
        self._series: dict[str, deque[float | None]] = {
            name: deque(maxlen=MAX_COLUMNS) for name in ("prefill", "decode", "hit_ratio", "ttft", "itl", "queue")
        }
        self._active: deque[float] = deque(maxlen=MAX_COLUMNS)
        self._cached: deque[float] = deque(maxlen=MAX_COLUMNS)

    def _forget(self) -> None:
        self._points.clear()
        self._requests = ()
        self._active.clear()
        self._cached.clear()
        for series in self._series.values():
            series.clear()

    def add(self, snapshot: Snapshot, *, has_details: bool) -> View:
        """Take one poll in and say what is to be seen now.

        Without details the request table stays as the last poll with details had it.
        """
        point = rates.point_of(snapshot)
        if self._points and rates.is_restart(self._points[-1], point):
            self._forget()
        if has_details:
            self._requests = in_reading_order(snapshot.requests)
        previous = self._points[-1] if self._points else None
        self._points.append(point)
        while len(self._points) > 2 and self._points[1].time <= point.time - RECENT_SECONDS:
            self._points.popleft()
        recent = self._recent()
        latencies = {
            "ttft": self._latency("time_to_first_token_seconds"),
            "itl": self._latency("inter_token_latency_seconds"),
            "queue": self._latency("request_queue_time_seconds"),
        }
        if previous is not None and point.time > previous.time:
            self._series["prefill"].append(_prefill_rate(previous, point))
            self._series["decode"].append(_decode_rate(previous, point))
        blocks = max(1, snapshot.num_blocks)
        self._active.append(snapshot.num_blocks_active / blocks)
        self._cached.append(snapshot.num_blocks_cached / blocks)
        self._series["hit_ratio"].append(rates.ratio(recent.hit_tokens, recent.query_tokens))
        for name, latency in latencies.items():
            median = latency.p50 if latency.is_recent else None
            self._series[name].append(median.value if median is not None else None)
        smooth = rates.window(islice(self._points, max(0, len(self._points) - 64), None), SMOOTHING_SECONDS)
        return View(
            snapshot=snapshot,
            requests=self._requests,
            prefill_rate=_prefill_rate(smooth[0], smooth[-1]),
            decode_rate=_decode_rate(smooth[0], smooth[-1]),
            **latencies,
            recent=recent,
            series=Series(
                active=tuple(self._active),
                cached=tuple(self._cached),
                **{name: tuple(values) for name, values in self._series.items()},
            ),
        )

    def _recent(self) -> Recent:
        first, last = self._points[0], self._points[-1]
        a, b = first.counters, last.counters
        return Recent(
            seconds=last.time - first.time,
            query_tokens=b.prefix_query_tokens - a.prefix_query_tokens,
            hit_tokens=b.prefix_hit_tokens - a.prefix_hit_tokens,
            preemptions=b.num_preemptions - a.num_preemptions,
            evicted_blocks=b.num_evicted_blocks - a.num_evicted_blocks,
            recomputed_tokens=b.recomputed_tokens - a.recomputed_tokens,
            prefill_tokens=b.prefill_tokens_computed - a.prefill_tokens_computed,
            generation_tokens=b.generation_tokens - a.generation_tokens,
            step_seconds=max(0.0, b.step_seconds - a.step_seconds),
        )

    def _latency(self, name: str) -> Latency:
        ends = (self._points[0], self._points[-1]) if len(self._points) > 1 else (self._points[-1],)
        histogram = rates.recent_histogram(ends, name)
        is_recent = histogram is not None and histogram.total > 0
        if not is_recent:
            histogram = self._points[-1].histograms.get(name)
        if histogram is None:
            return Latency(None, None, is_recent=False)
        return Latency(rates.quantile(histogram, 0.5), rates.quantile(histogram, 0.95), is_recent)


def _prefill_rate(earlier: Point, later: Point) -> float | None:
    a, b = earlier.counters, later.counters
    return rates.per_second(a.prefill_tokens_computed, b.prefill_tokens_computed, later.time - earlier.time)


def _decode_rate(earlier: Point, later: Point) -> float | None:
    a, b = earlier.counters, later.counters
    return rates.per_second(a.generation_tokens, b.generation_tokens, later.time - earlier.time)
