"""The `/kvd/*` routes about the cache: what is in it, pins, kept turns, sessions, and the reset. Event loop only.

A chain of cached blocks is named by the `prefix_id` that /kvd/cache/prefixes lists, or by the id of a request that
ended lately, as its answer carries it.
"""

from __future__ import annotations

import re

import msgspec
from aiohttp import web

from kvd.errors import RequestError
from kvd.server.prompts import read_request
from kvd.server.query import query_integer
from kvd.server.responses import invalid, json_response, short
from kvd.server.state import STATE, ServerState

DEFAULT_PREFIXES = 50
MAX_PREFIXES = 1000
MAX_CHAIN_CHARACTERS = 200
TIERS = ("pool", "ram", "disk")

_SESSION_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}", re.ASCII)


class ChainRequest(msgspec.Struct, kw_only=True):
    chain: str


async def list_prefixes(request: web.Request) -> web.Response:
    """The cached chains that were found most often, the pinned ones first."""
    state = request.app[STATE]
    limit = query_integer(request, "limit", DEFAULT_PREFIXES, 1, MAX_PREFIXES)
    return json_response({"prefixes": await state.engine.prefixes(limit)})


async def pin(request: web.Request) -> web.Response:
    """Keep a chain until it is unpinned."""
    state = request.app[STATE]
    body = await read_request(request, state, ChainRequest)
    num_blocks = await state.engine.pin(_one_chain(state, body.chain))
    if not num_blocks:
        raise _not_found(
            f"'{short(body.chain, 80)}' cannot be pinned: it is not in the KV cache, or too little of that would be "
            "left for others"
        )
    state.event_log.add("info", "pin", f"{short(body.chain, 80)} pinned by an operator, blocks: {num_blocks}")
    return json_response({"chain": body.chain, "pinned_blocks": num_blocks})


async def unpin(request: web.Request) -> web.Response:
    """Give a pinned chain up: it stays cached as long as others do."""
    state = request.app[STATE]
    body = await read_request(request, state, ChainRequest)
    if not await state.engine.unpin(_one_chain(state, body.chain)):
        raise _not_found(f"'{short(body.chain, 80)}' is not pinned")
    state.event_log.add("info", "unpin", f"{short(body.chain, 80)} unpinned by an operator")
    return json_response({"chain": body.chain, "unpinned": True})


async def drop(request: web.Request) -> web.Response:
    """Forget a chain, as far as nobody uses, shares or has pinned it."""
    state = request.app[STATE]
    body = await read_request(request, state, ChainRequest)
    num_blocks = await state.engine.drop_prefix(_one_chain(state, body.chain))
    if not num_blocks:
        raise _not_found(
            f"nothing of '{short(body.chain, 80)}' can be dropped: it is not in the KV cache, or all of its blocks are "
            "in use, shared or pinned"
        )
    state.event_log.add("info", "drop", f"{short(body.chain, 80)} dropped by an operator, blocks: {num_blocks}")
    return json_response({"chain": body.chain, "dropped_blocks": num_blocks})


async def keep_turn(request: web.Request) -> web.Response:
    """The answer was a tool call, so the client comes back soon: keep its blocks for `keep_tool_turns` seconds."""
    state = request.app[STATE]
    request_id = request.match_info["request_id"]
    _check_has_ended(state, request_id, param="request_id")
    num_blocks = sum([await state.engine.keep_turn(each) for each in state.engine_ids(request_id)])
    if not num_blocks:
        raise _not_found(f"no blocks are cached of a request '{short(request_id, 60)}' that ended lately", "request_id")
    return json_response({"id": request_id, "kept_blocks": num_blocks})


async def reset(request: web.Request) -> web.Response:
    """Drop every cached block in all tiers. Pinned blocks and those of running requests stay, and are counted."""
    state = request.app[STATE]
    num_dropped = await state.engine.reset_cache()
    remaining = await state.engine.snapshot()
    state.event_log.add(
        "info", "cache_reset", f"{num_dropped} cached blocks, and RAM and disk tier, dropped by an operator"
    )
    return json_response(
        {
            "dropped_blocks": num_dropped,
            "active_blocks": remaining.num_blocks_active,
            "pinned_blocks": remaining.num_blocks_pinned,
            "tiers": TIERS,
        }
    )


async def save_session(request: web.Request) -> web.Response:
    """Write a chain to the session file of a name, in place of what was there."""
    state = request.app[STATE]
    name = _session_name(request)
    body = await read_request(request, state, ChainRequest)
    session = await state.engine.save_session(name, _one_chain(state, body.chain))
    state.event_log.add("info", "session_saved", f"session {name}: {session.num_tokens} tokens")
    return json_response(session)


async def restore_session(request: web.Request) -> web.Response:
    """Read a session file into the KV cache, where requests that begin with its tokens find it."""
    state = request.app[STATE]
    name = _session_name(request)
    session = await state.engine.restore_session(name)
    state.event_log.add("info", "session_restored", f"session {name}: {session.num_tokens} tokens")
    return json_response(session)


def _session_name(request: web.Request) -> str:
    """The name in the path, which becomes a file's name: nothing else than a plain one gets through."""
    name = request.match_info["name"]
    if not _SESSION_NAME.fullmatch(name):
        raise invalid("name", "a session's name is 1 to 64 of A-Z a-z 0-9 . _ - and does not begin with a dot")
    return name


def _one_chain(state: ServerState, chain: str) -> str:
    """The engine's name of a chain; a 400 for an id that stands for several, a 409 while it is still growing."""
    if not chain.strip() or len(chain) > MAX_CHAIN_CHARACTERS:
        raise invalid("chain", f"'chain' must have 1 to {MAX_CHAIN_CHARACTERS} characters")
    _check_has_ended(state, chain, param="chain")
    engine_ids = state.engine_ids(chain)
    if len(engine_ids) > 1:
        raise invalid(
            "chain",
            f"request '{short(chain, 60)}' has {len(engine_ids)} choices; name one of them, from {engine_ids[0]} "
            f"to {engine_ids[-1]}",
        )
    return engine_ids[0]


def _check_has_ended(state: ServerState, request_id: str, *, param: str) -> None:
    if state.is_running(request_id):
        raise RequestError(
            f"request '{short(request_id, 60)}' is still running; its blocks can be named when it has ended",
            status=409,
            code="request_running",
            param=param,
        )


def _not_found(message: str, param: str = "chain") -> RequestError:
    return RequestError(
        message, status=404, kind="not_found_error", code=f"{param.removesuffix('_id')}_not_found", param=param
    )
