"""POST /v1/messages and /v1/messages/count_tokens through the real anthropic client, and as bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from kvd.config_keys import ApiKey
from kvd.errors import RequestError, ServerOverloaded
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import MAX_MODEL_LEN, MODEL

ROUTE = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": USER}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Current weather of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "cache_control": {"type": "ephemeral"},
}


def make_client(harness: Harness, api_key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=harness.url,
        api_key=api_key,
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=False),
    )


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with make_client(harness) as client:
        yield client


def parse_stream(body: str) -> list[dict[str, Any]]:
    """The data of all events. Checks what holds for every stream: names, and blocks that follow each other."""
    events: list[dict[str, Any]] = []
    for block in body.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    open_index = None
    num_blocks = 0
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                assert event["index"] == num_blocks
                open_index, num_blocks = num_blocks, num_blocks + 1
            case "content_block_delta":
                assert event["index"] == open_index
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
            case "message_delta":
                assert open_index is None
    return events


async def stream(harness: Harness, **fields: Any) -> list[dict[str, Any]]:
    return parse_stream(await harness.stream_text(ROUTE, {**HI, **fields}))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The kinds of the events in order, runs of one kind as one."""
    names = [str(event["type"]) for event in events]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


# --------------------------------------------------------------------------- answers


async def test_answer_has_every_field(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    harness.engine.num_cached_tokens = 3
    answer = await client.messages.create(**HI, system="Be kind.", metadata={"user_id": "someone"})
    request = harness.engine.submitted[0]
    assert answer.id == request.request_id
    assert answer.id.startswith("msg_")
    assert request.endpoint == "messages"
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello world", "citations": None}]
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (
        len(request.prompt_token_ids) - 3,
        3,
        0,
    )
    assert usage.output_tokens == len("Hello world") + 1  # the end token counts
    assert request.sampling.max_tokens == 300


async def test_sync_client(harness: Harness) -> None:
    def talk() -> tuple[Any, str, int]:
        with anthropic.Anthropic(
            base_url=harness.url,
            api_key="none",
            max_retries=0,
            http_client=anthropic.DefaultHttpxClient(trust_env=False, verify=False),
        ) as client:
            whole = client.messages.create(**HI)
            with client.messages.stream(**HI) as events:
                text = "".join(events.text_stream)
                assert events.get_final_message().to_dict() == {**whole.to_dict(), "id": events.get_final_message().id}
            return whole.content[0], text, client.messages.count_tokens(model=MODEL, messages=USER).input_tokens  # type: ignore[arg-type]

    block, text, num_tokens = await asyncio.to_thread(talk)
    assert (block.text, text) == ("Hello world", "Hello world")
    assert num_tokens == len(harness.engine.submitted[0].prompt_token_ids)


async def test_stream_has_the_contract_shape(harness: Harness) -> None:
    harness.engine.num_cached_tokens = 3
    events = await stream(harness)
    assert kinds(events) == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    num_prompt = len(harness.engine.submitted[0].prompt_token_ids)
    assert message["usage"]["cache_read_input_tokens"] == 3
    assert message["usage"]["input_tokens"] == num_prompt - 3
    assert (
        "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "Hello world"
    )
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] == len("Hello world") + 1
    assert events[-2]["usage"]["input_tokens"] == num_prompt - 3


async def test_long_prefill_shows_signs_of_life_in_the_protocol_s_order(start_server: StartServer) -> None:
    harness = await start_server(keepalive_seconds=0.02)
    harness.engine.permits = asyncio.Semaphore(0)
    async with harness.session.post(harness.url + ROUTE, json={**HI, "stream": True}) as response:
        assert response.status == 200
        head = await response.content.readuntil(b"event: ping\n")
        await response.content.readuntil(b"event: ping\n")
        harness.engine.num_cached_tokens = 3
        for _ in range(20):
            harness.engine.permits.release()
        events = parse_stream(
            head.decode() + 'data: {"type":"ping"}\n\n' + (await response.text()).partition("\n\n")[2]
        )
    num_prompt = len(harness.engine.submitted[0].prompt_token_ids)
    assert [event["type"] for event in events].count("message_start") == 1
    assert events[0]["message"]["usage"]["input_tokens"] == num_prompt
    assert events[-2]["usage"]["input_tokens"] == num_prompt - 3, "the end knows what the cache saved"


async def test_stop_reasons(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    short: dict[str, Any] = {**HI, "max_tokens": 5}
    answer = await client.messages.create(**short)
    assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("max_tokens", None, 5)
    answer = await client.messages.create(**HI, stop_sequences=["zzz", "wor"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "wor")
    assert answer.content[0].to_dict()["text"] == "Hello "
    events = await stream(harness, stop_sequences=["zzz", "wor"])
    assert (events[-2]["delta"]["stop_reason"], events[-2]["delta"]["stop_sequence"]) == ("stop_sequence", "wor")


async def test_an_empty_answer_has_a_block(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    harness.engine.reply = ""
    answer = await client.messages.create(**HI)
    assert [block.to_dict()["text"] for block in answer.content] == [""]
    assert "content_block_start" in kinds(await stream(harness))


async def test_sampling_reaches_the_engine(harness: Harness) -> None:
    fields = {"temperature": 0.3, "top_p": 0.8, "top_k": 7, "seed": 5, "priority": 2, "cache_salt": "mine"}
    assert (await harness.post(ROUTE, {**HI, **fields}))[0] == 200
    request = harness.engine.submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.3, 0.8, 7, 5)
    assert (request.priority, request.cache_salt) == (2, "mine")


async def test_betas_are_no_hindrance(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    answer = await client.beta.messages.create(**HI, betas=["context-1m-2025-08-07", "made-up-2031-01-01"])
    assert answer.content[0].to_dict()["text"] == "Hello world"


async def test_counting_needs_no_room_for_an_answer(harness: Harness) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * (MAX_MODEL_LEN + 40)}]}
    status, answer = await harness.post(COUNT, body)
    assert status == 200
    assert answer["input_tokens"] > MAX_MODEL_LEN
    assert harness.engine.submitted == []


# --------------------------------------------------------------------------- errors


async def refusal(harness: Harness, path: str = ROUTE, *, status: int = 400, **fields: Any) -> dict[str, Any]:
    """The error object that a request with these fields gets; None leaves a field out."""
    body = {key: value for key, value in {**HI, **fields}.items() if value is not None}
    actual, answer = await harness.post(path, body)
    assert actual == status, answer
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert set(answer["error"]) == {"type", "message"}
    error: dict[str, Any] = answer["error"]
    return error


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'messages[0].content[0]' is of kind 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
            "'messages[0].content[0].content[0]' is of kind 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}]},
            "messages[0].content[0].content",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "content[0].name"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "tool_result",
        ),
        ({"system": [IMAGE]}, "'system[0]' is of kind 'image'"),
        ({"temperature": 7}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 10**9}, "top_k"),
        ({"stop_sequences": [""]}, "stop sequence"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(harness: Harness, fields: dict[str, Any], name: str) -> None:
    for is_streamed in (False, True):
        error = await refusal(harness, stream=is_streamed, **fields)
        assert error["type"] == "invalid_request_error"
        assert name in error["message"]
    assert harness.engine.submitted == []


async def test_overflow_has_the_text_that_agents_read(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    content = "x" * MAX_MODEL_LEN
    status, counted = await harness.post(COUNT, {"messages": [{"role": "user", "content": content}]})
    assert status == 200
    error = await refusal(harness, messages=[{"role": "user", "content": content}])
    assert error == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {counted['input_tokens']} tokens > {MAX_MODEL_LEN - 1} maximum",
    }


async def test_errors_of_the_client_library(start_server: StartServer) -> None:
    harness = await start_server(api_keys=(ApiKey("laptop", "secret-key-1"),), max_body_bytes=5000)
    async with make_client(harness, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.messages.create(**HI)
        assert unknown.value.type == "authentication_error"
        assert unknown.value.request_id == unknown.value.body["request_id"]  # type: ignore[index]
    async with make_client(harness, "secret-key-1") as client:
        assert (await client.messages.create(**HI)).stop_reason == "end_turn"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**HI, "model": "claude"})
        assert missing.value.type == "not_found_error"
        assert MODEL in str(missing.value.api_message)
        with pytest.raises(anthropic.APIStatusError) as large:
            await client.messages.create(**{**HI, "system": "x" * 6000})
        assert (large.value.status_code, large.value.type) == (413, "request_too_large")
        harness.engine.refusal = ServerOverloaded("the queue is full", retry_after_seconds=3)
        with pytest.raises(anthropic.InternalServerError) as full:
            await client.messages.create(**HI)
        assert (full.value.status_code, full.value.type) == (503, "overloaded_error")
        assert full.value.response.headers["Retry-After"] == "3"
        harness.engine.refusal = RequestError("slow down", status=429, kind="rate_limit_error", retry_after_seconds=2)
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**HI)
        harness.engine.refusal = None
        harness.engine.fail_after = 0
        with pytest.raises(anthropic.InternalServerError) as fault:
            await client.messages.create(**HI)
        assert fault.value.type == "api_error"
        assert str(fault.value.request_id) in str(fault.value.api_message)


@pytest.mark.parametrize(("method", "path", "status"), [("POST", ROUTE + "/batches", 404), ("GET", ROUTE, 405)])
async def test_routes_that_are_not_there(harness: Harness, method: str, path: str, status: int) -> None:
    actual, answer = await harness.call(method, path)
    assert (actual, answer["type"]) == (status, "error")
    assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


async def test_error_in_mid_stream(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    harness.engine.fail_after = 3
    received: list[str] = []

    async def read() -> None:
        async with client.messages.stream(**HI) as events:
            async for text in events.text_stream:
                received.append(text)

    with pytest.raises(anthropic.APIStatusError) as failure:
        await read()
    assert "".join(received) == "Hel"
    assert failure.value.type == "api_error"
    body = await harness.stream_text(ROUTE, HI)
    assert body.rstrip().rpartition("\n\n")[2].startswith("event: error\n")
    assert "[DONE]" not in body


async def test_leaving_a_stream_ends_the_request(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    harness.engine.permits = asyncio.Semaphore(3)
    async with client.messages.stream(**HI) as events:
        async for _ in events.text_stream:
            break
    await harness.engine.reach(0)
    assert harness.engine.aborted == [harness.engine.submitted[0].request_id]


# --------------------------------------------------------------------------- models


async def test_models_for_both_families_of_clients(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL, "alias"]
    assert (models[0].type, models[0].display_name, models[0].max_input_tokens) == ("model", MODEL, MAX_MODEL_LEN - 1)
    assert models[0].created_at.year == 2023
    assert (await client.models.retrieve(MODEL)).id == MODEL
    page = await client.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, MODEL, "alias")
    others = await harness.client().models.list()
    assert [(model.id, model.object) for model in others.data] == [(MODEL, "model"), ("alias", "model")]
