"""The `/kvd/*` routes: snapshots, the event log, the request table, and what an operator may do. Event loop only.

They follow the API key and the origin guard like every other route.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

from kvd.errors import RequestError
from kvd.server.query import query_seconds
from kvd.server.responses import json_response, short
from kvd.server.snapshot_json import encode_log_event, encode_snapshot
from kvd.server.state import STATE, ServerState
from kvd.views import LogEvent

EVENT_BACKLOG = 200
"""Log events kept for one slow reader of /kvd/events; older ones are dropped."""

SNAPSHOT_SECONDS = (0.1, 60.0)
"""Shortest and longest interval that a reader of /kvd/events may ask for."""

_SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def snapshot(request: web.Request) -> web.Response:
    """The engine's state with its request table."""
    state = request.app[STATE]
    body = encode_snapshot(await state.console.snapshot(details=True))
    return web.Response(body=body, content_type="application/json")


async def events(request: web.Request) -> web.StreamResponse:
    """A snapshot at once and then at a steady pace, and log events as they happen, until the server closes."""
    state = request.app[STATE]
    low, high = SNAPSHOT_SECONDS
    interval_seconds = query_seconds(request, "interval", state.settings.snapshot_seconds, low, high)
    backlog: deque[LogEvent] = deque(maxlen=EVENT_BACKLOG)
    unsubscribe = state.event_log.subscribe(backlog.append, recent=EVENT_BACKLOG)
    try:
        response = web.StreamResponse(headers=_SSE_HEADERS)
        await response.prepare(request)
        while not state.is_closing.is_set():
            await response.write(await _take_frames(state, backlog))
            await _sleep_until_closing(state, interval_seconds)
        await response.write_eof()
        return response
    finally:
        unsubscribe()


async def _take_frames(state: ServerState, backlog: deque[LogEvent]) -> bytes:
    frames = [b"event: snapshot\ndata: %s\n\n" % encode_snapshot(await state.console.snapshot(details=True))]
    while backlog:
        frames.append(b"event: log\ndata: %s\n\n" % encode_log_event(backlog.popleft()))
    return b"".join(frames)


async def _sleep_until_closing(state: ServerState, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await state.is_closing.wait()
    except TimeoutError:
        pass


async def list_requests(request: web.Request) -> web.Response:
    state = request.app[STATE]
    current = await state.engine.snapshot(details=True)
    return json_response({"requests": current.requests})


async def abort_request(request: web.Request) -> web.Response:
    """End a request by the id that its answer carries, or by the id of one of its choices."""
    state = request.app[STATE]
    request_id = request.match_info["request_id"]
    was_running = [await state.engine.abort(each) for each in state.engine_ids(request_id)]
    if not any(was_running):
        raise RequestError(
            f"there is no running request '{short(request_id, 60)}'",
            status=404,
            kind="not_found_error",
            code="request_not_found",
            param="request_id",
        )
    state.event_log.add("info", "abort", "aborted by an operator", request_id)
    return json_response({"id": request_id, "aborted": True})
