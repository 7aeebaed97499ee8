"""Tool calls and structured output over /v1/responses: the turns of Codex, and the real openai client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from tests.server.conftest import Harness, StartServer
from tests.server.fakes import MODEL, build_info, build_text_model
from tests.server.test_responses_api import ROUTE, parse_stream

ARGUMENTS = {"command": ["ls", "-la"], "workdir": "/"}
CALL = f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': ARGUMENTS})}\n</tool_call>"
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}


def codex_body(*items: dict[str, Any]) -> dict[str, Any]:
    """A request in the shape of Codex CLI, tools of every kind included."""
    return {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment/>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files"}]},
            *items,
        ],
        "tools": [
            SHELL,
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "d",
                "format": {"type": "grammar", "syntax": "lark"},
            },
            {"type": "namespace", "name": "mcp__git", "description": "d", "tools": [{**SHELL, "name": "log"}]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0190-session",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "0"},
    }


async def turn(harness: Harness, body: dict[str, Any]) -> list[dict[str, Any]]:
    return parse_stream(await harness.stream_text(ROUTE, body))


async def test_two_turns_of_codex(harness: Harness) -> None:
    harness.engine.info = build_info(max_model_len=8192)
    harness.engine.reply = f"Looking.\n{CALL}"
    events = await turn(harness, codex_body())
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call"]
    call = done[-1]
    assert (call["name"], json.loads(call["arguments"])) == ("shell", ARGUMENTS)
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call["arguments"]
    assert events[-1]["type"] == "response.completed"
    assert [tool["name"] for tool in events[-1]["response"]["tools"]] == ["shell"]

    harness.engine.reply = "One file."
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    events = await turn(harness, codex_body(sealed, *done, output))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "One file."
    first, second = (harness.engine.text.decode(list(request.prompt_token_ids)) for request in harness.engine.submitted)
    assert "Runs a command" in first
    for unknown in ("web_search", "apply_patch", "mcp__git", "local_shell"):
        assert unknown not in first, "the model is offered functions alone"
    for text in ("Looking.", "README.md", *ARGUMENTS["command"]):
        assert text in second.removeprefix(first[:-20])


async def test_a_call_that_is_cut_off_is_not_handed_over(harness: Harness) -> None:
    harness.engine.info = build_info(max_model_len=8192)
    harness.engine.reply = CALL
    events = await turn(harness, {**codex_body(), "max_output_tokens": len(CALL) - 30})
    assert events[-1]["type"] == "response.incomplete"
    assert "response.output_item.done" not in [event["type"] for event in events]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


async def test_a_call_that_a_stop_string_cut_off_is_not_handed_over(harness: Harness) -> None:
    harness.engine.info = build_info(max_model_len=8192)
    harness.engine.reply = CALL
    events = await turn(harness, {**codex_body(), "stop": ["workdir"]})
    assert "response.output_item.done" not in [event["type"] for event in events]
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


class Shell(BaseModel):
    """Runs a command"""

    command: list[str]
    workdir: str


class Place(BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.mark.parametrize("tool_choice", ["auto", "required", {"type": "function", "name": "Shell"}])
async def test_parsed_tool_calls(harness: Harness, tool_choice: Any) -> None:
    harness.engine.info = build_info(max_model_len=8192)
    harness.engine.reply = CALL.replace("shell", "Shell")
    function = pydantic_function_tool(Shell)["function"]
    tool: Any = {"type": "function", **function}
    answer = await harness.client().responses.parse(
        model=MODEL, input="List the files", tools=[tool], tool_choice=tool_choice
    )
    (item,) = answer.output
    assert item.type == "function_call"
    assert (item.name, item.status) == ("Shell", "completed")
    assert json.loads(item.arguments) == ARGUMENTS
    is_held = harness.engine.submitted[0].grammar is not None
    assert is_held == (tool_choice != "auto")
    assert answer.usage is not None


async def test_a_streamed_call_through_the_client(harness: Harness) -> None:
    harness.engine.info = build_info(max_model_len=8192)
    harness.engine.reply = CALL
    tool: Any = SHELL
    async with harness.client().responses.stream(model=MODEL, input="List", tools=[tool]) as events:
        snapshots = [event.snapshot async for event in events if event.type == "response.function_call_arguments.delta"]
        final = await events.get_final_response()
    (item,) = final.output
    assert item.type == "function_call"
    assert json.loads(item.arguments) == json.loads(snapshots[-1]) == ARGUMENTS


async def test_structured_output_is_parsed_and_held_to_its_schema(harness: Harness) -> None:
    harness.engine.reply = '{"city":"Paris"}'
    answer = await harness.client().responses.parse(model=MODEL, input="Capital of France?", text_format=Place)
    assert answer.output_parsed == Place(city="Paris")
    assert harness.engine.submitted[0].grammar is not None
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"

    def parse_in_thread() -> Place | None:
        with harness.sync_client() as client:
            return client.responses.parse(model=MODEL, input="Capital?", text_format=Place).output_parsed

    assert await asyncio.to_thread(parse_in_thread) == Place(city="Paris")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_schema_that_cannot_be_compiled_is_refused(harness: Harness, is_stream: bool) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "no such type"}, "strict": True}
    body = {"model": MODEL, "input": "Hi", "text": {"format": form}, "stream": is_stream}
    status, answer = await harness.post(ROUTE, body)
    assert status == 400
    assert answer["error"]["param"].startswith("text.format")
    assert harness.engine.submitted == []


async def test_reasoning_is_an_item_of_its_own(start_server: StartServer, tmp_path: Path) -> None:
    harness = await start_server(text=build_text_model(tmp_path, reasoning_parser="think"))
    harness.engine.reply = "<think>Let me see.</think>Paris"
    answer = await harness.client().responses.create(model=MODEL, input="Capital?")
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert [part.text for part in reasoning.content or ()] == ["Let me see."]
    assert message.type == "message"
    assert answer.output_text == "Paris"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    items: Any = [{"role": "user", "content": "Capital?"}, *(item.to_dict() for item in answer.output)]
    again = await harness.client().responses.create(model=MODEL, input=[*items, {"role": "user", "content": "Sure?"}])
    assert again.status == "completed", "a client gives the items back as they came"
