"""Health, metrics, the model list, and tokenizing: the small routes. Event loop only."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
from aiohttp import web

from kvd.errors import ServerOverloaded
from kvd.observe.metrics import CONTENT_TYPE
from kvd.server.chat_types import ChatMessage, ChatRequest
from kvd.server.prompts import encode_chat_request, encode_text, read_request
from kvd.server.responses import invalid, json_response
from kvd.server.state import STATE, ServerState
from kvd.server.validation import check_token_ids


async def health(request: web.Request) -> web.Response:
    """200 while requests are served; 503 with the reason while loading, draining, wedged or dead."""
    state = request.app[STATE]
    state.check_accepting()
    if (reason := state.engine.health()) is not None:
        raise ServerOverloaded(reason, retry_after_seconds=5)
    return json_response({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = state.metrics.render(await state.console.snapshot(), problem=state.engine.health())
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    models = [_describe_model(request, name) for name in state.listed_names]
    return json_response(
        {
            "object": "list",
            "data": models,
            "has_more": False,
            "first_id": models[0]["id"],
            "last_id": models[-1]["id"],
        }
    )


async def retrieve_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_response(_describe_model(request, state.resolve_model(request.match_info["model"])))


def _describe_model(request: web.Request, name: str) -> dict[str, Any]:
    """OpenAI's fields, vLLM's `max_model_len`, and those that Anthropic's clients read."""
    info = request.app[STATE].engine.info
    created = datetime.datetime.fromtimestamp(info.created, datetime.UTC)
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "kvd",
        "root": info.model,
        "max_model_len": info.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        **(_anthropic_fields(info.max_model_len) if "anthropic-version" in request.headers else {}),
    }


def _anthropic_fields(max_model_len: int) -> dict[str, Any]:
    """What a client that says it speaks Anthropic's protocol expects beyond that."""
    return {
        "lifecycle": "active",
        "max_input_tokens": max_model_len - 1,
        "max_tokens": max_model_len - 1,
        "capabilities": None,
    }


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's two forms: a plain prompt, or messages under the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


async def tokenize(request: web.Request) -> web.Response:
    """Token ids exactly as the generating endpoints would use them."""
    state = request.app[STATE]
    body = await read_request(request, state, TokenizeRequest)
    state.resolve_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either 'prompt' or 'messages'")
    token_ids = await _encode(state, body)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": state.engine.info.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [state.text.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
    return json_response(answer)


async def _encode(state: ServerState, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        chat.check(state.vocab_size)
        return (await encode_chat_request(state, chat)).token_ids
    assert body.prompt is not None
    token_ids = await encode_text(state, body.prompt)
    if body.add_special_tokens is False:
        return token_ids[len(state.text.encode_prompt("")) :]  # an empty prompt is what is always put in front
    return token_ids


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = await read_request(request, state, DetokenizeRequest)
    state.resolve_model(body.model)
    check_token_ids("tokens", body.tokens, state.text.vocab_size)
    return json_response({"prompt": state.text.decode(body.tokens)})
