"""POST /v1/responses: one turn of a conversation that the client keeps. Event loop only.

Nothing is stored: every request brings the whole conversation, and the prefix cache makes that cheap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from kvd.errors import ContextLengthExceeded
from kvd.server.chat_job import open_chat, run_chat
from kvd.server.prompts import INLINE_BODY_BYTES, read_request
from kvd.server.responses import json_response
from kvd.server.responses_events import Draft
from kvd.server.responses_input import Translation, to_chat
from kvd.server.responses_types import ResponsesRequest
from kvd.server.sse import StreamForm, respond_with_events
from kvd.server.state import STATE, ServerState, describe_client, start_request_id


async def responses(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, whole or as a stream of events."""
    state = request.app[STATE]
    request_id = start_request_id(request, "resp", separator="_")
    state.check_accepting()
    body = await read_request(request, state, ResponsesRequest)
    model = state.resolve_model(body.model)
    body.check()
    if request.content_length is None or request.content_length > INLINE_BODY_BYTES:
        translation = await asyncio.to_thread(to_chat, body)
    else:
        translation = to_chat(body)
    draft = Draft(_head(state, body, translation, request_id, model))
    client = describe_client(request)
    if body.stream:
        events = _stream(state, translation, draft, request_id, client)
        form = StreamForm(b"", draft.fail, draft.sign_of_life)
        seconds = state.settings.keepalive_seconds
        return await respond_with_events(request, events, keepalive_seconds=seconds, form=form)
    with translation.blaming_own_fields():
        job = await open_chat(state, translation.chat, request_id=request_id, client=client, endpoint="responses")
        with run_chat(state, job) as answer:
            async for arrival in answer.parts():
                for _ in draft.take(arrival.part):
                    pass
            draft.close(answer.usage)
    return json_response(draft.response())


async def _stream(
    state: ServerState, translation: Translation, draft: Draft, request_id: str, client: str
) -> AsyncGenerator[bytes, None]:
    """Framed events. What is wrong with the request is raised before the first one, with one exception.

    A conversation that does not fit is an event, not a status: on the event Codex shortens it and goes on.
    """
    try:
        with translation.blaming_own_fields():
            job = await open_chat(state, translation.chat, request_id=request_id, client=client, endpoint="responses")
            with run_chat(state, job) as answer:
                yield draft.begin()
                async for batch in answer.batches():
                    yield b"".join(draft.events(arrival.part) for arrival in batch)
                yield draft.complete(answer.usage)
    except ContextLengthExceeded as error:
        yield draft.fail(error)


def _head(
    state: ServerState, body: ResponsesRequest, translation: Translation, request_id: str, model: str
) -> dict[str, Any]:
    """What the response object says of the request: the values in effect, and what a client likes to find again."""
    defaults, reasoning, form = state.settings.default_sampling, body.reasoning, body.format
    format_object: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        format_object |= {
            "name": form.name,
            "description": form.description,
            "schema": form.schema,
            "strict": bool(form.strict),
        }
    return {
        "id": request_id,
        "object": "response",
        "model": model,
        "instructions": body.instructions,
        "tools": [tool.to_json() for tool in translation.tools.values()],
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "presence_penalty": body.presence_penalty or 0,
        "frequency_penalty": body.frequency_penalty or 0,
        "top_logprobs": body.top_logprobs or 0,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary} if reasoning is not None else None,
        "text": {"format": format_object},
        "truncation": "disabled",
        "previous_response_id": None,
        "store": False,
        "background": False,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
