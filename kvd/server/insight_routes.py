"""The `/kvd/*` routes that explain the engine: block map, timelines, the doctor, prompt text, and the log. Event loop.

They read the console, as the dashboard in this process does. Invariant: no prompt text leaves the server unless its
setting `show_prompts` is on.
"""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from kvd.errors import RequestError
from kvd.server.query import query_integer
from kvd.server.responses import invalid, json_response, short
from kvd.server.state import STATE, ServerState

MAX_CELLS, DEFAULT_CELLS = 16384, 512
MAX_GROUPS = 1000
MAX_TIMELINES, DEFAULT_TIMELINES = 1000, 50
MAX_LOG_EVENTS, DEFAULT_LOG_EVENTS = 1000, 200
MAX_NAME_CHARACTERS = 200


async def block_map(request: web.Request) -> web.Response:
    """What the blocks of one layer group hold, neighbours summed up to at most `cells` cells."""
    num_cells = query_integer(request, "cells", DEFAULT_CELLS, 1, MAX_CELLS)
    group_id = query_integer(request, "group", 0, 0, MAX_GROUPS)
    return json_response(await request.app[STATE].console.block_map(num_cells, group_id))


async def timeline(request: web.Request) -> web.Response:
    """What became of one request so far, running or ended lately."""
    state = request.app[STATE]
    request_id = request.match_info["request_id"]
    engine_ids = state.engine_ids(request_id)
    if len(engine_ids) > 1:
        raise RequestError(
            f"request '{short(request_id, 60)}' has {len(engine_ids)} choices; name one of them, from {engine_ids[0]} "
            f"to {engine_ids[-1]}",
            code="several_choices",  # kvd top knows it
            param="request_id",
        )
    found = await state.console.timeline(engine_ids[0])
    if found is None:
        raise RequestError(
            f"nothing is known of a request '{short(request_id, 60)}': there was none, or too many have ended since",
            status=HTTPStatus.NOT_FOUND,
            kind="not_found_error",
            code="request_not_found",
            param="request_id",
        )
    return json_response(found)


async def timelines(request: web.Request) -> web.Response:
    """The requests that ended last, the latest first, each with its last entry."""
    limit = query_integer(request, "limit", DEFAULT_TIMELINES, 1, MAX_TIMELINES)
    return json_response({"timelines": await request.app[STATE].console.timelines(limit)})


async def doctor(request: web.Request) -> web.Response:
    """Why prompts missed the cache, what it cost, and what to change."""
    return json_response(await request.app[STATE].console.doctor())


async def reveal(request: web.Request) -> web.Response:
    """The text behind a cached prefix or a miss; a 403 unless the server shows prompts."""
    state = request.app[STATE]
    name = request.match_info["name"]
    _check_shows_prompts(state)
    if len(name) > MAX_NAME_CHARACTERS:
        raise invalid("name", f"'name' must have at most {MAX_NAME_CHARACTERS} characters")
    engine_ids = state.engine_ids(name)
    return json_response(await state.console.reveal(engine_ids[0]))


def _check_shows_prompts(state: ServerState) -> None:
    if not state.settings.show_prompts:
        raise RequestError(
            "this server shows no prompt text over HTTP (setting show_prompts)",
            status=HTTPStatus.FORBIDDEN,
            kind="permission_error",
            code="prompts_hidden",
        )


async def log(request: web.Request) -> web.Response:
    """The newest events of the log, oldest first."""
    limit = query_integer(request, "limit", DEFAULT_LOG_EVENTS, 1, MAX_LOG_EVENTS)
    return json_response({"events": await request.app[STATE].console.events(limit)})
