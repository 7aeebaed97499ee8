"""Reading request bodies under two limits: one body, and all bodies that are being answered together.

Event loop only. Invariant: `BodyBudget.num_bytes` is the sum over running requests of what has arrived of their
bodies; a declared length reserves nothing, so that nobody can fill the budget with promises.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from aiohttp import web

from kvd.errors import RequestError, ServerOverloaded
from kvd.server.responses import request_too_large
from kvd.server.settings import ServerSettings

_HELD = web.RequestKey("body_bytes", int)
RETRY_AFTER_SECONDS = 2


class BodyBudget:
    """Bytes of bodies in memory, of all requests of one server."""

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes

    def take(self, request: web.Request, num_bytes: int) -> None:
        """Count bytes that arrived for `request`. Raises a 503 where they do not fit."""
        if self.num_bytes + num_bytes > self._limit_bytes:
            raise ServerOverloaded(
                f"the bodies of the requests that are being answered fill {self._limit_bytes} bytes (setting "
                "max_body_bytes_in_flight); try again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self.num_bytes += num_bytes
        request[_HELD] = request.get(_HELD, 0) + num_bytes

    def release(self, request: web.Request) -> None:
        """The request is answered; harmless for one without a body."""
        self.num_bytes -= request.get(_HELD, 0)
        request[_HELD] = 0


async def read_body(request: web.Request, settings: ServerSettings, budget: BodyBudget) -> bytes:
    """The whole body, decompressed; raises 400, 408, 413 and 503 as `RequestError`s."""
    limit = settings.max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise request_too_large(limit)
    pieces: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(settings.body_timeout_seconds):
            while piece := await request.content.readany():
                num_bytes += len(piece)
                if num_bytes > limit:
                    raise request_too_large(limit)
                budget.take(request, len(piece))
                pieces.append(piece)
    except TimeoutError:
        raise RequestError("the request body did not arrive in time", status=HTTPStatus.REQUEST_TIMEOUT) from None
    except web.RequestPayloadError:
        raise RequestError("the request body is broken: its chunks or its compression are not valid") from None
    return b"".join(pieces)
