"""What one key may take: HTTP requests in flight, and its part of the queue. Event loop only.

Invariant: whatever was counted is given back exactly once, however a request ends. Keys without limits are not
counted at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from kvd.core import FinishReason, TokenEvent
from kvd.errors import RequestError
from kvd.server.interfaces import TokenStream
from kvd.server.keys import Client

MAX_RETRY_SECONDS = 60
_SMOOTHING = 0.2


@dataclass(slots=True)
class _Load:
    """One client now. `mean_seconds` is a moving average over its requests that ended."""

    num_in_flight: int = 0
    num_waiting: int = 0
    mean_seconds: float = 1.0

    def note(self, seconds: float) -> None:
        self.mean_seconds += _SMOOTHING * (seconds - self.mean_seconds)

    def retry_seconds(self, num_places: int) -> int:
        """When a place is likely to be free: places come free one after the other."""
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(self.mean_seconds / num_places)))


class Limits:
    """The loads of all clients that have limits."""

    def __init__(self, max_waiting: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._loads: dict[str, _Load] = {}

    @contextmanager
    def hold(self, client: Client) -> Iterator[None]:
        """One HTTP request of `client` is in flight. Raises a 429 when it has as many as it may."""
        if (most := client.limits.max_requests_in_flight) is None:
            yield
            return
        load = self._load(client)
        if load.num_in_flight >= most:
            raise _over_limit(
                f"'{client.name}' has {load.num_in_flight} requests in flight, as many as its key may have",
                load.retry_seconds(most),
            )
        load.num_in_flight += 1
        started = self._clock()
        try:
            yield
        finally:
            load.num_in_flight -= 1
            load.note(self._clock() - started)

    def submit(self, client: Client, submit: Callable[[], TokenStream]) -> TokenStream:
        """Queue one engine request. Raises a 429 when the client's part of the queue is full."""
        if (share := client.limits.queue_share) is None:
            return submit()
        load = self._load(client)
        most = max(1, math.floor(share * self._max_waiting))
        if load.num_waiting >= most:
            raise _over_limit(
                f"'{client.name}' has {load.num_waiting} requests that wait for their first token, as many as its "
                "part of the queue holds",
                load.retry_seconds(most),
            )
        return _WaitingStream(submit(), load)

    def _load(self, client: Client) -> _Load:
        return self._loads.setdefault(client.name, _Load())


class _WaitingStream:
    """A token stream that counts as waiting until its first token, its end or its abort."""

    def __init__(self, stream: TokenStream, load: _Load) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._load = load
        self._is_waiting = True
        load.num_waiting += 1

    def __aiter__(self) -> _WaitingStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        try:
            return await anext(self._stream)
        finally:
            self._stop_waiting()

    def abort(self, reason: FinishReason = "abort") -> None:
        self._stop_waiting()
        self._stream.abort(reason)

    def _stop_waiting(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._load.num_waiting -= 1


def _over_limit(message: str, retry_seconds: int) -> RequestError:
    return RequestError(
        f"{message}; try again in {retry_seconds}s",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_seconds=retry_seconds,
    )
