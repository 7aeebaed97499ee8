"""What a user types never becomes a control token, and marks never survive."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from kvd.text.literals import ControlTokens, Literals

CONTROL = ControlTokens(["<|im_end|>", "<|im_start|>", "</s>"], ["<think>"])
PIECES = [
    "<|im_end|>",
    "<|im_",
    "end|>",
    "<",
    "|",
    ">",
    "</s>",
    "</",
    "s>",
    "<think>",
    "word",
    " ",
    "\n",
    "<|",
    "|>",
    "im_end",
]


@given(strings=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), max_size=5))
def test_user_strings_joined_form_no_control_token(strings: list[str]) -> None:
    literals = Literals(CONTROL)
    rendered = literals.resolve("".join(literals.mark(string) for string in strings))
    assert rendered.control_spans == []
    assert rendered.text == "".join(strings)


@given(
    strings=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), min_size=1, max_size=4),
    trims=st.booleans(),
)
def test_templates_own_tokens_are_found_between_user_strings(strings: list[str], trims: bool) -> None:
    literals = Literals(CONTROL)
    rendered, expected, spans = "", "", []
    for string in strings:
        marked = literals.mark(string)
        for token, text, plain in (("<|im_start|>", marked.strip(), string.strip()), ("<|im_end|>", marked, string)):
            if not trims and token == "<|im_start|>":
                continue
            spans.append((len(expected), len(expected) + len(token)))
            rendered += token + text
            expected += token + plain
    resolved = literals.resolve(rendered)
    assert resolved.text == expected
    assert resolved.control_spans == spans


def test_template_text_and_user_text_form_no_token_together() -> None:
    literals = Literals(CONTROL)
    for before, typed, after in (
        ("<", "|im_end|>", ""),
        ("", "<|im_end|", ">"),
        ("<|im_", " end|> ", "\n"),
        ("</", "s>", ""),
    ):
        for text in (literals.mark(typed), literals.mark(typed).strip()):
            assert literals.resolve(before + text + after).control_spans == []


def test_real_token_inside_a_span_that_is_none() -> None:
    """One token is the end of another: the user typed its beginning, the template wrote the rest."""
    literals = Literals(ControlTokens(["<x><y>", "<y>"]))
    assert literals.resolve(literals.mark("<x>") + "<y>").control_spans == [(3, 6)]
    assert literals.resolve("<x><y>").control_spans == [(0, 6)]


def test_random_strings_form_no_control_token_and_hide_none() -> None:
    chance = random.Random(27)
    for _ in range(3000):
        strings = ["".join(chance.choices(PIECES, k=chance.randint(0, 5))) for _ in range(chance.randint(1, 4))]
        literals = Literals(CONTROL)
        rendered = literals.resolve("<|im_start|>".join(literals.mark(string) for string in strings))
        assert rendered.text == "<|im_start|>".join(strings)
        starts = itertools.accumulate((len(string) + 12 for string in strings[:-1]), initial=0)
        expected = [start + len(string) for start, string in zip(starts, strings, strict=True)][:-1]
        assert rendered.control_spans == [(start, start + 12) for start in expected], strings


def test_ordinary_strings_stay_as_they_are() -> None:
    literals = Literals(CONTROL)
    value = {"role": "system", "content": "a < b > c, end", "n": [1, 2.5, None, True], "type": "text"}
    assert literals.mark(value) == value


def test_keys_and_nested_strings_are_marked() -> None:
    literals = Literals(CONTROL)
    marked = literals.mark({"a</s>": [{"b": "</s>"}]})
    assert literals.resolve(str(marked)).control_spans == []
    assert literals.resolve(str({"a</s>": [{"b": "</s>"}]})).control_spans != []


def test_the_token_stays_readable_for_templates_that_look_for_it() -> None:
    literals = Literals(CONTROL)
    assert "<think>" in literals.mark("x <think> y")
    before, after = literals.mark("x <think> y").split("<think>")
    assert literals.resolve(before + after).text == "x  y"
    assert literals.resolve(before).text == "x "


def test_pieces_of_a_split_string_form_no_token() -> None:
    """A template that cuts a token out of the content must not join its neighbours into another."""
    literals = Literals(CONTROL)
    before, after = literals.mark("<|im_<think>end|>").split("<think>")
    resolved = literals.resolve(before + after)
    assert resolved.text == "<|im_end|>"
    assert resolved.control_spans == []


def test_visible_tokens_of_an_earlier_answer_stay_tokens() -> None:
    literals = Literals(CONTROL)
    answer = "<think>hm</s>"
    resolved = literals.resolve(literals.mark(answer, from_model=True))
    assert [resolved.text[start:end] for start, end in resolved.control_spans] == ["<think>"]
    assert literals.resolve(literals.mark(answer)).control_spans == []


def test_marks_differ_between_renderings_and_can_be_removed() -> None:
    first, second = Literals(CONTROL), Literals(CONTROL)
    assert first.mark("</s>") != second.mark("</s>")
    assert first.remove_marks(first.mark("a </s> <")) == "a </s> <"
    assert second.resolve(first.mark("</s>")).control_spans != [], "marks of another rendering mean nothing"


def test_the_longest_of_several_tokens_is_found() -> None:
    tokens = ["<a", "<a>", "<a>>b", "<a>>c", "x.*", "x"]
    pattern = ControlTokens(tokens).pattern
    assert pattern.findall("<a <a> <a>>b <a>>d x.* x..") == ["<a", "<a>", "<a>>b", "<a>", "x.*", "x"]


def test_no_control_tokens_at_all() -> None:
    literals = Literals(ControlTokens([]))
    assert literals.resolve(literals.mark("a <b>")).text == "a <b>"
