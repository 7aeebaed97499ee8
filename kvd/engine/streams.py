"""How token events reach those who wait for them. Event loop only.

One unbounded queue per request: a consumer that reads slowly grows its own queue and holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvd.core import FinishReason, TokenEvent


class TokenStream(AsyncIterator[list[TokenEvent]]):
    """The events of one request, a list per wake-up; the last list ends with an event that has a finish reason.

    A consumer that stops reading early must call `abort`.
    """

    def __init__(self, request_id: str, on_abort: Callable[[str, FinishReason], None]) -> None:
        self.request_id = request_id
        self._on_abort = on_abort
        self._pending: list[TokenEvent] = []
        self._ready = asyncio.Event()
        self._is_closed = False  # no event will be put any more
        self._is_exhausted = False  # the last event has been read

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        if self._is_exhausted:
            raise StopAsyncIteration
        await self._ready.wait()
        events, self._pending = self._pending, []
        self._ready.clear()
        self._is_exhausted = self._is_closed
        return events

    def put(self, event: TokenEvent) -> None:
        """Called by the engine, in the order in which steps were committed."""
        if self._is_closed:
            return
        self._pending.append(event)
        self._is_closed = event.finish_reason is not None
        self._ready.set()

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request; "stop" where its text met a stop string. Harmless when it has ended, and twice."""
        if not self._is_closed:
            self._on_abort(self.request_id, reason)
