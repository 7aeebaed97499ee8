"""Tools under chat templates: which format is chosen, and what conversations with calls become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from kvd.errors import ConfigError, RequestError
from kvd.text import TextModel
from kvd.text.chat_template import ChatTemplate
from kvd.text.grammar import MAX_CALLS, Grammar, GrammarCompiler
from kvd.text.literals import ControlTokens
from kvd.text.parts import (
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    join_parts,
)
from kvd.text.tool_formats import Mistral, Tool
from kvd.text.tool_prompt import as_plain_messages, choose_format, speaks_format, with_short_ids
from tests.text.conftest import train_byte_level

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]

SIGNS = {
    "hermes": "{{ tools }}<tool_call>",
    "llama3_json": "{{ tools }}{{ '<|python_tag|>' }}",
    "mistral": "{{ tools }}[TOOL_CALLS] {{ messages }}",
    "pythonic": "{{ tools }}[func_name1(params_name1=params_value1), func_name2(params)]",
}
LLAMA_3_2 = """{{ tools }}Respond in the format {"name": function name, "parameters": dictionary}"""
XML_CALLS = "{{ tools }}<tool_call>\n<function=name>\n<parameter=x>"


@pytest.mark.parametrize("name", SIGNS)
def test_the_template_tells_the_format(name: str) -> None:
    template = ChatTemplate(SIGNS[name], {})
    chosen = choose_format("auto", template)
    assert chosen is not None
    assert chosen.name == name
    assert speaks_format(template, chosen)
    named = choose_format(name, None)
    assert named is not None
    assert named.name == name


def test_signs_that_are_close_to_each_other() -> None:
    chosen = choose_format("auto", ChatTemplate(LLAMA_3_2, {}))
    assert chosen is not None
    assert chosen.name == "llama3_json"
    newer = choose_format("auto", ChatTemplate("{{ tools }}[TOOL_CALLS]name[ARGS]", {}))
    assert newer is not None
    assert newer.write([("now", {})]) == "[TOOL_CALLS]now[ARGS]{}"


@pytest.mark.parametrize("source", ["{{ messages }}", XML_CALLS, "{{ messages }}<tool_call>"])
def test_where_the_template_tells_nothing_messages_do(source: str) -> None:
    template = ChatTemplate(source, {})
    chosen = choose_format("auto", template)
    assert chosen is not None
    assert chosen.name == "hermes"
    assert not speaks_format(template, chosen)


def test_no_format_and_an_unknown_one() -> None:
    assert choose_format("none", ChatTemplate(SIGNS["hermes"], {})) is None
    with pytest.raises(ConfigError, match="xml"):
        choose_format("xml", None)


def test_ids_for_mistral_are_short_and_pair_up() -> None:
    changed = with_short_ids(MESSAGES)
    short = changed[1]["tool_calls"][0]["id"]
    assert len(short) == 9
    assert short.isalnum()
    assert changed[2]["tool_call_id"] == short
    assert MESSAGES[2]["tool_call_id"] == "call_1"
    assert with_short_ids(changed) == changed


@pytest.mark.parametrize("name", SIGNS)
def test_plain_messages_say_everything(name: str) -> None:
    tool_format = choose_format(name, None)
    assert tool_format is not None
    template = ChatTemplate("{{ messages }}", {})
    plain = as_plain_messages(MESSAGES, [TOOL], tool_format, template)
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOL["function"]) in plain[0]["content"]
    assert tool_format.write([("NAME", {"ARGUMENT": "VALUE"})]) in plain[0]["content"]
    assert plain[2] == {"role": "assistant", "content": tool_format.write([("now", {"zone": "é"})])}
    assert "noon" in plain[3]["content"]
    assert "tool_calls" in MESSAGES[1]


def test_without_tools_only_the_history_changes() -> None:
    tool_format = choose_format("hermes", None)
    assert tool_format is not None
    template = ChatTemplate("{{ messages }}", {})
    assert as_plain_messages(MESSAGES[:1], [], tool_format, template) == MESSAGES[:1]
    broken = [{"role": "assistant", "content": [{"type": "text", "text": "So:"}], "tool_calls": [{"function": {
        "name": "now", "arguments": "{oh"}}]}]  # fmt: skip
    (message,) = as_plain_messages(broken, [], tool_format, template)
    assert message["content"] == "So:\n" + tool_format.write([("now", {"arguments": "{oh"})])


def test_a_template_that_refuses_system_messages_gets_the_tools_with_the_first_question() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tool_format = choose_format("hermes", None)
    assert tool_format is not None
    (message,) = as_plain_messages(MESSAGES[:1], [TOOL], tool_format, ChatTemplate(source, {}))
    assert message["role"] == "user"
    assert message["content"].endswith("\n\nWhat time is it?")


# --------------------------------------------------------------------------- a whole text model


@pytest.fixture(scope="module")
def mistral_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose marks of calls and reasoning are special tokens, which text does not show."""
    tokenizer: Tokenizer = train_byte_level()
    marks = ("[TOOL_CALLS]", "[ARGS]")
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    path = tmp_path_factory.mktemp("mistral_like") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def open_model(path: Path, template: str, **options: str) -> TextModel:
    return TextModel(
        path,
        chat_template=template,
        adds_bos=False,
        bos_token_id=None,
        special_tokens={},
        **options,  # type: ignore[arg-type]
    )


def test_special_tokens_that_mark_calls_reach_the_parser_alone(mistral_like: Path) -> None:
    text = open_model(mistral_like, "{{ tools }}{{ messages[0].content }}[TOOL_CALLS][ARGS]")
    library = Tokenizer.from_file(str(mistral_like))
    ids = library.encode("So: [TOOL_CALLS]now[ARGS]{}<|im_end|>", add_special_tokens=False).ids
    prompt = text.prepare_chat(MESSAGES[:1], tools=[TOOL])
    form = text.answer_form(prompt, tool_names=["now"])
    output, parser = text.open_output(shown_token_ids=form.shown_token_ids), form.open_parser()
    parts = [part for id_ in ids for part in parser.push(output.push([id_]))]
    parts += parser.push(output.finish()) + parser.finish("stop")
    said, begin, *others = join_parts(parts)
    assert said == TextDelta("So:")
    assert isinstance(begin, ToolCallBegin)
    assert others == [ToolCallArguments(0, "{}"), ToolCallEnd(0), Finish("tool_calls")]
    plain = text.answer_form(text.prepare_chat(MESSAGES[:1]))
    shown = text.open_output(shown_token_ids=plain.shown_token_ids)
    assert shown.push(ids) + shown.finish() == "So: now{}"


def test_a_prompt_says_whether_the_answer_begins_with_reasoning(byte_level: Path, templates: dict[str, str]) -> None:
    text = open_model(byte_level, templates["qwen"])
    assert text.reasons
    prompt = text.prepare_chat(MESSAGES[:1])
    assert (prompt.may_reason, prompt.starts_in_reasoning) == (True, False)
    prompt = text.prepare_chat(MESSAGES[:1], template_kwargs={"enable_thinking": False})
    assert (prompt.may_reason, prompt.starts_in_reasoning) == (False, False)
    opened = open_model(byte_level, "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}")
    assert opened.prepare_chat(MESSAGES[:1]).starts_in_reasoning
    assert not opened.prepare_chat([{"role": "user", "content": "<think>"}], add_generation_prompt=False)[2]
    begun = [*MESSAGES[:1], {"role": "assistant", "content": "<think>Well"}]
    prompt = text.prepare_chat(begun, continue_final_message=True)
    assert (prompt.may_reason, prompt.starts_in_reasoning) == (False, True)
    begun[-1]["content"] = "<think>Well</think>So"
    prompt = text.prepare_chat(begun, continue_final_message=True)
    assert (prompt.may_reason, prompt.starts_in_reasoning) == (False, False)


def test_the_setting_wins_over_the_template(byte_level: Path, templates: dict[str, str]) -> None:
    assert not open_model(byte_level, templates["qwen"], reasoning_parser="none").reasons
    forced = open_model(byte_level, templates["chatml"], reasoning_parser="think")
    form = forced.answer_form(forced.prepare_chat(MESSAGES[:1]))
    parser = form.open_parser()
    assert parser.push("<think>a</think>b") == [ReasoningDelta("a"), TextDelta("b", 16)]


def test_a_template_that_knows_tools_renders_them_itself(byte_level: Path, templates: dict[str, str]) -> None:
    text = open_model(byte_level, templates["qwen"])
    own = ChatTemplate(templates["qwen"], {})
    rendered = own.render(MESSAGES, ControlTokens([]), tools=[TOOL]).text
    assert text.decode(text.encode_chat(MESSAGES, tools=[TOOL])) == rendered.replace("<|im_start|>", "").replace(
        "<|im_end|>", ""
    )
    assert text.describe_parsers() == "tool calls: hermes, as in the chat template; reasoning: <think>"


def test_parsers_are_described_in_one_line(byte_level: Path, templates: dict[str, str]) -> None:
    text = open_model(byte_level, templates["chatml"])
    assert "described in messages" in text.describe_parsers()
    assert "not read" in open_model(byte_level, templates["chatml"], tool_call_parser="none").describe_parsers()


# --------------------------------------------------------------------------- grammars


CITY = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "city": {"$ref": "#/$defs/city"}, "tags": {"type": "array"}},
        "required": ["city"],
        "$defs": {"city": {"enum": ["Paris", "Łódź"]}},
    },
)
FREE = Tool("note", {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}}})
BARE = Tool("now")

CALLS: list[tuple[list[tuple[str, dict[str, Any]]], bool]] = [
    ([("get_weather", {"city": "Paris"})], True),
    ([("get_weather", {"city": "Paris", "days": 2})], True),
    ([("now", {})], True),
    ([("note", {})], True),
    ([("note", {"a": True})], True),
    ([("note", {"b": "x"})], True),
    ([("note", {"a": True, "b": "x, (y)"})], True),
    ([("now", {}), ("note", {"b": "x"}), ("now", {})], True),
    ([("now", {})] * MAX_CALLS, True),
    ([("now", {})] * (MAX_CALLS + 1), False),
    ([("get_weather", {"city": "Rome"})], False),
    ([("get_weather", {"days": 2})], False),
    ([("now", {"zone": 1})], False),
    ([("other", {})], False),
]


@pytest.fixture(scope="module")
def grammars(mistral_like: Path) -> GrammarCompiler:
    end = Tokenizer.from_file(str(mistral_like)).token_to_id("<|im_end|>")
    text = open_model(mistral_like, "{{ messages[0].content }}")
    return text.open_grammars(end_token_ids=[end], num_logits=text.vocab_size)


def is_sentence(grammar: Grammar, path: Path, text: str) -> bool:
    matcher = grammar.start()
    for token_id in Tokenizer.from_file(str(path)).encode(f"{text}<|im_end|>", add_special_tokens=False).ids:
        if not matcher.mask()[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.accept(token_id)
    return True


@pytest.mark.parametrize("name", [*SIGNS, "newer mistral"])
def test_a_grammar_allows_the_calls_that_its_format_writes(
    grammars: GrammarCompiler, mistral_like: Path, name: str
) -> None:
    tool_format = Mistral(writes_args=True) if name == "newer mistral" else choose_format(name, None)
    assert tool_format is not None
    grammar = grammars.compile(tool_format.grammar([CITY, FREE, BARE], one_call=False))
    for calls, is_right in CALLS:
        text = _in_order(tool_format.write(calls), name)
        assert is_sentence(grammar, mistral_like, text) == is_right, text
    assert not is_sentence(grammar, mistral_like, "")
    assert not is_sentence(grammar, mistral_like, "now")
    single = grammars.compile(tool_format.grammar([BARE], one_call=True))
    assert is_sentence(single, mistral_like, tool_format.write([("now", {})]))
    assert not is_sentence(single, mistral_like, tool_format.write([("now", {}), ("now", {})]))


def _in_order(text: str, name: str) -> str:
    """JSON names arguments in the order of the schema; calls in Python begin with those that are required."""
    if name == "pythonic":
        return text.replace("True", "true").replace("'", '"')
    return text.replace('"city": "Paris", "days": 2', '"days": 2, "city": "Paris"')


def test_a_parameter_that_python_cannot_name_is_refused() -> None:
    tool = Tool("f", {"type": "object", "properties": {"a-b": {}}})
    pythonic = choose_format("pythonic", None)
    assert pythonic is not None
    with pytest.raises(RequestError, match="no name in Python") as refusal:
        pythonic.grammar([tool], one_call=True)
    assert refusal.value.param == "tools"
