"""What the items, tools and options of a Responses request become in the chat completion that is generated."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvd.errors import RequestError
from kvd.server.chat_types import ToolChoiceObject
from kvd.server.responses_input import Translation, to_chat
from kvd.server.responses_types import ResponsesRequest

Item = dict[str, Any]


def translate(**fields: Any) -> Translation:
    body = msgspec.convert({"model": "m", "input": "Hi", **fields}, ResponsesRequest)
    body.check()
    return to_chat(body)


def messages_of(*items: Item, **fields: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in translate(input=list(items), **fields).chat.messages]


def call(call_id: str = "call_1", name: str = "shell", arguments: str = '{"command":"ls"}') -> Item:
    return {"type": "function_call", "id": "fc_9", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str = "call_1", value: Any = "README.md") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def said(role: str, text: str, part: str = "input_text") -> Item:
    return {"type": "message", "role": role, "content": [{"type": part, "text": text}]}


def named(name: str) -> Item:
    return {"type": "function", "name": name}


def template_call(call_id: str = "call_1", name: str = "shell", arguments: str = '{"command":"ls"}') -> Item:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_string_is_a_user_message() -> None:
    assert [message.for_template() for message in translate().chat.messages] == [{"role": "user", "content": "Hi"}]


def test_what_an_assistant_says_and_calls_in_one_turn_is_one_message() -> None:
    messages = messages_of(
        said("user", "list the files"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ls it"}]},
        said("assistant", "Looking.", "output_text"),
        call(),
        call("call_2", "read"),
        output(),
        output("call_2", [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]),
        said("assistant", "Two files.", "output_text"),
        said("user", "thanks"),
    )
    assert messages == [
        {"role": "user", "content": "list the files"},
        {
            "role": "assistant",
            "reasoning_content": "ls it",
            "content": "Looking.",
            "tool_calls": [template_call(), template_call("call_2", "read")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "README.md"},
        {"role": "tool", "tool_call_id": "call_2", "content": "one\ntwo"},
        {"role": "assistant", "content": "Two files."},
        {"role": "user", "content": "thanks"},
    ]


def test_two_messages_of_the_assistant_stay_two() -> None:
    commentary = {**said("assistant", "Checking.", "output_text"), "phase": "commentary"}
    messages = messages_of(commentary, {"role": "assistant", "content": "Four."}, said("user", "Again"))
    assert [message["content"] for message in messages] == ["Checking.", "Four.", "Again"]


def test_reasoning_that_only_its_author_can_read_leaves_no_trace() -> None:
    sealed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAA"}
    opened = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert messages_of(said("user", "a"), sealed, said("assistant", "b"), sealed, said("user", "c")) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert [message["role"] for message in messages_of(said("user", "a"), opened, said("user", "c"))] == ["user"] * 2


def test_instructions_and_the_first_system_messages_are_one() -> None:
    items = (said("developer", "Sandboxed."), {"role": "system", "content": "Be brief."}, said("user", "Hi"))
    assert messages_of(*items, instructions="You code.") == [
        {"role": "system", "content": "You code.\n\nSandboxed.\n\nBe brief."},
        {"role": "user", "content": "Hi"},
    ]
    later = messages_of(said("user", "Hi"), said("developer", "Now in French."), instructions="You code.")
    assert [message["role"] for message in later] == ["system", "user", "developer"]
    assert messages_of(said("developer", "Alone.")) == [{"role": "developer", "content": "Alone."}]


def test_several_parts_stay_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = messages_of({"role": "user", "content": parts})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = [{"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "No."}]
    assert messages_of({"role": "assistant", "content": answer})[0]["content"] == "aNo."


def test_calls_of_free_form_tools_become_calls_with_one_argument() -> None:
    messages = messages_of(
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": '*** "Begin"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    )
    assert messages[0]["tool_calls"] == [template_call("c", "apply_patch", '{"input": "*** \\"Begin\\""}')]
    assert messages[1] == {"role": "tool", "tool_call_id": "c", "content": "done"}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "compaction", "encrypted_content": "gAAA"},
        {"type": "of_next_year", "content": 7, "role": None},
    ],
)
def test_items_of_other_tools_and_times_are_passed_over(item: Item) -> None:
    assert messages_of(said("user", "a"), item, said("user", "b")) == messages_of(said("user", "a"), said("user", "b"))


FUNCTION = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
OTHER_TOOLS = [
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
    {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "namespace", "name": "mcp__git", "description": "d", "tools": [FUNCTION]},
]


def test_the_model_is_offered_functions_alone() -> None:
    translation = translate(tools=[*OTHER_TOOLS, FUNCTION], parallel_tool_calls=False)
    (tool,) = translation.chat.tools or ()
    assert tool.function is not None
    assert (tool.type, tool.function.name, tool.function.parameters) == ("function", "shell", {"type": "object"})
    assert translation.chat.parallel_tool_calls is False
    assert [tool.to_json() for tool in translation.tools.values()] == [{**FUNCTION, "description": None}]
    assert translate(tools=OTHER_TOOLS).chat.tools is None


def test_tool_choices() -> None:
    read = {**FUNCTION, "name": "read"}
    choice = translate(tools=[FUNCTION], tool_choice=named("shell")).chat.tool_choice
    assert choice == ToolChoiceObject.of("shell")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named("read")]}
    chat = translate(tools=[FUNCTION, read], tool_choice=allowed).chat
    assert chat.tool_choice == "required"
    assert [tool.function.name for tool in chat.tools or () if tool.function] == ["read"]


def test_options() -> None:
    schema = {"type": "object", "properties": {}}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"}
    chat = translate(text=form, max_output_tokens=9, temperature=0.5, seed=3, reasoning={"effort": "low"}).chat
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert (chat.requested_tokens, chat.temperature, chat.seed, chat.num_logprobs) == (9, 0.5, 3, None)
    assert chat.chat_template_kwargs == {"reasoning_effort": "low"}
    silent = translate(reasoning={"effort": "none"}, chat_template_kwargs={"x": 1}, top_logprobs=2).chat
    assert silent.chat_template_kwargs == {"enable_thinking": False, "x": 1}
    assert silent.num_logprobs == 2
    assert translate(include=["message.output_text.logprobs"]).chat.num_logprobs == 0
    assert translate(text={"format": {"type": "json_object"}}).chat.response_format == {"type": "json_object"}
    assert translate(text={"format": {"type": "text"}}).chat.response_format is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"text": "x"}]}, "input[0].type"),
        ({"input": [said("user", "x"), {"role": "user"}]}, "input[1].content"),
        ({"input": [said("critic", "x")]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}, "input[0].content[0].text"),
        ({"input": [call(), output(value=[{"type": "input_file"}])]}, "input[1].output[0].type"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"tools": OTHER_TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": OTHER_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [named("x")]}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"reasoning": {"effort": "very hard"}}, "reasoning.effort"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        translate(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("chat_param", "own"),
    [
        ("messages[2].content", "input[2].content"),
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("tools[0].function.name", "tools[4].name"),
        ("response_format.json_schema", "text.format"),
        ("temperature", "temperature"),
    ],
)
def test_complaints_of_chat_name_the_fields_of_this_protocol(chat_param: str, own: str) -> None:
    translation = translate(tools=[*OTHER_TOOLS, FUNCTION])
    with pytest.raises(RequestError) as caught, translation.blaming_own_fields():
        raise RequestError(f"'{chat_param}' is not 'good', max_tokens", param=chat_param)
    assert caught.value.param == own
    assert str(caught.value) == f"'{own}' is not 'good', max_tokens"
