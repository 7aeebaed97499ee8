"""Tells the event log what a person wants to find there, as it happens, and not too often.

The engine thread calls everything but `refused`, which any thread may. What can happen in every step is told at most
once per interval, with how often it has happened. Nothing in here raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from kvd.core import TokenEvent
from kvd.engine.disk_lane import RareLines
from kvd.log import harmless
from kvd.scheduler.scheduler import Scheduler
from kvd.views import DiskFacts

Level = Literal["debug", "info", "warning", "error"]
OnEvent = Callable[[Level, str, str, str | None], None]
"""(level, kind, message, request id): kinds are preempted, evicted, refused, failed and disk. Any thread; quick."""

INTERVAL_SECONDS = 10.0
MOST_FAILURES_AT_ONCE = 5
"""When more requests fail in one step, they have one line."""


def ignore(level: Level, kind: str, message: str, request_id: str | None) -> None:
    """For whom nothing is to be told."""


class Reporter:
    """See the module's docstring."""

    def __init__(self, scheduler: Scheduler, on_event: OnEvent, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._scheduler = scheduler
        self._on_event = on_event
        self._interval_seconds = interval_seconds
        self._preemptions = RareLines(interval_seconds)
        self._refusals = RareLines(interval_seconds)
        self._num_preemptions = 0
        self._num_evicted = 0
        self._next_evictions = float("-inf")
        self._problem = ""

    @harmless
    def stepped(self) -> None:
        """A step was planned or committed: costs two comparisons when there is nothing to tell."""
        scheduler = self._scheduler
        if scheduler.num_preemptions != self._num_preemptions:
            self._num_preemptions = scheduler.num_preemptions
            request_id, words = scheduler.latest_preemption
            line = self._preemptions.line(f"gave way {words}")
            if line is not None:
                self._on_event("warning", "preempted", line, request_id)
        num_evicted = scheduler.cache.num_evicted_blocks
        if num_evicted != self._num_evicted and time.monotonic() >= self._next_evictions:
            self._next_evictions = time.monotonic() + self._interval_seconds
            new, self._num_evicted = num_evicted - self._num_evicted, num_evicted
            cache = scheduler.cache
            words = f"{new:,} cached block{'s' if new > 1 else ''} had to give way"
            words += f"; {cache.num_blocks_active:,} of {cache.num_blocks:,} are in use"
            self._on_event("info", "evicted", words, None)

    @harmless
    def ended(self, events: Sequence[TokenEvent]) -> None:
        """Requests have ended; told of those that failed."""
        failed = [event for event in events if event.finish_reason in ("error", "refused", "timeout")]
        for event in failed[: MOST_FAILURES_AT_ONCE if len(failed) <= MOST_FAILURES_AT_ONCE else 0]:
            level: Level = "error" if event.finish_reason == "error" else "warning"
            kind = "refused" if event.finish_reason == "refused" else "failed"
            self._on_event(level, kind, event.error or str(event.finish_reason), event.request_id)
        if len(failed) > MOST_FAILURES_AT_ONCE:
            self._on_event("error", "failed", f"{len(failed)} requests failed: {failed[0].error}", None)

    @harmless
    def refused(self, request_id: str, error: Exception) -> None:
        """A request was not taken in."""
        line = self._refusals.line(str(error))
        if line is not None:
            self._on_event("warning", "refused", line, request_id)

    @harmless
    def disk(self, facts: DiskFacts) -> None:
        """Told when the disk tier stops working, and when it works again."""
        if facts.problem == self._problem:
            return
        if facts.problem:
            self._on_event("warning", "disk", facts.problem, None)
        else:
            self._on_event("info", "disk", "the disk cache works again", None)
        self._problem = facts.problem
