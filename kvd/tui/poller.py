"""Asks the snapshot source again and again, and says what it answered. Owner: the event loop, as one worker.

Invariant: it never touches a widget, and nothing that the source does ends it: an error or a silence becomes a
`SourceLost`, and the next poll is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.message import Message

from kvd.views import Snapshot, SnapshotSource

DETAILS_EVERY_SECONDS = 0.25
"""The engine builds its request table on demand, and no more often than this."""

RETRY_SECONDS = 1.0
INTERVALS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class SnapshotArrived(Message):
    """The source answered."""

    def __init__(self, snapshot: Snapshot, *, has_details: bool) -> None:
        super().__init__()
        self.snapshot = snapshot
        self.has_details = has_details


class SourceLost(Message):
    """The source did not answer; `problem` is one short line."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem


class Poller:
    """Polls until cancelled."""

    def __init__(
        self,
        source: SnapshotSource,
        post: Callable[[Message], object],
        *,
        interval_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._source = source
        self._post = post
        self._timeout_seconds = timeout_seconds
        self._wake = asyncio.Event()
        self._details_time = float("-inf")
        self.interval_seconds = interval_seconds
        self.is_paused = False

    def poll_now(self) -> None:
        """Do not wait for the interval to pass."""
        self._wake.set()

    def change_pace(self, steps: int) -> None:
        """Go to the next longer interval (`steps` = 1) or the next shorter one (-1)."""
        if steps > 0:
            self.interval_seconds = min((i for i in INTERVALS if i > self.interval_seconds), default=INTERVALS[-1])
        else:
            self.interval_seconds = max((i for i in INTERVALS if i < self.interval_seconds), default=INTERVALS[0])
        self.poll_now()

    async def run(self) -> None:
        while True:
            is_lost = not self.is_paused and not await self._poll()
            wait_seconds = max(self.interval_seconds, RETRY_SECONDS) if is_lost else self.interval_seconds
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _poll(self) -> bool:
        now = asyncio.get_running_loop().time()
        details = now - self._details_time >= DETAILS_EVERY_SECONDS
        try:
            async with asyncio.timeout(self._timeout_seconds):
                snapshot = await self._source.snapshot(details=details)
        except TimeoutError:
            self._post(SourceLost(f"no answer within {self._timeout_seconds:g} s"))
            return False
        except Exception as error:  # whatever an injected source raises means that it cannot be read now
            lines = str(error).splitlines() or [""]
            self._post(SourceLost(lines[0] or type(error).__name__))
            return False
        if details:
            self._details_time = now
        self._post(SnapshotArrived(snapshot, has_details=details))
        return True
