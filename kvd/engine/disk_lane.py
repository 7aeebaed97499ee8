"""Queue, rate and job of the disk tier's threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

_DECAY = 0.9
"""Share of the past that a measurement keeps: the rate follows the last ten transfers or so."""


@dataclass(frozen=True, slots=True)
class DiskJob:
    """One block to store or to load. `view` is the slot's memory, and the tier's until the job is answered."""

    is_load: bool
    group_id: int
    slot: int
    key: bytes
    view: memoryview
    epoch: int
    parent_key: bytes = b""
    token_ids: tuple[int, ...] = ()


class Lane:
    """A bounded queue with one thread at its end. `offer` never waits."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: deque[DiskJob] = deque()
        self._taken: list[DiskJob] = []  # and not finished
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_nudged = False

    def offer(self, job: DiskJob) -> bool:
        """Queue a job; False when the queue is full or closed."""
        with self._changed:
            if self._is_closed or len(self._jobs) >= self._max_jobs:
                return False
            self._jobs.append(job)
            self._changed.notify()
            return True

    def take(self, max_jobs: int, *, linger_seconds: float, idle_seconds: float) -> list[DiskJob] | None:
        """Up to `max_jobs` jobs, fewer when no more came within `linger_seconds` of the first.

        An empty list after `idle_seconds` without a job, or after `nudge`. None when the lane is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed or self._is_nudged, idle_seconds)
            if self._is_nudged:
                self._is_nudged = False
                return []
            if not self._jobs:
                return None if self._is_closed else []
            if linger_seconds:
                self._changed.wait_for(
                    lambda: len(self._jobs) >= max_jobs or self._is_closed or self._is_nudged, linger_seconds
                )
            self._taken = [self._jobs.popleft() for _ in range(min(max_jobs, len(self._jobs)))]
            return list(self._taken)

    def finish(self) -> None:
        """What was taken last is done."""
        with self._changed:
            self._taken = []

    def withdraw(self, group_id: int, key: bytes) -> tuple[list[DiskJob], bool]:
        """Take the jobs for one block out of the queue; and whether one was taken and is not finished."""
        with self._changed:
            is_taken = any(job.key == key and job.group_id == group_id for job in self._taken)
            found = [job for job in self._jobs if job.key == key and job.group_id == group_id]
            for job in found:
                self._jobs.remove(job)
            return found, is_taken

    def nudge(self) -> None:
        """Make `take` return at once."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify()

    def close(self) -> None:
        """Take no more jobs; those that are queued are still to be had."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def drain(self) -> list[DiskJob]:
        """All queued jobs at once."""
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
            return jobs


class Rate:
    """Bytes per second of the latest transfers, each weighted by its time. Written by one thread, read by any."""

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes = self._bytes * _DECAY + num_bytes
        self._seconds = self._seconds * _DECAY + max(seconds, 1e-9)
        if self._bytes:
            self.bytes_per_second = self._bytes / self._seconds


class RareLines:
    """Warnings of a thread that may fail a thousand times a second: one line per interval. Any thread."""

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._num_left_out = 0

    def line(self, text: str) -> str | None:
        """The line to log now; None when one was logged not long ago."""
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                self._num_left_out += 1
                return None
            self._next = now + self._interval_seconds
            left_out, self._num_left_out = self._num_left_out, 0
        return f"{text} ({left_out} more like it since the last line)" if left_out else text
