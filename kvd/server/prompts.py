"""Text → prompt token ids and the room that is left after them. Event loop; long texts go to a worker
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from kvd.errors import ContextLengthExceeded, RequestError
from kvd.server.bodies import read_body
from kvd.server.chat_types import ChatRequest
from kvd.server.completion_types import Prompt
from kvd.server.state import ServerState
from kvd.server.validation import decode_body
from kvd.text.answer_form import ChatPrompt

T = TypeVar("T")

MESSAGE_CHARACTERS = 64
"""What a message costs beside its text, expressed in characters."""

INLINE_BODY_BYTES = 128 * 1024
"""Larger bodies are parsed in a worker thread: parsing 1 MB takes a millisecond or more."""


async def read_request(request: web.Request, state: ServerState, model: type[T]) -> T:
    """The body as a `model`; raises 400, 408, 413 and 503 as `RequestError`s."""
    body = await read_body(request, state.settings, state.bodies)
    if len(body) <= INLINE_BODY_BYTES:
        return decode_body(body, model)
    return await asyncio.to_thread(decode_body, body, model)


async def encode_text(state: ServerState, text: str) -> list[int]:
    """Token ids of a plain prompt."""
    limit = state.engine.info.max_model_len
    token_ids = await _inline_or_thread(
        state, len(text), lambda: state.text.encode_prompt(text, limit_tokens=limit), param="prompt"
    )
    return _check_known(state, token_ids, param="prompt")


async def encode_chat_request(state: ServerState, body: ChatRequest) -> ChatPrompt:
    """A conversation under the chat template, with the tools that are on offer."""
    tools = body.offered_functions

    def render() -> ChatPrompt:
        return state.text.prepare_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.opens_answer,
            continue_final_message=bool(body.continue_final_message),
            tools=[tool.for_template() for tool in tools] or None,
            template_kwargs=body.chat_template_kwargs,
            limit_tokens=state.engine.info.max_model_len,
        )

    if body.chat_template_kwargs or tools:  # of any size and shape
        prompt = await _in_thread(render, param="messages")
    else:
        num_characters = sum(MESSAGE_CHARACTERS + message.num_characters for message in body.messages)
        prompt = await _inline_or_thread(state, num_characters, render, param="messages")
    _check_known(state, prompt.token_ids, param="messages")
    return prompt


async def encode_infill(state: ServerState, before: str, behind: str) -> list[int]:
    """Token ids of a prompt whose answer stands between two texts."""
    limit = state.engine.info.max_model_len
    token_ids = await _inline_or_thread(
        state,
        len(before) + len(behind),
        lambda: state.text.encode_infill(before, behind, limit_tokens=limit),
        param="prompt",
    )
    return _check_known(state, token_ids, param="prompt")


async def encode_prompt(state: ServerState, prompt: Prompt, suffix: str = "") -> tuple[int, ...]:
    """Token ids of one completion prompt; given ids are taken as they are. suffix: what comes behind the answer."""
    if isinstance(prompt, str):
        encoded = encode_infill(state, prompt, suffix) if suffix else encode_text(state, prompt)
        token_ids = tuple(await encoded)
    else:
        token_ids = prompt
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


def _check_known(state: ServerState, token_ids: list[int], *, param: str) -> list[int]:
    """Refuse tokens that somebody added to the tokenizer and not to the model."""
    vocab_size = state.engine.info.vocab_size
    if token_ids and (highest := max(token_ids)) >= vocab_size:
        raise RequestError(
            f"the prompt has token id {highest} of the tokenizer, but the model knows {vocab_size} tokens only",
            param=param,
        )
    return token_ids


async def _inline_or_thread(state: ServerState, num_characters: int, work: Callable[[], T], *, param: str) -> T:
    if num_characters > state.settings.inline_characters:
        return await _in_thread(work, param=param)
    return _blaming(work, param)


async def _in_thread(work: Callable[[], T], *, param: str) -> T:
    return await asyncio.to_thread(_blaming, work, param)


def _blaming(work: Callable[[], T], param: str) -> T:
    try:
        return work()
    except ContextLengthExceeded as error:
        error.param = param
        raise
