"""Answers that are held to a grammar: they parse, whatever happens to the request on the way."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.core import FinishReason, Request, SamplingParams
from kvd.engine import grammar_masks
from kvd.engine.grammar_masks import GrammarMasks, GrammarRun
from kvd.model.decoder import Decoder
from kvd.model.files import ModelFiles
from kvd.text.grammar import CallForm, CallForms, Grammar, GrammarCompiler, GrammarSpec
from kvd.text.tokenizer import Tokenizer
from tests.engine.harness import Harness, tokens_of
from tests.engine.small_models import small_decoder
from tests.engine.test_steps_ahead import drive, late, unobserved

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FLAT = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer(default_model_files: ModelFiles) -> Tokenizer:
    return Tokenizer(default_model_files.tokenizer_json)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, end_token_ids=[0, 2], num_logits=tokenizer.vocab_size)


def held_to(
    grammar: Any, tokenizer: Tokenizer, text: str = "Answer in JSON:", name: str = "a", **sampling: Any
) -> Request:
    params: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "stop_token_ids": frozenset((0, 2)), **sampling}
    return Request(name, tuple(tokenizer.encode(text)), SamplingParams(**params), 0.0, grammar=grammar)


def answer(
    harness: Harness, tokenizer: Tokenizer, request: Request, neighbours: tuple[Request, ...] = ()
) -> tuple[str, FinishReason | None]:
    events = harness.run([request, *neighbours])[request.request_id]
    assert events[-1].error is None
    ids = tokens_of(events)
    if events[-1].finish_reason == "stop":
        assert ids[-1] in (0, 2)
    text = b"".join(tokenizer.table.visible_bytes(token_id) for token_id in ids).decode()
    return text, events[-1].finish_reason


def is_call(text: str) -> bool:
    found = re.fullmatch(r'<tool_call>\n\{"name": "set", "arguments": (.*)\}\n</tool_call>', text, re.DOTALL)
    return found is not None and isinstance(json.loads(found[1])["ok"], bool)


def is_person(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"name", "age"} and isinstance(value["name"], str) and 0 <= value["age"] <= 150


CASES: dict[str, tuple[GrammarSpec, Callable[[str], bool]]] = {
    "strict schema": (GrammarSpec("json_schema", json.dumps(PERSON), strict=True), is_person),
    "schema": (GrammarSpec("json_schema", '{"oneOf": [{"const": "one"}, {"const": "two"}]}'), lambda text: json.loads(text) in ("one", "two")),
    "regex": (GrammarSpec("regex", r"\d{3}-[a-f]{2,4}"), lambda text: bool(re.fullmatch(r"\d{3}-[a-f]{2,4}", text))),
    "choice": (GrammarSpec("choice", ("yes, certainly", "no", "né")), lambda text: text in ("yes, certainly", "no", "né")),
    "lark": (GrammarSpec("lark", 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'), lambda text: bool(re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text))),
    "tool call": (
        GrammarSpec("tool_calls", CallForms((CallForm('<tool_call>\n{"name": "set", "arguments": ', json.dumps(FLAT), "}\n</tool_call>"),), is_parallel=False)),
        is_call,
    ),
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("case", CASES)
def test_what_the_default_model_answers_is_of_the_grammar(
    default_decoder: Decoder, tokenizer: Tokenizer, compiler: GrammarCompiler, case: str, temperature: float
) -> None:
    spec, fits = CASES[case]
    request = held_to(compiler.compile(spec), tokenizer, temperature=temperature, seed=5)
    text, reason = answer(Harness(default_decoder), tokenizer, request)
    assert reason == "stop", text
    assert fits(text), text


def test_any_json_object(default_decoder: Decoder, tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """The model decides when it is complete; until then it is the beginning of one."""
    request = held_to(compiler.compile(GrammarSpec("json_object")), tokenizer, "A person as a JSON object:")
    text, reason = answer(Harness(default_decoder), tokenizer, request)
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)
