"""Grammars: what may follow is what the tokenizer's own bytes allow, and a hostile grammar is refused in time."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from kvd.errors import RequestError
from kvd.text import TextModel, grammar
from kvd.text.grammar import CallForm, CallForms, Grammar, GrammarCompiler, GrammarSpec, schema_text
from kvd.text.grammar_tokens import TokenizerForGrammars
from kvd.text.tokenizer import Tokenizer


def compiler_of(path: Path, *, num_logits: int | None = None, template_text: str = "") -> GrammarCompiler:
    tokenizer = Tokenizer(path, template_text=template_text)
    return GrammarCompiler(tokenizer, end_token_ids=[2], num_logits=num_logits or tokenizer.vocab_size)


def allowed_in(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1]


def babble(compiled: Grammar, seed: int, max_tokens: int = 400) -> list[int] | None:
    """Tokens at random among those allowed, up to the end token; None if it does not come."""
    chance, matcher, mask, ids = random.Random(seed), compiled.start(), compiled.first_mask, []
    while len(ids) < max_tokens:
        allowed = allowed_in(mask)
        assert allowed, matcher.error
        ids.append(chance.choice(allowed))
        if ids[-1] in compiled.end_token_ids:
            return ids
        matcher.accept(ids[-1])
        mask = matcher.mask()
        assert matcher.error is None
    return None


def shown(path: Path, ids: list[int]) -> str:
    """What a client gets to see."""
    model = TextModel(path, chat_template=None, adds_bos=False, bos_token_id=None, special_tokens={})
    output = model.open_output(continues_text=True)
    return output.push(ids[:-1]) + output.finish()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec("regex", r"(ab|é|日本| ){3,6}/\d{2}"), r"(ab|é|日本| ){3,6}/\d{2}"),
        (GrammarSpec("choice", ("yes", ' "no"\n', "né😀")), r'yes| "no"\n|né😀'),
        (GrammarSpec("lark", 'start: "<" word+ ">"\nword: /[a-z]{2}/ ","'), r"<([a-z]{2},)+>"),
        (GrammarSpec("json_schema", '{"enum": [[1, "a"], {}]}'), r'\[\s*1\s*,\s*"a"\s*\]|\{\s*\}'),
    ],
)  # fmt: skip
def test_the_text_that_clients_see_is_of_the_grammar(
    any_tokenizer: Path, spec: GrammarSpec, pattern: str, seed: int
) -> None:
    """For every family of tokenizer, leading spaces and characters of several tokens included."""
    ids = babble(compiler_of(any_tokenizer).compile(spec), seed)
    assert ids is not None
    assert re.fullmatch(pattern, shown(any_tokenizer, ids)), ids


@pytest.mark.parametrize(
    "text", ["", "a", " a", "the quick", "  x", "\n", "né日", "<|im_end|>", '{"name": "', "</s> [INST]"]
)
def test_forced_text_is_written_as_itself(any_tokenizer: Path, text: str) -> None:
    """Neither a leading space nor a control token comes in, however the tokenizer begins a text."""
    tokenizer = Tokenizer(any_tokenizer)
    tokens = TokenizerForGrammars(tokenizer, [2]).tokens
    ids = tokens.tokenize_str(text)
    assert b"".join(tokenizer.table.token_bytes[each] for each in ids) == text.encode()
    assert not set(ids) & set(tokenizer.control_ids.values())


def test_control_tokens_are_allowed_where_the_grammar_names_them(byte_level: Path) -> None:
    tokenizer = Tokenizer(byte_level, template_text="<think>")
    compiler = compiler_of(byte_level, template_text="<think>")
    free = compiler.compile(GrammarSpec("regex", r"(.|\n)*"))
    assert not {0, 1, *tokenizer.control_ids.values()} & {*allowed_in(free.first_mask)} - {2}
    form = CallForm("<|im_start|>call ", '{"type": "integer", "minimum": 1, "maximum": 3}', "<think>")
    calls = compiler.compile(GrammarSpec("tool_calls", CallForms((form,), separator="; ")))
    ids = babble(calls, 1)
    assert ids is not None
    start, think = tokenizer.control_ids["<|im_start|>"], tokenizer.control_ids["<think>"]
    assert ids[0] == start
    assert ids[-2] == think
    text = b"".join(tokenizer.table.token_bytes[each] for each in ids[:-1]).decode()
    assert re.fullmatch(r"<\|im_start\|>call [123]<think>(; <\|im_start\|>call [123]<think>)*", text)


def test_one_call_only_where_several_are_not_allowed(byte_level: Path) -> None:
    form = CallForm("[", '{"const": 1}', "]")
    one = compiler_of(byte_level).compile(
        GrammarSpec("tool_calls", CallForms((form,), separator="", is_parallel=False))
    )
    assert {shown(byte_level, babble(one, seed) or []) for seed in range(5)} == {"[1]"}
    forms = CallForms((form, CallForm("(", '{"const": 2}', ")")), opening="<", separator=",", closing=">")
    several = compiler_of(byte_level).compile(GrammarSpec("tool_calls", forms))
    texts = [shown(byte_level, babble(several, seed) or []) for seed in range(12)]
    assert all(re.fullmatch(r"<(\[1\]|\(2\))(,(\[1\]|\(2\)))*>", text) for text in texts)
    assert any("," in text for text in texts)


@pytest.mark.parametrize(("marker", "template_text"), [("</think>", "</think>"), ("</think>", ""), ("so:", "")])
def test_the_model_may_think_first(byte_level: Path, marker: str, template_text: str) -> None:
    """Up to a control token, an added token that is plain vocabulary, or any text."""
    tokenizer = Tokenizer(byte_level, template_text=template_text)
    spec = GrammarSpec("choice", ("yes", "no"), begins_after=marker)
    compiled = compiler_of(byte_level, template_text=template_text).compile(spec)
    matcher = compiled.start()
    for token_id in tokenizer.encode("I think that it is yes or so\n"):
        assert token_id in allowed_in(matcher.mask())
        matcher.accept(token_id)
    assert 2 not in allowed_in(matcher.mask())
    control = tokenizer.control_ids.get(marker)
    for token_id in [control] if control is not None else tokenizer.encode(marker):
        assert token_id in allowed_in(matcher.mask())
        matcher.accept(token_id)
    first = {tokenizer.table.token_bytes[each] for each in allowed_in(matcher.mask())}
    assert first
    assert first >= {b"y", b"n"}
    assert all(b"yes".startswith(data) or b"no".startswith(data) or data.strip() == b"" for data in first)


def test_the_end_comes_where_the_grammar_allows_it_and_nowhere_else(byte_level: Path) -> None:
    tokenizer = Tokenizer(byte_level)
    matcher = compiler_of(byte_level).compile(GrammarSpec("regex", "xy*")).start()
    assert 2 not in allowed_in(matcher.mask())
    matcher.accept(tokenizer.encode("x")[0])
    assert 2 in allowed_in(matcher.mask())
    matcher.accept(2)
    assert matcher.error is None


@pytest.mark.parametrize("num_logits", [500, 603, 640, 700])
def test_a_mask_has_a_bit_for_every_logit(byte_level: Path, num_logits: int) -> None:
    """Models have more logits than tokens, as a rule; what has no token is never allowed."""
    num_tokens = Tokenizer(byte_level).vocab_size
    assert 500 < num_tokens < 640
    compiled = compiler_of(byte_level, num_logits=num_logits).compile(GrammarSpec("regex", r"(.|\n)*"))
    for mask in (compiled.first_mask, compiled.start().mask()):
        assert len(mask) == -(-num_logits // 32) * 4
        assert max(allowed_in(mask)) < min(num_logits, num_tokens)


def test_a_token_that_is_not_allowed_is_an_error_and_not_a_crash(byte_level: Path) -> None:
    matcher = compiler_of(byte_level).compile(GrammarSpec("choice", ("yes",))).start()
    matcher.accept(Tokenizer(byte_level).encode("q")[0])
    assert matcher.error is not None
    assert "\n" not in matcher.error
    assert not allowed_in(matcher.mask())


DEEP = '{"type": "object", "properties": {"a": ' * 2000 + "{}" + "}}" * 2000


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("json_schema", '{"type": "unicorn"}'), "unicorn"),
        (GrammarSpec("json_schema", '{"not": {"type": "string"}}'), "not"),
        (GrammarSpec("json_schema", "false"), "not"),
        (GrammarSpec("json_schema", "[]"), "is an object"),
        (GrammarSpec("json_schema", "{"), "is no JSON"),
        (GrammarSpec("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (GrammarSpec("json_schema", '{"$ref": "#"}'), "no answer"),
        (GrammarSpec("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}'), "minimum"),
        (GrammarSpec("json_schema", '{"type": "string", "pattern": "(?=a)"}'), "look-around"),
        (GrammarSpec("json_schema", '{"oneOf": [{"minimum": 1}, {"maximum": 5}]}', strict=True), "oneOf"),
        (GrammarSpec("json_schema", DEEP), "recursion|nested"),
        (GrammarSpec("regex", "(a"), "unclosed group"),
        (GrammarSpec("regex", "(" * 5000 + ")" * 5000), "nested"),
        (GrammarSpec("regex", "a" * 2_000_000), "too large"),
        (GrammarSpec("lark", "start: nothing"), "nothing"),
        (GrammarSpec("lark", "start: start"), "no answer"),
        (GrammarSpec("lark", "start: <|nope|> "), "special token"),
        (GrammarSpec("choice", ()), "not empty"),
        (GrammarSpec("choice", ("a", "")), "not empty"),
        (GrammarSpec("tool_calls", CallForms((CallForm("f", '{"type": "unicorn"}', ""),))), "unicorn"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_in_one_line(byte_level: Path, spec: GrammarSpec, reason: str) -> None:
    named = GrammarSpec(spec.kind, spec.source, strict=spec.strict, param="a.field")
    with pytest.raises(RequestError, match=reason) as caught:
        compiler_of(byte_level).compile(named)
    assert (caught.value.status, caught.value.param) == (400, "a.field")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_schema_that_is_too_large_is_refused_before_it_costs_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_SOURCE_CHARACTERS", 20)
    assert schema_text({"const": "1234567"}, param="tools") == '{"const": "1234567"}'
    with pytest.raises(RequestError, match="too large") as caught:
        schema_text({"const": "x" * 20}, param="tools")
    assert (caught.value.status, caught.value.param) == (400, "tools")


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(100_000):
        schema = {"a": schema}
    try:
        with pytest.raises(RequestError, match="nested too deeply"):
            schema_text(schema, param="tools")
    finally:
        while schema:  # or the interpreter would recurse to free it
            schema = schema["a"]  # type: ignore[assignment]


def test_keywords_that_no_grammar_expresses(byte_level: Path) -> None:
    """Refused in a schema for the answer, left to the model in the parameters of a tool."""
    schema = '{"type": "object", "properties": {}, "propertyNames": {"minLength": 2}, "if": {}}'
    compiler = compiler_of(byte_level)
    with pytest.raises(RequestError, match="if"):
        compiler.compile(GrammarSpec("json_schema", schema))
    compiler.compile(GrammarSpec("json_schema", schema, lenient=True))


def test_compiled_grammars_are_kept_and_the_oldest_go(byte_level: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED_GRAMMARS", 2)
    compiler = compiler_of(byte_level)
    specs = [GrammarSpec("choice", (text,)) for text in "abc"]
    first, second = compiler.compile(specs[0]), compiler.compile(specs[1])
    assert compiler.compile(GrammarSpec("choice", ("a",), param="another field")) is first
    compiler.compile(specs[2])
    assert compiler.compile(specs[0]) is first
    assert compiler.compile(specs[1]) is not second


def test_a_model_without_end_tokens_is_held_to_no_grammar(byte_level: Path) -> None:
    compiler = GrammarCompiler(Tokenizer(byte_level), end_token_ids=[], num_logits=604)
    with pytest.raises(RequestError, match="no end token"):
        compiler.compile(GrammarSpec("json_object"))


def test_blanks_between_the_parts_of_json_are_bounded(byte_level: Path) -> None:
    """Or a model that likes blanks would spend all its tokens on them."""
    tokenizer = Tokenizer(byte_level)
    matcher = compiler_of(byte_level).compile(GrammarSpec("json_schema", json.dumps({"type": "array"}))).start()
    (bracket,), (space,) = tokenizer.encode("["), tokenizer.encode(" ")
    matcher.accept(bracket)
    num_blanks = 0
    while space in allowed_in(matcher.mask()):
        matcher.accept(space)
        num_blanks += 1
    assert 8 < num_blanks < 60
    assert matcher.error is None
    assert allowed_in(matcher.mask())


def test_thousands_of_choices_can_be_followed(byte_level: Path) -> None:
    texts = tuple(f"choice {number}" for number in range(5000))
    compiled = compiler_of(byte_level).compile(GrammarSpec("choice", texts))
    ids = babble(compiled, seed=1)
    assert ids is not None
    assert shown(byte_level, ids) in texts
