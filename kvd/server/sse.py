"""Server-sent events: framing, signs of life, and errors before and after the first byte. Event loop only.

Invariant: until the first byte is written a failure is a proper HTTP status; after it, a failure is an
event in the protocol's form. Signs of life are written between events, never inside one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kvd.errors import EngineFailure, RequestError
from kvd.server.responses import error_object
from kvd.server.state import REQUEST_ID

logger = logging.getLogger("kvd.server")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(data: object, *, event: str | None = None) -> bytes:
    """One event with JSON data."""
    name = f"event: {event}\n".encode() if event is not None else b""
    return b"%sdata: %s\n\n" % (name, msgspec.json.encode(data))


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What the streams of one protocol have besides their events.

    done          written after the last event, also after a failure
    failure       the bytes that tell of a failure in mid-stream
    sign_of_life  the bytes to send when nothing else was for a while; asked for at the moment of writing
    """

    done: bytes
    failure: Callable[[RequestError], bytes]
    sign_of_life: Callable[[], bytes] = lambda: COMMENT


COMPLETIONS_FORM = StreamForm(DONE, lambda error: frame(error_object(error)))


async def respond_with_events(
    request: web.Request,
    events: AsyncGenerator[bytes, None],
    *,
    keepalive_seconds: float,
    form: StreamForm = COMPLETIONS_FORM,
) -> web.StreamResponse:
    """Send framed `events`, then what `form` ends with.

    The answer begins with the first event, or after `keepalive_seconds` without one. What `events` raises
    before that is raised here; later it becomes an error event. A client that left raises CancelledError or
    ConnectionError; `events` is closed in every case.
    """
    async with aclosing(events):
        first = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait({first}, timeout=keepalive_seconds)
            if first.done():
                first.result()  # raises what is to become a status
            response = web.StreamResponse(headers=_HEADERS)
            await response.prepare(request)
            async with _keepalive(response, keepalive_seconds, form) as writer:
                await _send(request, writer, await _outcome(first, request), events, form)
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
            if not first.cancelled():
                first.exception()  # seen, also where the client left in the moment in which it was raised
    await response.write_eof()
    return response


async def _outcome(first: asyncio.Future[bytes | None], request: web.Request) -> bytes | RequestError | None:
    try:
        return await first
    except Exception as error:
        return _as_request_error(error, request)


async def _send(
    request: web.Request,
    writer: _Writer,
    first: bytes | RequestError | None,
    events: AsyncGenerator[bytes, None],
    form: StreamForm,
) -> None:
    failure = first if isinstance(first, RequestError) else None
    if isinstance(first, bytes):
        await writer.write(first)
        while failure is None:
            try:
                data = await anext(events, None)
            except Exception as error:
                failure = _as_request_error(error, request)
            else:
                if data is None:
                    break
                await writer.write(data)
    if failure is not None:
        await writer.write(form.failure(failure))
    await writer.write(form.done)


def _as_request_error(error: Exception, request: web.Request) -> RequestError:
    """What a client is told of an error in mid-stream; a fault of ours goes to the log in full."""
    if isinstance(error, RequestError):
        return error
    logger.error("request %s failed in mid-stream", request[REQUEST_ID], exc_info=error)
    return EngineFailure(f"request {request[REQUEST_ID]} failed; the server's log says why")


class _Writer:
    """Writes whole events and remembers when the last one went out."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self._clock = asyncio.get_running_loop().time
        self.written_at = self._clock()

    async def write(self, data: bytes) -> None:
        if not data:
            return
        self.written_at = self._clock()
        await self._response.write(data)

    async def keep_alive(self, keepalive_seconds: float, form: StreamForm) -> None:
        """Write a sign of life whenever nothing was written for `keepalive_seconds`."""
        while True:
            wait = self.written_at + keepalive_seconds - self._clock()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self.write(form.sign_of_life())


@asynccontextmanager
async def _keepalive(
    response: web.StreamResponse, keepalive_seconds: float, form: StreamForm
) -> AsyncIterator[_Writer]:
    writer = _Writer(response)
    task = asyncio.create_task(writer.keep_alive(keepalive_seconds, form))
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("keep-alive ended: %s", error)  # the client left; the sender finds out by itself
