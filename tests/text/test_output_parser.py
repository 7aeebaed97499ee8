"""Answers taken apart: every way of cutting an example into pieces gives the same parts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.text.output_parser import OutputParser
from kvd.text.parts import (
    Finish,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from kvd.text.pythonic_calls import Pythonic
from kvd.text.tool_formats import Hermes, LlamaJson, Mistral, ToolFormat

TOOLS = ("get_weather", "now", "add")
PARIS = '{"city": "Paris"}'


def parser(tool_format: ToolFormat | None, **options: bool) -> OutputParser:
    numbers = itertools.count()
    return OutputParser(tool_format, tool_names=TOOLS, call_id=lambda: f"call_{next(numbers)}", **options)


def parse(tool_format: ToolFormat | None, pieces: list[str], **options: bool) -> list[Part]:
    """All parts, with neighbouring deltas joined."""
    opened = parser(tool_format, **options)
    parts = [part for piece in pieces for part in opened.push(piece)] + opened.finish("stop")
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, TextDelta) and isinstance(before, TextDelta):
            joined[-1] = TextDelta(before.text + part.text, before.start)
        elif isinstance(part, ReasoningDelta) and isinstance(before, ReasoningDelta):
            joined[-1] = ReasoningDelta(before.text + part.text)
        elif isinstance(part, ToolCallArguments) and isinstance(before, ToolCallArguments):
            joined[-1] = ToolCallArguments(part.call_index, before.text + part.text)
        else:
            joined.append(part)
    return joined


def shape(parts: list[Part]) -> list[str]:
    """The parts in few words: `text`, `(reasoning)`, `name{…}`, with "…" where a call did not end."""
    words: list[str] = []
    for part in parts:
        match part:
            case TextDelta(text=text):
                words.append(text)
            case ReasoningDelta(text=text):
                words.append(f"({text})")
            case ToolCallBegin(name=name):
                words.append(f"{name}…")
            case ToolCallArguments(text=text):
                words[-1] = f"{words[-1].removesuffix('…')}{text}…"
            case ToolCallEnd():
                words[-1] = words[-1].removesuffix("…")
            case Finish(reason=reason):
                words.append(f"[{reason}]")
    return words


HERMES, LLAMA, MISTRAL, PYTHONIC = Hermes(), LlamaJson(), Mistral(), Pythonic()
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'

EXAMPLES: list[tuple[ToolFormat | None, str, list[str]]] = [
    # hermes
    (HERMES, CALL, [f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, f"Let me see.\n\n{CALL}\n", ["Let me see.", f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, f"{CALL}\n{CALL}", [f"get_weather{PARIS}", f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, f"a {CALL} b {CALL} c", ["a", f"get_weather{PARIS}", " b", f"get_weather{PARIS}", " c", "[tool_calls]"]),
    (HERMES, "no call < here <tool_cal", ["no call < here <tool_cal", "[stop]"]),
    (HERMES, "trailing  \n", ["trailing  \n", "[stop]"]),
    (HERMES, CALL.removesuffix("</tool_call>"), [f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, CALL.removesuffix("ll>"), [f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, CALL.removesuffix("}\n</tool_call>"), [f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, CALL.removesuffix('s"}}\n</tool_call>'), ['get_weather{"city": "Pari…', "[tool_calls]"]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', ["now{}", "[tool_calls]"]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', ["now{}", "[tool_calls]"]),
    (HERMES, '<tool_call>{"arguments": {"a": [1, {}]}, "name": "add"}', ['add{"a": [1, {}]}', "[tool_calls]"]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', ['add{"a": 1}', "[tool_calls]"]),
    (HERMES, '<tool_call>{"id": [1], "name": "add", "parameters": {"s": "}\\"{</tool_call>"}}</tool_call>',
     ['add{"s": "}\\"{</tool_call>"}', "[tool_calls]"]),
    (HERMES, '<tool_call>{"name": "new", "arguments": {}}</tool_call>', ["new{}", "[tool_calls]"]),
    (HERMES, f"<tool_call>{CALL}", ["<tool_call>", f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, f"<tool_call>print(1)</tool_call> {CALL}",
     ["<tool_call>print(1)</tool_call>", f"get_weather{PARIS}", "[tool_calls]"]),
    (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
     ['<tool_call>{"name": 7, "arguments": {}}</tool_call>', "[stop]"]),
    (HERMES, '<tool_call>{"name": "a", "arguments": 1}', ['<tool_call>{"name": "a", "arguments": 1}', "[stop]"]),
    (HERMES, '<tool_call>{"name": "a"', ['<tool_call>{"name": "a"', "[stop]"]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', ["now{}", "}", "[tool_calls]"]),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}; more', ["now{}", "; more", "[tool_calls]"]),
    # llama3_json
    (LLAMA, '{"name": "now", "parameters": {}}', ["now{}", "[tool_calls]"]),
    (LLAMA, ' {"type": "function", "name": "add", "parameters": {"a": 1}} ', ['add{"a": 1}', "[tool_calls]"]),
    (LLAMA, '{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}',
     ["now{}", 'add{"a": 1}', "[tool_calls]"]),
    (LLAMA, '<|python_tag|>{"name": "now", "parameters": {}}', ["now{}", "[tool_calls]"]),
    (LLAMA, 'Well: <|python_tag|>{"name": "now", "arguments": {}}', ["Well:", "now{}", "[tool_calls]"]),
    (LLAMA, "<|python_tag|>print(1)", ["<|python_tag|>print(1)", "[stop]"]),
    (LLAMA, '{"name": "Ada", "parameters": {}}', ['{"name": "Ada", "parameters": {}}', "[stop]"]),
    (LLAMA, '{"name": "now", "age": 7}', ['{"name": "now", "age": 7}', "[stop]"]),
    (LLAMA, 'See {"name": "now", "parameters": {}}', ['See {"name": "now", "parameters": {}}', "[stop]"]),
    (LLAMA, '{"name": "now", "parameters": {}} and so on', ["now{}", " and so on", "[tool_calls]"]),
    # mistral
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]',
     [f"get_weather{PARIS}", "[tool_calls]"]),
    (MISTRAL, 'Yes. [TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}]',
     ["Yes.", "now{}", 'add{"a": 1}', "[tool_calls]"]),
    (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", [f"get_weather{PARIS}", "[tool_calls]"]),
    (MISTRAL, '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1}',
     ["now{}", 'add{"a": 1}', "[tool_calls]"]),
    (MISTRAL, '[TOOL_CALLS]add{"a": 1}', ['add{"a": 1}', "[tool_calls]"]),
    (MISTRAL, "[TOOL_CALLS] and other [markers]", ["[TOOL_CALLS] and other [markers]", "[stop]"]),
    (MISTRAL, "[TOOL_CALLS]now[WHAT]{}", ["[TOOL_CALLS]now[WHAT]{}", "[stop]"]),
    (MISTRAL, "[TOOL_CALLS] [1]", ["[TOOL_CALLS] [1]", "[stop]"]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}}, 5]', ["now{}", ", 5]", "[tool_calls]"]),
    # pythonic
    (PYTHONIC, '[get_weather(city="Paris")]', [f"get_weather{PARIS}", "[tool_calls]"]),
    (PYTHONIC, "[now(), add(a=1, b=[2, (3, 4)])]", ["now{}", 'add{"a": 1, "b": [2, [3, 4]]}', "[tool_calls]"]),
    (PYTHONIC, "[add(a='it, \\')', b={'x': None}, c=true, d=null, e=-1.5)] ok",
     ['add{"a": "it, \')", "b": {"x": null}, "c": true, "d": null, "e": -1.5}', " ok", "[tool_calls]"]),
    (PYTHONIC, "[add(a=b + 1, c=1e999)]", ['add{"a": "b + 1", "c": "1e999"}', "[tool_calls]"]),
    (PYTHONIC, "[add(a=1, 2)]", ['add{"a": 1}', " 2)]", "[tool_calls]"]),
    (PYTHONIC, "[add(1, 2)]", ["[add(1, 2)]", "[stop]"]),
    (PYTHONIC, "[1, 2, 3]", ["[1, 2, 3]", "[stop]"]),
    (PYTHONIC, "[other(a=1)]", ["[other(a=1)]", "[stop]"]),
    (PYTHONIC, "Sure: [now()]", ["Sure: [now()]", "[stop]"]),
    (PYTHONIC, '[add(a=1, b="cut o', ['add{"a": 1…', "[tool_calls]"]),
    # no format
    (None, CALL, [CALL, "[stop]"]),
]  # fmt: skip

REASONING: list[tuple[ToolFormat | None, bool, str, list[str]]] = [
    (None, False, "<think>\nA plan.\n</think>\n\nAn answer.", ["(A plan.)", "An answer.", "[stop]"]),
    (None, True, "A plan. </think>An answer.", ["(A plan.)", "An answer.", "[stop]"]),
    (None, False, "<think>\n\n</think>\n\nAn answer.", ["An answer.", "[stop]"]),
    (None, False, "An answer with <think> in it</think>", ["An answer with <think> in it</think>", "[stop]"]),
    (None, False, "<thin ice", ["<thin ice", "[stop]"]),
    (None, False, "<think>endless </thi", ["(endless </thi)", "[stop]"]),
    (None, True, "", ["[stop]"]),
    (None, False, "</think>\n    indented", ["</think>\n    indented", "[stop]"]),
    (None, True, "x</think>\n    indented", ["(x)", "    indented", "[stop]"]),
    (HERMES, False, f"<think>Shall I {CALL}?</think>\n\n{CALL}",
     [f"(Shall I {CALL}?)", f"get_weather{PARIS}", "[tool_calls]"]),
    (LLAMA, True, 'Yes.</think>\n{"name": "now", "parameters": {}}', ["(Yes.)", "now{}", "[tool_calls]"]),
    (PYTHONIC, False, "[now()]", ["now{}", "[tool_calls]"]),
]  # fmt: skip


def cuts(text: str) -> Iterator[list[str]]:
    """Whole, in single characters, in pieces of each size, and cut in two and three at every place."""
    for size in range(1, len(text) + 1):
        yield [text[start : start + size] for start in range(0, len(text), size)]
    for first, second in itertools.combinations(range(1, len(text)), 2):
        if (first * 31 + second) % 7 == 0 or second == first + 1:
            yield [text[:first], text[first:second], text[second:]]


@pytest.mark.parametrize(("tool_format", "text", "expected"), EXAMPLES)
def test_every_cut_of_an_answer_gives_the_same_parts(
    tool_format: ToolFormat | None, text: str, expected: list[str]
) -> None:
    whole = parse(tool_format, [text])
    assert shape(whole) == expected
    for pieces in cuts(text):
        assert parse(tool_format, pieces) == whole, pieces


@pytest.mark.parametrize(("tool_format", "starts", "text", "expected"), REASONING)
def test_reasoning_is_split_off(tool_format: ToolFormat | None, starts: bool, text: str, expected: list[str]) -> None:
    whole = parse(tool_format, [text], reasons=True, starts_in_reasoning=starts)
    assert shape(whole) == expected
    for pieces in cuts(text):
        assert parse(tool_format, pieces, reasons=True, starts_in_reasoning=starts) == whole, pieces


def test_the_beginning_of_reasoning_is_known_at_once() -> None:
    opened = parser(None, reasons=True)
    assert not opened.is_reasoning
    opened.push("<think>")
    assert opened.is_reasoning
    assert opened.push("a") == [ReasoningDelta("a")]
    opened.push("</think>")
    assert not opened.is_reasoning


def test_a_call_streams_its_name_first_and_then_its_arguments() -> None:
    opened = parser(HERMES)
    assert opened.push('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    assert opened.push('{"ci') == [ToolCallBegin(0, "call_0", "get_weather"), ToolCallArguments(0, '{"ci')]
    assert opened.push('ty": "Pa') == [ToolCallArguments(0, 'ty": "Pa')]
    assert opened.push('ris"}') == [ToolCallArguments(0, 'ris"}'), ToolCallEnd(0)]
    assert opened.finish("stop") == [Finish("tool_calls")]


def test_text_is_held_back_no_longer_than_it_may_be_a_marker() -> None:
    opened = parser(HERMES)
    assert opened.push("a <tool") == [TextDelta("a", 0)]
    assert opened.push("box") == [TextDelta(" <toolbox", 1)]


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL, Mistral(writes_args=True)])
def test_a_call_that_was_cut_off_ends_with_length(tool_format: ToolFormat) -> None:
    text = tool_format.write([("get_weather", {"city": "Paris", "days": 3})])
    opened = parser(tool_format)
    parts = opened.push(text[: text.index("Paris") + 3]) + opened.finish("length")
    assert parts[-1] == Finish("length")
    assert not any(isinstance(part, TextDelta | ToolCallEnd) for part in parts)


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL, PYTHONIC, Mistral(writes_args=True)])
def test_with_one_call_the_answer_ends_after_the_first(tool_format: ToolFormat) -> None:
    opened = parser(tool_format, one_call=True)
    parts = opened.push(tool_format.write([("now", {}), ("add", {"a": 1})]))
    assert opened.is_complete
    assert shape(parts + opened.finish("stop")) == ["now{}", "[tool_calls]"]


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL])
@pytest.mark.parametrize("before", ["", "Well. "])
def test_a_call_that_was_cut_off_before_its_name_is_no_text(tool_format: ToolFormat, before: str) -> None:
    cut = before + tool_format.write([("get_weather", {})]).partition("get")[0]
    opened = parser(tool_format)
    assert shape(opened.push(cut) + opened.finish("length")) == [*([before.strip()] if before else []), "[length]"]
    opened = parser(tool_format)
    said = "".join(part.text for part in opened.push(cut) + opened.finish("stop") if isinstance(part, TextDelta))
    assert said == cut, "a model that stops there by itself has meant something else"


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA, MISTRAL, Mistral(writes_args=True)])
def test_a_call_that_a_stop_string_cut_off_is_none_to_act_on(tool_format: ToolFormat) -> None:
    text = tool_format.write([("get_weather", {"city": "Paris", "days": 3})])
    opened = parser(tool_format)
    parts = opened.push(text[: text.index("Paris")]) + opened.finish("stop", "Paris")
    assert parts[-1] == Finish("stop", "Paris")
    assert not any(isinstance(part, TextDelta | ToolCallEnd) for part in parts)


def test_a_stop_string_after_a_whole_call_leaves_it_a_call() -> None:
    opened = parser(HERMES)
    opened.push(HERMES.write([("now", {})]) + "\nWell ")
    assert opened.finish("stop", "END")[-1] == Finish("tool_calls", "END")


def test_a_stop_string_is_told() -> None:
    assert parser(HERMES).finish("stop", "END") == [Finish("stop", "END")]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(TOOLS), st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), values, max_size=3)
        ),
        min_size=1,
        max_size=3,
    ),
    tool_format=st.sampled_from([HERMES, LLAMA, MISTRAL, PYTHONIC, Mistral(writes_args=True)]),
    size=st.integers(1, 40),
)
def test_what_a_format_writes_it_reads(
    calls: list[tuple[str, dict[str, object]]], tool_format: ToolFormat, size: int
) -> None:
    text = tool_format.write(calls)
    parts = parse(tool_format, [text[start : start + size] for start in range(0, len(text), size)])
    assert [part.name for part in parts if isinstance(part, ToolCallBegin)] == [name for name, _ in calls]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, ToolCallArguments)]
    assert arguments == [wanted for _, wanted in calls]
    assert sum(isinstance(part, ToolCallEnd) for part in parts) == len(calls)
    assert not any(isinstance(part, TextDelta) for part in parts)


@given(text=st.text(alphabet='<tool_cal>{}"name:rgumets, []()=\\/\n', max_size=60), size=st.integers(1, 60))
def test_anything_is_read_without_a_fault_and_no_text_is_lost_without_a_call(text: str, size: int) -> None:
    for tool_format in (HERMES, LLAMA, MISTRAL, PYTHONIC):
        parts = parse(tool_format, [text[start : start + size] for start in range(0, len(text), size)])
        if not any(isinstance(part, ToolCallBegin) for part in parts):
            assert "".join(part.text for part in parts if isinstance(part, TextDelta)) == text
