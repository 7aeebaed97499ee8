"""Text → prompt token ids and the room that is left after them. Event loop; long texts go to a worker
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from kvd.errors import ContextLengthExceeded, RequestError
from kvd.server.chat_types import ChatRequest
from kvd.server.completion_types import Prompt
from kvd.server.responses import request_too_large
from kvd.server.state import ServerState
from kvd.server.validation import decode_body

T = TypeVar("T")

INLINE_BODY_BYTES = 128 * 1024
"""Larger bodies are parsed in a worker thread: parsing 1 MB takes a millisecond or more."""


async def read_request(request: web.Request, state: ServerState, model: type[T]) -> T:
    """The body as a `model`; raises 400, 408 and 413 as `RequestError`s."""
    limit = state.settings.max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise request_too_large(limit)
    try:
        async with asyncio.timeout(state.settings.body_timeout_seconds):
            body = await request.read()
    except TimeoutError:
        raise RequestError("the request body did not arrive in time", status=408) from None
    except web.RequestPayloadError:
        raise RequestError("the request body is broken: its chunks or its compression are not valid") from None
    if len(body) <= INLINE_BODY_BYTES:
        return decode_body(body, model)
    return await asyncio.to_thread(decode_body, body, model)


async def encode_text(state: ServerState, text: str) -> list[int]:
    """Token ids of a plain prompt."""
    return await _inline_or_thread(state, len(text), lambda: state.text.encode_prompt(text))


async def encode_chat_request(state: ServerState, body: ChatRequest) -> list[int]:
    """Token ids of a conversation under the chat template."""

    def render() -> list[int]:
        return state.text.encode_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.opens_answer,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs,
        )

    return await _inline_or_thread(state, sum(message.num_characters for message in body.messages), render)


async def encode_prompt(state: ServerState, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of one completion prompt; given ids are taken as they are."""
    token_ids = tuple(await encode_text(state, prompt)) if isinstance(prompt, str) else prompt
    if not token_ids:
        raise RequestError("a prompt must have at least one token", param="prompt")
    return token_ids


def clamp_max_tokens(state: ServerState, num_prompt_tokens: int, wanted: int | None, *, param: str) -> int:
    """The output length: what was asked for, at most what the context leaves, which is also the default."""
    limit = state.engine.info.max_model_len
    if num_prompt_tokens >= limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, but the prompt has {num_prompt_tokens} "
            "tokens, which leaves no room for an answer.",
            num_prompt_tokens=num_prompt_tokens,
            limit_tokens=limit,
            param=param,
        )
    remaining = limit - num_prompt_tokens
    return remaining if wanted is None else min(wanted, remaining)


async def _inline_or_thread(state: ServerState, num_characters: int, work: Callable[[], list[int]]) -> list[int]:
    if num_characters <= state.settings.inline_characters:
        return work()
    return await asyncio.to_thread(work)
