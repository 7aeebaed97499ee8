"""Tools, reasoning, structured answers and several choices through the real openai client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from kvd.core import Request
from kvd.text.text_model import TextModel
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import IM_END, MODEL, build_text_model, parse_events

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if opened %}<think>\n{% elif closed %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def ask(tools: list[Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER, "tools": tools, **fields}


def prompt_of(request: Request) -> str:
    return bytes(token for token in request.prompt_token_ids if token < 256).decode()


def sentence_of_grammar(request: Request, text: str) -> bool:
    """Whether the request's grammar lets the model write `text` and then end."""
    assert request.grammar is not None
    matcher = request.grammar.start()
    for token_id in (*text.encode(), IM_END):
        if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.accept(token_id)
    return True


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return build_text_model(tmp_path_factory.mktemp("thinking"), chat_template=THINKING_TEMPLATE)


# --------------------------------------------------------------------------- calls


async def test_a_call_is_taken_out_of_the_answer(harness: Harness) -> None:
    harness.engine.reply = f"Let me see.\n{CALL}"
    answer = await harness.client().chat.completions.create(**ask([WEATHER]))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS)
    assert answer.usage.completion_tokens == len(harness.engine.reply) + 1
    assert harness.engine.kept == [answer.id], "the next turn is near"


async def test_an_answer_of_calls_alone_has_no_content(harness: Harness) -> None:
    harness.engine.reply = f"\n{CALL}\n{NOW_CALL}"
    answer = await harness.client().chat.completions.create(**ask([WEATHER, NOW]))
    message = answer.choices[0].message
    assert message.content is None
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize("batch", [1, 3, 1000])
async def test_streamed_calls_have_the_contract_shape(harness: Harness, batch: int) -> None:
    harness.engine.reply, harness.engine.batch = f"So: {CALL}\n{NOW_CALL}", batch
    chunks = parse_events(await harness.stream_text("/v1/chat/completions", ask([WEATHER, NOW])))
    choices: list[dict[str, Any]] = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "So:"
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    for index, (name, arguments) in enumerate((("get_weather", PARIS), ("now", "{}"))):
        first, *others = [call for call in deltas if call["index"] == index]
        assert first["id"].startswith("call_")
        assert first["type"] == "function"
        assert first["function"] == {"name": name, "arguments": ""}
        assert all(set(call) == {"index", "function"} and list(call["function"]) == ["arguments"] for call in others)
        assert "".join(call["function"]["arguments"] for call in others) == arguments
    assert [call["index"] for call in deltas] == sorted(call["index"] for call in deltas)


async def test_parallel_calls_can_be_switched_off(harness: Harness) -> None:
    harness.engine.reply = f"{CALL}\n{CALL}"
    answer = await harness.client().chat.completions.create(**ask([WEATHER], parallel_tool_calls=False))
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert harness.engine.aborted == [answer.id], "nothing beyond the first is generated"


async def test_a_call_that_is_cut_off_ends_with_length(harness: Harness) -> None:
    harness.engine.reply = CALL
    num_tokens = CALL.index("Paris") + 3
    answer = await harness.client().chat.completions.create(**ask([WEATHER], max_tokens=num_tokens))
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Par'
    assert harness.engine.kept == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_call_is_text(harness: Harness, stream: bool) -> None:
    harness.engine.reply = "<tool_call>get_weather(Paris)</tool_call>"
    if stream:
        chunks = parse_events(await harness.stream_text("/v1/chat/completions", ask([WEATHER])))
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)  # type: ignore[index]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
    else:
        answer = await harness.client().chat.completions.create(**ask([WEATHER]))
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.tool_calls is None
    assert text == harness.engine.reply


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_tools_that_are_not_offered_are_not_called(harness: Harness, fields: dict[str, Any]) -> None:
    harness.engine.reply = CALL
    answer = await harness.client().chat.completions.create(model=MODEL, messages=USER, **fields)
    assert answer.choices[0].message.content == CALL
    assert "get_weather" not in prompt_of(harness.engine.submitted[0])


async def test_a_server_that_reads_no_calls_refuses_tools(start_server: StartServer, tmp_path: Path) -> None:
    harness = await start_server(text=build_text_model(tmp_path, tool_call_parser="none"))
    assert (await harness.chat_error(tools=[WEATHER]))["param"] == "tools"


async def test_a_template_without_tools_gets_them_as_messages(harness: Harness) -> None:
    await harness.client().chat.completions.create(**ask([WEATHER], max_tokens=1))
    prompt = prompt_of(harness.engine.submitted[0])
    assert prompt.startswith("system\nYou can call these functions")
    assert json.dumps(WEATHER["function"]) in prompt
    assert '<tool_call>\n{"name": "NAME"' in prompt


async def test_calls_and_results_of_earlier_turns_are_shown(harness: Harness) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hidden"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "warm"}]},
    ]
    await harness.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert prompt_of(harness.engine.submitted[0]) == (
        f"system\nBe brief.\nuser\nWeather?\nassistant\n{CALL}\nuser\n<tool_response>\nsunny\n</tool_response>\n"
        "<tool_response>\nwarm\n</tool_response>\nassistant\n"
    )


# --------------------------------------------------------------------------- what answers are held to


async def test_a_required_call_is_held_to_the_tools(harness: Harness) -> None:
    harness.engine.reply = CALL
    answer = await harness.client().chat.completions.create(**ask([WEATHER, NOW], tool_choice="required"))
    assert answer.choices[0].finish_reason == "tool_calls"
    (request,) = harness.engine.submitted
    assert sentence_of_grammar(request, CALL)
    assert sentence_of_grammar(request, f"{CALL}\n{NOW_CALL}")
    assert sentence_of_grammar(request, NOW_CALL)
    assert not sentence_of_grammar(request, "")
    assert not sentence_of_grammar(request, f"Well. {CALL}")
    assert not sentence_of_grammar(request, CALL.replace("get_weather", "other"))
    assert not sentence_of_grammar(request, CALL.replace('"Paris"', "7"))
    assert not sentence_of_grammar(request, NOW_CALL.replace("{}", '{"zone": 1}'))


async def test_a_named_tool_is_called_once(harness: Harness) -> None:
    harness.engine.reply = f"{NOW_CALL}\n{NOW_CALL}"
    choice = {"type": "function", "function": {"name": "now"}}
    answer = await harness.client().chat.completions.create(**ask([WEATHER, NOW], tool_choice=choice))
    assert len(answer.choices[0].message.tool_calls) == 1
    (request,) = harness.engine.submitted
    assert "get_weather" in prompt_of(request), "the prompt stays the same, and so its cached blocks"
    assert sentence_of_grammar(request, NOW_CALL)
    assert not sentence_of_grammar(request, f"{NOW_CALL}\n{NOW_CALL}")
    assert not sentence_of_grammar(request, CALL)


def allow(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_of_allowed_tools_one_is_called_where_that_is_required(harness: Harness) -> None:
    harness.engine.reply = NOW_CALL
    answer = await harness.client().chat.completions.create(**ask([WEATHER, NOW], tool_choice=allow("required", "now")))
    assert answer.choices[0].message.tool_calls[0].function.name == "now"
    (request,) = harness.engine.submitted
    assert "get_weather" in prompt_of(request), "the prompt stays the same, and so its cached blocks"
    assert sentence_of_grammar(request, f"{NOW_CALL}\n{NOW_CALL}")
    assert not sentence_of_grammar(request, CALL)
    assert not sentence_of_grammar(request, "")


async def test_the_model_is_told_of_the_tools_that_it_may_call(harness: Harness) -> None:
    for names in (("now",), ()):
        await harness.client().chat.completions.create(**ask([WEATHER, NOW], tool_choice=allow("auto", *names)))
        request = harness.engine.submitted[-1]
        assert request.grammar is None
        assert "get_weather" not in prompt_of(request)
        assert ("now" in prompt_of(request)) == bool(names)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allow("required"), "tool_choice"),
        (allow("auto", "other"), "tool_choice"),
        (allow("never", "now"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
         "tool_choice.allowed_tools.tools[0]"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "other", "function": {"name": "now"}}, "tool_choice.type"),
    ],
)  # fmt: skip
async def test_a_choice_that_is_wrong_is_named(harness: Harness, choice: dict[str, Any], param: str) -> None:
    error = await harness.chat_error(tools=[WEATHER, NOW], tool_choice=choice)
    assert error["param"] == param
    assert param.rpartition(".")[2].split("[")[0] in error["message"]


async def test_one_required_call_of_any_tool(harness: Harness) -> None:
    harness.engine.reply = CALL
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    await harness.client().chat.completions.create(**ask([WEATHER], **fields))
    assert not sentence_of_grammar(harness.engine.submitted[0], f"{CALL}\n{CALL}")


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
async def test_a_free_choice_needs_no_grammar(harness: Harness, fields: dict[str, Any]) -> None:
    await harness.client().chat.completions.create(**ask([WEATHER], **fields))
    assert harness.engine.submitted[0].grammar is None


CITY_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY_SCHEMA}}},
         PARIS, "{}"),
        ({"guided_json": CITY_SCHEMA}, PARIS, "{}"),
        ({"guided_json": json.dumps(CITY_SCHEMA)}, PARIS, "{}"),
        ({"guided_regex": "[a-c]{2}"}, "ab", "abc"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_grammar": 'start: "x" /[0-9]+/'}, "x12", "12"),
        ({"structured_outputs": {"regex": "[a-c]{2}", "disable_any_whitespace": False}}, "ab", "abc"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, CALL, "text"),
        ({"response_format": {"type": "json_object"}, "tools": [WEATHER]}, '{"a": 1}', "text"),
        ({"guided_choice": ["yes"], "tools": [WEATHER], "tool_choice": "required"}, CALL, "yes"),
    ],
)  # fmt: skip
async def test_structured_answers(harness: Harness, fields: dict[str, Any], right: str, wrong: str) -> None:
    status, answer = await harness.post("/v1/chat/completions", {"messages": USER, **fields})
    assert status == 200, answer
    assert sentence_of_grammar(harness.engine.submitted[0], right)
    assert not sentence_of_grammar(harness.engine.submitted[0], wrong)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "text"}}, {"structured_outputs": {"json_object": False}}]
)
async def test_plain_text_needs_no_grammar(harness: Harness, fields: dict[str, Any]) -> None:
    assert (await harness.post("/v1/chat/completions", {"messages": USER, **fields}))[0] == 200
    assert harness.engine.submitted[0].grammar is None


async def test_the_client_parses_structured_outputs(harness: Harness) -> None:
    class City(pydantic.BaseModel):
        city: str

    harness.engine.reply = PARIS
    answer = await harness.client().chat.completions.parse(model=MODEL, messages=USER, response_format=City)  # type: ignore[arg-type]
    assert answer.choices[0].message.parsed == City(city="Paris")
    assert sentence_of_grammar(harness.engine.submitted[0], PARIS)


# --------------------------------------------------------------------------- reasoning


async def test_reasoning_is_apart_from_the_answer(start_server: StartServer, thinking_model: TextModel) -> None:
    harness = await start_server(text=thinking_model)
    harness.engine.reply = "<think>\nA plan.\n</think>\n\nAn answer."
    answer = await harness.client().chat.completions.create(model=MODEL, messages=USER)
    message = answer.choices[0].message.to_dict()
    assert message["content"] == "An answer."
    assert message["reasoning_content"] == message["reasoning"] == "A plan."
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == len("\nA plan.\n</think>") + 1, (
        "from the mark that opens it on, a token per byte"
    )
    chunks = parse_events(await harness.stream_text("/v1/chat/completions", {"messages": USER}))
    deltas: list[dict[str, str]] = [chunk["choices"][0]["delta"] for chunk in chunks]  # type: ignore[index]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "A plan."
    assert all(delta.get("reasoning_content") == delta.get("reasoning") for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == "An answer."


@pytest.mark.parametrize("max_tokens", [4, 100])
async def test_reasoning_that_the_prompt_opens(
    start_server: StartServer, thinking_model: TextModel, max_tokens: int
) -> None:
    harness = await start_server(text=thinking_model)
    harness.engine.reply = "Plan</think>Answer"
    body = {"messages": USER, "max_tokens": max_tokens, "chat_template_kwargs": {"opened": True}}
    _, answer = await harness.post("/v1/chat/completions", body)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "Plan"
    assert message["content"] == ("Answer" if max_tokens > 4 else "")


async def test_where_thinking_is_switched_off_nothing_is_reasoning(
    start_server: StartServer, thinking_model: TextModel
) -> None:
    harness = await start_server(text=thinking_model)
    harness.engine.reply = "<think> is a tag"
    body = {"messages": USER, "chat_template_kwargs": {"closed": True}}
    _, answer = await harness.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == "<think> is a tag"
    assert "reasoning" not in answer["choices"][0]["message"]


async def test_reasoning_of_earlier_turns_reaches_the_template(
    start_server: StartServer, thinking_model: TextModel
) -> None:
    harness = await start_server(text=thinking_model)
    for name in ("reasoning_content", "reasoning"):
        messages = [*USER, {"role": "assistant", "content": "b", name: "a"}, *USER]
        assert (await harness.post("/v1/chat/completions", {"messages": messages}))[0] == 200
        assert "<think>a</think>b" in prompt_of(harness.engine.submitted[-1])


async def test_a_grammar_begins_behind_the_reasoning(start_server: StartServer, thinking_model: TextModel) -> None:
    harness = await start_server(text=thinking_model)
    for opened, right, wrong in (
        (False, ["yes", "<think>\nHm.\n</think>\n\nyes"], ["Hm.</think>yes", "no", "<think>yes"]),
        (True, ["Hm.\n</think>yes"], ["yes", "Hm.</think>no"]),
    ):
        body = {"messages": USER, "guided_choice": ["yes"], "chat_template_kwargs": {"opened": opened}}
        assert (await harness.post("/v1/chat/completions", body))[0] == 200
        request = harness.engine.submitted[-1]
        assert [text for text in right if not sentence_of_grammar(request, text)] == []
        assert [text for text in wrong if sentence_of_grammar(request, text)] == []


# --------------------------------------------------------------------------- several choices


async def test_choices_share_the_prompt(harness: Harness) -> None:
    harness.engine.num_cached_tokens = 3
    answer = await harness.client().chat.completions.create(model=MODEL, messages=USER, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Hello world"}
    requests = harness.engine.submitted
    assert [request.choice_index for request in requests] == [0, 1, 2]
    assert {request.prompt_token_ids for request in requests} == {requests[0].prompt_token_ids}
    assert [request.sampling.seed for request in requests] == [7, 8, 9], "seeded choices differ"
    assert answer.usage.prompt_tokens == len(requests[0].prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.completion_tokens == 3 * (len("Hello world") + 1)


async def test_the_largest_seed_has_neighbours(harness: Harness) -> None:
    await harness.client().chat.completions.create(model=MODEL, messages=USER, n=2, seed=2**63 - 1)
    assert [request.sampling.seed for request in harness.engine.submitted] == [2**63 - 1, -(2**63)]


async def test_streamed_choices_interleave(harness: Harness) -> None:
    body = {"messages": USER, "n": 2, "stream_options": {"include_usage": True}, "logprobs": True}
    chunks = parse_events(await harness.stream_text("/v1/chat/completions", body))
    choices: list[dict[str, Any]] = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order)
    for index in (0, 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello world"
        entries = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert "".join(entry["token"] for entry in entries) == "Hello world"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * (len("Hello world") + 1)  # type: ignore[index]


async def test_each_choice_that_calls_a_tool_is_kept(harness: Harness) -> None:
    harness.engine.reply = CALL
    answer = await harness.client().chat.completions.create(**ask([WEATHER], n=2))
    ids = [choice.message.tool_calls[0].id for choice in answer.choices]
    assert len(set(ids)) == 2
    assert sorted(harness.engine.kept) == [f"{answer.id}-0", f"{answer.id}-1"]


# --------------------------------------------------------------------------- log probabilities


@pytest.mark.parametrize("batch", [1, 4, 1000])
@pytest.mark.parametrize("reply", [f"Zoë < 漢 {CALL} ß", f"{CALL}", "plain <tool", "\n\n<tool_call>7", "tail  \n"])
@pytest.mark.parametrize("max_tokens", [500, 9])
async def test_logprobs_are_those_of_the_content(harness: Harness, reply: str, batch: int, max_tokens: int) -> None:
    harness.engine.reply, harness.engine.batch = reply, batch
    body = ask([WEATHER], logprobs=True, top_logprobs=1, max_tokens=max_tokens)
    whole = (await harness.client().chat.completions.create(**body)).choices[0]
    chunks = parse_events(await harness.stream_text("/v1/chat/completions", body))
    choices: list[dict[str, Any]] = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == (whole.message.content or "")
    assert "".join(entry["token"] for entry in streamed) == text
    assert "".join(entry.token for entry in whole.logprobs.content) == text
    assert b"".join(bytes(entry["bytes"]) for entry in streamed).startswith(text.encode())
