"""POST /v1/responses through the real openai client, and as the bytes that Codex reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from kvd.errors import RequestError, ServerOverloaded
from kvd.server import responses_api
from kvd.server.generation import Usage
from kvd.server.responses_events import Draft
from kvd.text.parts import Finish, Part, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallBegin, ToolCallEnd
from tests.server.conftest import Harness, StartServer
from tests.server.fakes import MAX_MODEL_LEN, MODEL

ROUTE = "/v1/responses"
HI = {"model": MODEL, "input": "Hi"}
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def parse_stream(body: str) -> list[dict[str, Any]]:
    """The data of all events. Checks what holds for every stream: names, numbers, one terminal event, the last."""
    events = []
    for block in body.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] in TERMINAL for event in events] == [False] * (len(events) - 1) + [True]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    return events


async def stream(harness: Harness, **fields: Any) -> list[dict[str, Any]]:
    return parse_stream(await harness.stream_text(ROUTE, {**HI, **fields}))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The kinds of the events in order, runs of one kind as one."""
    names = [str(event["type"]).removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


# --------------------------------------------------------------------------- whole answers


async def test_answer_has_every_field(harness: Harness) -> None:
    harness.engine.num_cached_tokens = 3
    answer = await harness.client().responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", temperature=0.5, metadata={"run": "7"}, store=True
    )
    request = harness.engine.submitted[0]
    assert answer.id == request.request_id
    assert answer.id.startswith("resp_")
    assert request.endpoint == "responses"
    assert (answer.object, answer.status, answer.model, answer.error) == ("response", "completed", MODEL, None)
    assert (answer.instructions, answer.metadata, answer.temperature, answer.top_p) == (
        "Be kind.",
        {"run": "7"},
        0.5,
        1,
    )
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert answer.to_dict()["store"] is False, "nothing is kept, whatever was asked for"
    assert answer.output_text == "Hello world"
    (item,) = answer.output
    assert item.type == "message"
    assert item.id.startswith("msg_")
    assert (item.role, item.status) == ("assistant", "completed")
    num_prompt = len(request.prompt_token_ids)
    assert answer.to_dict()["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": len("Hello world") + 1,  # the end token counts
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + len("Hello world") + 1,
    }


async def test_sync_client(harness: Harness) -> None:
    def talk() -> tuple[str, str]:
        with harness.sync_client() as client:
            whole = client.responses.create(model="alias", input="Hi")
            with client.responses.stream(model="alias", input="Hi") as events:
                return whole.output_text, events.get_final_response().output_text

    assert await asyncio.to_thread(talk) == ("Hello world", "Hello world")


async def test_an_answer_that_ran_out_of_tokens_is_incomplete(harness: Harness) -> None:
    answer = await harness.client().responses.create(model=MODEL, input="Hi", max_output_tokens=5)
    assert (answer.status, answer.output_text, answer.completed_at) == ("incomplete", "Hello", None)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert item.type == "message"
    assert item.status == "incomplete"
    events = await stream(harness, max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"


async def test_an_empty_answer_has_an_item(harness: Harness) -> None:
    harness.engine.reply = ""
    answer = await harness.client().responses.create(model=MODEL, input="Hi")
    assert answer.output_text == ""
    assert len(answer.output) == 1


async def test_conversation_reaches_the_model(harness: Harness) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "My name is Zoë."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello Zoë!"}]},
        {"role": "user", "content": "Who am I?"},
    ]
    await harness.client().responses.create(model=MODEL, input=items, instructions="Be kind.")
    messages: Any = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "My name is Zoë."},
        {"role": "assistant", "content": "Hello Zoë!"},
        {"role": "user", "content": "Who am I?"},
    ]
    await harness.client().chat.completions.create(model=MODEL, messages=messages)
    as_items, as_messages = harness.engine.submitted
    assert as_items.prompt_token_ids == as_messages.prompt_token_ids


async def test_a_large_body_is_read_all_the_same(harness: Harness) -> None:
    past = {"type": "web_search_call", "action": {"query": "x" * 200_000}}
    events = await stream(harness, input=[past, {"role": "user", "content": "Hi"}])
    assert events[-1]["type"] == "response.completed"
    await harness.client().responses.create(model=MODEL, input="Hi")
    large, small = harness.engine.submitted
    assert large.prompt_token_ids == small.prompt_token_ids


async def test_logprobs_join_to_the_text(harness: Harness) -> None:
    harness.engine.reply = "Zoë 漢"
    answer = await harness.client().responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == "Zoë 漢"
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    events = await stream(harness, top_logprobs=0)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(entry["token"] for delta in deltas for entry in delta["logprobs"]) == "Zoë 漢"


# --------------------------------------------------------------------------- streams

TEXT_KINDS = [
    "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
    "content_part.done", "output_item.done", "completed",
]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3, 1000])
async def test_stream_tells_of_every_step(harness: Harness, batch: int) -> None:
    harness.engine.batch = batch
    events = await stream(harness)
    assert kinds(events) == TEXT_KINDS
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Hello world"
    done = events[-2]["item"]
    assert {event.get("item_id", done["id"]) for event in events} == {done["id"]}
    assert {event.get("output_index", 0) for event in events} == {0}
    assert events[2]["item"]["content"] == []
    response = events[-1]["response"]
    assert response["output"] == [done]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None
    whole = await harness.client().responses.create(model=MODEL, input="Hi")
    assert Response.model_validate(response).usage == whole.usage


async def test_stream_through_the_client(harness: Harness) -> None:
    async with harness.client().responses.stream(model=MODEL, input="Hi") as events:
        texts = [event.delta async for event in events if event.type == "response.output_text.delta"]
        final = await events.get_final_response()
    assert "".join(texts) == final.output_text == "Hello world"
    assert final.status == "completed"


async def test_a_long_prefill_repeats_an_event(start_server: StartServer) -> None:
    """Codex counts events, not comments, against its idle timer."""
    harness = await start_server(keepalive_seconds=0.01)
    harness.engine.permits = asyncio.Semaphore(0)
    body = ""
    async with harness.session.post(harness.url + ROUTE, json={**HI, "stream": True}) as response:
        while body.count("event: response.in_progress") < 4:
            body += (await response.content.readany()).decode()
        for _ in range(len("Hello world") + 1):
            harness.engine.permits.release()
        body += (await response.content.read()).decode()
    events = parse_stream(body)
    assert [kind for kind in kinds(events) if kind != "in_progress"] == [
        kind for kind in TEXT_KINDS if kind != "in_progress"
    ]


async def test_a_fault_in_mid_stream_is_the_last_event(harness: Harness) -> None:
    harness.engine.fail_after = 3
    events = await stream(harness)
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert response["id"] in response["error"]["message"]
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hel")
    with pytest.raises(openai.InternalServerError):
        await harness.client().responses.create(model=MODEL, input="Hi")


async def test_a_conversation_that_does_not_fit(harness: Harness) -> None:
    """Whole: a 400. Streamed: the event on which Codex shortens the conversation and goes on."""
    text = "x" * MAX_MODEL_LEN
    with pytest.raises(openai.BadRequestError) as caught:
        await harness.client().responses.create(model=MODEL, input=text)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in str(caught.value)
    events = await stream(harness, input=text)
    assert kinds(events) == ["created", "in_progress", "failed"]
    error = events[-1]["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert harness.engine.submitted == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_full_queue_is_a_status_before_any_event(harness: Harness, is_stream: bool) -> None:
    harness.engine.refusal = ServerOverloaded("the queue is full")
    status, answer = await harness.post(ROUTE, {**HI, "stream": is_stream})
    assert (status, answer["error"]["code"]) == (503, "server_is_overloaded")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("the template refuses"), "invalid_prompt"),
        (RequestError("try again in 3s", status=429, code="rate_limit_exceeded"), "rate_limit_exceeded"),
        (ServerOverloaded("full"), "server_is_overloaded"),
        (RequestError("late", status=504, code="timeout"), "server_error"),
        (KeyError("a bug"), "server_error"),
    ],
)
async def test_what_is_refused_after_the_stream_began_has_codes(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    """A prompt that takes long to read has its stream opened before it is known to be good."""
    harness, may_fail = await start_server(keepalive_seconds=0.01), asyncio.Event()

    async def open_slowly(*_: Any, **__: Any) -> None:
        await may_fail.wait()
        raise error

    monkeypatch.setattr(responses_api, "open_chat", open_slowly)
    body = ""
    async with harness.session.post(harness.url + ROUTE, json={**HI, "stream": True}) as response:
        while "response.in_progress" not in body:
            body += (await response.content.readany()).decode()
        may_fail.set()
        body += (await response.content.read()).decode()
    events = parse_stream(body)
    assert kinds(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"]["code"] == code
    assert "a bug" not in body


async def test_a_client_that_leaves_ends_the_request(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(2)
    async with harness.session.post(harness.url + ROUTE, json={**HI, "stream": True}) as response:
        await response.content.readuntil(b"output_text.delta")
        await harness.engine.reach(1)
        response.close()
    await harness.engine.reach(0)
    assert harness.engine.aborted == [harness.engine.submitted[0].request_id]


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "no blanks"}]}, "tools[1].name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "absent"}}, "tool_choice"),
    ],
)  # fmt: skip
async def test_a_bad_field_is_named(harness: Harness, fields: dict[str, Any], param: str, is_stream: bool) -> None:
    status, answer = await harness.post(ROUTE, {**HI, **fields, "stream": is_stream})
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")
    assert harness.engine.submitted == []


async def test_an_unknown_model_and_a_missing_one(harness: Harness) -> None:
    assert (await harness.post(ROUTE, {"model": "gpt-9", "input": "Hi"}))[0] == 404
    status, answer = await harness.post(ROUTE, {"input": "Hi"})
    assert (status, answer["error"]["param"]) == (400, "model")


# --------------------------------------------------------------------------- items beyond text


def draft_of(*parts: Part) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of an answer of these parts, and the response at its end."""
    draft = Draft({"id": "resp_1", "object": "response"})
    usage = Usage(num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=2)
    data = [draft.begin(), *(draft.events(part) for part in parts), draft.complete(usage)]
    events = parse_stream(b"".join(data).decode())
    whole = Draft({"id": "resp_1", "object": "response"})
    for part in parts:
        for _ in whole.take(part):
            pass
    whole.close(usage)
    ends = [events[-1]["response"], whole.response()]
    same = [[{**item, "id": None} for item in end["output"]] for end in ends]
    assert same[0] == same[1], "whole and streamed answers are the same"
    return events, events[-1]["response"]


BEGIN, END = ToolCallBegin(0, "call_a", "shell"), ToolCallEnd(0)


def test_reasoning_text_and_calls_are_items_in_order() -> None:
    second = (ToolCallBegin(1, "call_b", "read"), ToolCallArguments(1, "{}"), ToolCallEnd(1))
    events, response = draft_of(
        ReasoningDelta("let "), ReasoningDelta("me"), TextDelta("Looking."), BEGIN,
        ToolCallArguments(0, '{"a":'), ToolCallArguments(0, "1}"), END, *second, Finish("tool_calls"),
    )  # fmt: skip
    call_kinds = [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        *TEXT_KINDS[2:-1],
        *call_kinds, *call_kinds,
        "completed",
    ]  # fmt: skip
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == response["output"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    reasoning, _, first, last = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me"}]
    assert reasoning["summary"] == []
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "shell", '{"a":1}')
    assert (last["call_id"], last["name"], last["arguments"]) == ("call_b", "read", "{}")
    assert {item["status"] for item in response["output"]} == {"completed"}


def test_a_call_that_was_cut_off_is_never_done() -> None:
    """Codex executes whatever `output_item.done` brings."""
    events, response = draft_of(BEGIN, ToolCallArguments(0, '{"command":"rm'), Finish("length"))
    assert kinds(events)[2:] == ["output_item.added", "function_call_arguments.delta", "incomplete"]
    (item,) = response["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"command":"rm')


def test_text_after_a_call_is_an_item_of_its_own() -> None:
    _, response = draft_of(TextDelta("a"), BEGIN, ToolCallArguments(0, "{}"), END, TextDelta("b"), Finish("stop"))
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "message"]
