"""Tools, thinking and whole conversations over /v1/messages: what reaches the model, and what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from kvd.server.generation import Usage
from kvd.server.messages_events import Draft
from kvd.text.parts import Finish, Part, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallBegin, ToolCallEnd
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import MODEL, build_info
from tests.server.test_messages_api import COUNT, HI, ROUTE, WEATHER, make_client, parse_stream, stream

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Zürich"}}\n</tool_call>'


@pytest.fixture
async def harness(start_server: StartServer) -> Harness:
    """Tools take more tokens than the fake engine's context usually has."""
    harness = await start_server()
    harness.engine.info = build_info(max_model_len=8192)
    return harness


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with make_client(harness) as client:
        yield client


def prompt_text(harness: Harness) -> str:
    return harness.engine.text.decode(harness.engine.submitted[-1].prompt_token_ids)


# --------------------------------------------------------------------------- tools and thinking


async def test_tool_call(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    harness.engine.reply = f"Let me look.\n{CALL}"
    answer = await client.messages.create(**HI, tools=[WEATHER])  # type: ignore[list-item]
    assert answer.stop_reason == "tool_use"
    text, call = answer.content
    assert text.to_dict()["text"].strip() == "Let me look."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"place": "Zürich"})
    assert "Current weather of a place" in prompt_text(harness)


async def test_streamed_tool_calls_are_those_of_the_whole_answer(
    harness: Harness, client: anthropic.AsyncAnthropic
) -> None:
    harness.engine.reply = f"Both.\n{CALL}\n{CALL}"
    async with client.messages.stream(**HI, tools=[WEATHER]) as events:  # type: ignore[list-item]
        message = await events.get_final_message()
    whole = await client.messages.create(**HI, tools=[WEATHER])  # type: ignore[list-item]
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]

    def plain(answer: Any) -> list[Any]:
        return [{**block.to_dict(), "id": None} for block in answer.content]

    assert plain(message) == plain(whole)
    assert message.usage.to_dict() == whole.usage.to_dict()
    assert len({block.id for block in message.content if block.type == "tool_use"}) == 2


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "n" * 128}])
async def test_names_are_as_long_as_anthropic_allows(harness: Harness, choice: dict[str, Any]) -> None:
    tool = {"name": "n" * 128, "input_schema": {"type": "object"}}
    harness.engine.reply = f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": {{}}}}\n</tool_call>'
    status, answer = await harness.post(ROUTE, {**HI, "tools": [tool], "tool_choice": choice, "max_tokens": 400})
    assert (status, answer["content"][0]["name"]) == (200, tool["name"])
    status, answer = await harness.post(ROUTE, {**HI, "tools": [{**tool, "name": "n" * 129}]})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "tools[0].name" in answer["error"]["message"]


async def test_a_call_that_was_cut_off(harness: Harness, client: anthropic.AsyncAnthropic) -> None:
    harness.engine.reply = CALL
    fields: dict[str, Any] = {**HI, "tools": [WEATHER], "max_tokens": CALL.index("rich")}
    answer = await client.messages.create(**fields)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[-1].to_dict()["input"] == {}
    pieces = [e["delta"] for e in await stream(harness, **fields) if e["type"] == "content_block_delta"]
    assert "".join(piece["partial_json"] for piece in pieces).startswith('{"place": "Z')


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_forced_calls_are_held_to_a_grammar(harness: Harness, choice: dict[str, Any]) -> None:
    harness.engine.reply = CALL
    status, answer = await harness.post(ROUTE, {**HI, "tools": [WEATHER], "tool_choice": choice})
    assert (status, answer["stop_reason"]) == (200, "tool_use")
    assert harness.engine.submitted[0].grammar is not None


async def test_parallel_calls_can_be_forbidden(harness: Harness) -> None:
    harness.engine.reply = f"{CALL}\n{CALL}"
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    status, answer = await harness.post(ROUTE, {**HI, "tools": [WEATHER], "tool_choice": choice})
    assert (status, [block["type"] for block in answer["content"]]) == (200, ["tool_use"])


async def test_structured_output(harness: Harness) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    output = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    assert (await harness.post(ROUTE, {**HI, "output_config": output}))[0] == 200
    assert harness.engine.submitted[0].grammar is not None
    output["format"] = {"type": "json_schema", "schema": {"type": "nothing"}}
    status, answer = await harness.post(ROUTE, {**HI, "output_config": output})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "output_config.format" in answer["error"]["message"]


@pytest.mark.parametrize("kind", ["auto", "none"])
async def test_tool_choice_without_force(harness: Harness, kind: str) -> None:
    assert (await harness.post(ROUTE, {**HI, "tools": [WEATHER], "tool_choice": {"type": kind}}))[0] == 200
    assert ("get_weather" in prompt_text(harness)) == (kind == "auto")


async def test_tools_that_anthropic_runs_are_tolerated_and_not_offered(harness: Harness) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, WEATHER]
    assert (await harness.post(ROUTE, {**HI, "tools": tools}))[0] == 200
    assert "get_weather" in prompt_text(harness)
    assert "web_search" not in prompt_text(harness)
    assert (await harness.post(ROUTE, {**HI, "tools": tools[:1]}))[0] == 200


async def drafted(parts: list[Part], **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message of these parts, and its events."""
    whole, streamed = Draft("msg_1", MODEL, **options), Draft("msg_1", MODEL, **options)
    for part in parts:
        for _ in whole.take(part):
            pass
    usage = Usage(10, 4, 6, num_reasoning_tokens=2)
    body = b"".join(streamed.events(part, usage) for part in parts) + streamed.end(usage)
    return whole.message(usage), parse_stream(body.decode())


THOUGHTFUL: list[Part] = [
    ReasoningDelta("Where"), ReasoningDelta("?"), TextDelta("I "), TextDelta("look."), ToolCallBegin(0, "call_a", "f"),
    ToolCallArguments(0, '{"x":'), ToolCallArguments(0, " 1}"), ToolCallEnd(0), ToolCallBegin(1, "call_b", "g"),
    ToolCallArguments(1, "{}"), ToolCallEnd(1), Finish("tool_calls"),
]  # fmt: skip


async def test_thinking_text_and_calls_are_blocks_in_their_order() -> None:
    message, events = await drafted(THOUGHTFUL)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = message["content"]
    assert (thinking["thinking"], text["text"]) == ("Where?", "I look.")
    assert thinking["signature"]
    assert (first["id"], first["name"], first["input"], second["input"]) == ("call_a", "f", {"x": 1}, {})
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 2 + ["signature_delta"] + ["text_delta"] * 2 + ["input_json_delta"] * 3


async def test_thinking_that_is_to_be_omitted() -> None:
    message, events = await drafted(THOUGHTFUL, omits_thinking=True)
    assert message["content"][0]["thinking"] == ""
    assert "Where" not in json.dumps(events)
    assert message["content"][0]["signature"]


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled", "between_tools"])
async def test_thinking_is_accepted(harness: Harness, kind: str) -> None:
    assert (await harness.post(ROUTE, {**HI, "thinking": {"type": kind, "budget_tokens": 2048}}))[0] == 200


async def test_forgotten_tokens_are_told(harness: Harness) -> None:
    harness.engine.num_dropped = 9
    status, answer = await harness.post(ROUTE, {**HI, "kv_eviction": "streaming", "kv_budget_tokens": 64})
    assert (status, answer["usage"]["kvd"]) == (200, {"dropped_tokens": 9})


# --------------------------------------------------------------------------- conversations


async def same_prompt(harness: Harness, body: dict[str, Any], chat: dict[str, Any]) -> None:
    """Both requests must reach the engine with the same tokens, and be counted as what they are."""
    status, answer = await harness.post(ROUTE, {**HI, **body})
    assert status == 200, answer
    assert (await harness.post("/v1/chat/completions", chat))[0] == 200
    first, second = harness.engine.submitted[-2:]
    decode = harness.engine.text.decode
    assert decode(first.prompt_token_ids) == decode(second.prompt_token_ids)
    usage = answer["usage"]
    count = {key: value for key, value in {**HI, **body}.items() if key != "max_tokens"}
    status, counted = await harness.post(COUNT, count)
    assert (status, counted) == (200, {"input_tokens": len(first.prompt_token_ids)})
    assert counted["input_tokens"] == (
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    )


async def test_conversation_with_tools_reaches_the_model(harness: Harness) -> None:
    harness.engine.num_cached_tokens = 11
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", **cached}, {"type": "text", "text": "Now."}]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"place": "A"}, **cached},
            {"type": "tool_use", "id": "toolu_2", "name": "get_weather", "input": {"place": "B"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny", **cached},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
             "content": [{"type": "text", "text": "no such"}, {"type": "text", "text": "place"}]},
            {"type": "text", "text": "And?"},
        ]},
    ]  # fmt: skip

    def call(number: int, place: str) -> dict[str, Any]:
        function = {"name": "get_weather", "arguments": json.dumps({"place": place})}
        return {"id": f"toolu_{number}", "type": "function", "function": function}

    chat = [
        {"role": "system", "content": "Be kind.\n\nBe short."},
        {"role": "user", "content": "Weather?\nNow."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call(1, "A"), call(2, "B")]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such\nplace"},
        {"role": "user", "content": "And?"},
    ]
    system = [{"type": "text", "text": "Be kind.", **cached}, {"type": "text", "text": "Be short."}]
    function = {"name": "get_weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    await same_prompt(
        harness,
        {"system": system, "messages": blocks, "tools": [WEATHER]},
        {"messages": chat, "tools": [{"type": "function", "function": function}]},
    )


async def test_thinking_of_earlier_turns_reaches_the_template(harness: Harness) -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "kvd"}, {"type": "text", "text": "Yes."}]
    messages = [*USER, {"role": "assistant", "content": blocks}, *USER]
    chat = [*USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}, *USER]
    await same_prompt(harness, {"messages": messages}, {"messages": chat})


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};"


async def test_what_changes_on_every_request_stays_out_of_the_prompt(harness: Harness) -> None:
    for number in range(3):
        system = [{"type": "text", "text": BILLING.format(number)}, {"type": "text", "text": "You are a coder."}]
        assert (await harness.post(ROUTE, {**HI, "system": system}))[0] == 200
    assert (await harness.post(ROUTE, {**HI, "system": BILLING.format(7) + "\nYou are a coder."}))[0] == 200
    assert (await harness.post(ROUTE, {**HI, "system": "You are a coder."}))[0] == 200
    assert len({request.prompt_token_ids for request in harness.engine.submitted}) == 1


async def test_system_turns(harness: Harness) -> None:
    messages = [
        {"role": "system", "content": "Be short."}, *USER, {"role": "assistant", "content": "Yes?"},
        {"role": "system", "content": [{"type": "text", "text": "Be brave."}]}, {"role": "user", "content": "Go."},
    ]  # fmt: skip
    chat = [
        {"role": "system", "content": "Be kind.\n\nBe short."}, *USER, {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Be brave.\nGo."},
    ]  # fmt: skip
    await same_prompt(harness, {"system": "Be kind.", "messages": messages}, {"messages": chat})


async def test_a_last_assistant_turn_is_continued(harness: Harness) -> None:
    messages = [*USER, {"role": "assistant", "content": "I say"}]
    await same_prompt(harness, {"messages": messages}, {"messages": messages, "continue_final_message": True})
    assert prompt_text(harness).endswith("I say")
