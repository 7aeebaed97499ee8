"""POST /v1/messages and /v1/messages/count_tokens, for Claude Code and Anthropic's clients. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from aiohttp import web

from kvd.server.chat_job import open_chat, run_chat
from kvd.server.chat_types import ChatRequest
from kvd.server.messages_events import Draft
from kvd.server.messages_types import CountTokensRequest, MessagesRequest
from kvd.server.prompts import encode_chat_request, read_request
from kvd.server.responses import json_response
from kvd.server.sse import respond_with_events
from kvd.server.state import STATE, ServerState, describe_client, start_request_id

INLINE_MESSAGES = 256
"""Longer conversations are translated in a worker thread."""


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of events."""
    state = request.app[STATE]
    request_id = start_request_id(request, "msg", separator="_")
    state.check_accepting()
    body = await read_request(request, state, MessagesRequest)
    draft = Draft(request_id, state.resolve_model(body.model), omits_thinking=body.omits_thinking)
    chat = await _translate(body)
    client = describe_client(request)
    if body.stream:
        events = _stream(state, chat, draft, request_id, client)
        seconds = state.settings.keepalive_seconds
        return await respond_with_events(request, events, keepalive_seconds=seconds, form=draft.form)
    job = await open_chat(state, chat, request_id=request_id, client=client, endpoint="messages")
    with run_chat(state, job) as answer:
        async for arrival in answer.parts():
            for _ in draft.take(arrival.part):
                pass
        return json_response(draft.message(answer.usage))


async def count_tokens(request: web.Request) -> web.Response:
    """The prompt tokens of a Messages request: what it is rendered to, counted."""
    state = request.app[STATE]
    body = await read_request(request, state, CountTokensRequest)
    state.resolve_model(body.model)
    chat = await _translate(body)
    chat.check(state.vocab_size)
    prompt = await encode_chat_request(state, chat)
    return json_response({"input_tokens": len(prompt.token_ids)})


async def _translate(body: CountTokensRequest) -> ChatRequest:
    body.check()
    if len(body.messages) > INLINE_MESSAGES:
        return await asyncio.to_thread(body.to_chat)
    return body.to_chat()


async def _stream(
    state: ServerState, chat: ChatRequest, draft: Draft, request_id: str, client: str
) -> AsyncGenerator[bytes, None]:
    """Framed events; what is wrong with the request is raised before the first one."""
    job = await open_chat(state, chat, request_id=request_id, client=client, endpoint="messages")
    with run_chat(state, job) as answer:
        draft.num_prompt_tokens = job.num_prompt_tokens
        async for arrival in answer.parts():
            yield draft.events(arrival.part, answer.usage)
        yield draft.end(answer.usage)
