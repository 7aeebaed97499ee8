"""Answers that are held to a grammar: they parse, whatever happens to the request on the way."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvd.core import FinishReason, Request, SamplingParams
from kvd.engine import grammar_masks
from kvd.engine.grammar_masks import GrammarMasks, GrammarRun
from kvd.model.decoder import Decoder
from kvd.model.files import ModelFiles
from kvd.text.grammar import CallForm, CallForms, Grammar, GrammarCompiler, GrammarSpec
from kvd.text.tokenizer import Tokenizer
from tests.engine.harness import Harness, tokens_of
from tests.engine.small_models import random_tokens, small_decoder
from tests.engine.test_steps_ahead import drive, late, unobserved
from tests.model.checkpoints import tiny_tokenizer_json

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
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


SET_CALL = CallForm('<tool_call>\n{"name": "set", "arguments": ', json.dumps(FLAT), "}\n</tool_call>")
ONE_OR_TWO = '{"oneOf": [{"const": "one"}, {"const": "two"}]}'
SUM = 'start: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[0-9]{1,3}/'

CASES: dict[str, tuple[GrammarSpec, Callable[[str], bool]]] = {
    "strict schema": (GrammarSpec("json_schema", json.dumps(PERSON), strict=True), is_person),
    "schema": (GrammarSpec("json_schema", ONE_OR_TWO), lambda text: json.loads(text) in ("one", "two")),
    "regex": (GrammarSpec("regex", r"\d{3}-[a-f]{2,4}"), lambda text: bool(re.fullmatch(r"\d{3}-[a-f]{2,4}", text))),
    "choice": (GrammarSpec("choice", ("yes, sir", "no", "né")), lambda text: text in ("yes, sir", "no", "né")),
    "lark": (GrammarSpec("lark", SUM), lambda text: bool(re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text))),
    "tool call": (GrammarSpec("tool_calls", CallForms((SET_CALL,), is_parallel=False)), is_call),
}


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


# --------------------------------------------------------------------------- a small random model, which babbles


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return small_decoder(tmp_path_factory.mktemp("grammar"), "cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tiny") / "tokenizer.json"
    path.write_text(tiny_tokenizer_json())
    return Tokenizer(path)


@pytest.fixture(scope="module")
def tiny_compiler(tiny: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny, end_token_ids=[2], num_logits=320)


LETTERS = GrammarSpec("regex", "[a-z ]{30,40}")


def small_requests(compiler: GrammarCompiler, number: int = 5) -> list[Request]:
    """Held to grammars of several kinds and to none, greedy and seeded, with penalties and min_tokens."""
    person = compiler.compile(GrammarSpec("json_schema", json.dumps(PERSON)))
    letters = compiler.compile(LETTERS)
    end = frozenset((2,))
    params: list[tuple[Grammar | None, SamplingParams]] = [
        (letters, SamplingParams(max_tokens=60, temperature=0.0, stop_token_ids=end)),
        (person, SamplingParams(max_tokens=60, temperature=1.0, seed=3, stop_token_ids=end)),
        (None, SamplingParams(max_tokens=50, temperature=1.0, seed=4)),
        (letters, SamplingParams(max_tokens=60, temperature=1.0, seed=5, stop_token_ids=end, frequency_penalty=0.5)),
        (letters, SamplingParams(max_tokens=30, temperature=1.0, seed=6, stop_token_ids=end, min_tokens=28)),
    ]
    return [
        Request(f"r{i}", tuple(random_tokens(20 + i, 9 + 5 * i)), each, arrival_time=0.0, grammar=grammar)
        for i, (grammar, each) in enumerate(params[:number])
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "small chunks": {"chunk": 24},
    "few blocks": {"num_blocks": 12, "max_seqs": 4},
}


@pytest.mark.parametrize("ahead", [False, True], ids=["one step", "a step ahead"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_preemption_and_steps_in_flight_change_no_token(
    small: Decoder, tiny_compiler: GrammarCompiler, options: dict[str, Any], ahead: bool
) -> None:
    expected = drive(unobserved(small), small_requests(tiny_compiler))
    harness = unobserved(late(small) if ahead else small, **options)
    assert drive(harness, small_requests(tiny_compiler)) == expected
    assert ("num_blocks" in options) == (harness.counters.num_preemptions > 0)


def test_a_stale_mask_would_be_found(
    small: Decoder, tiny_compiler: GrammarCompiler, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault of the test above: a launch that does not wait for the mask of its token."""

    def accept_without_mask(self: GrammarMasks, run: GrammarRun, token_id: int) -> None:
        pass

    request = small_requests(tiny_compiler, 1)
    (expected,) = drive(unobserved(small), request).values()
    monkeypatch.setattr(GrammarMasks, "accept", accept_without_mask)
    (ids,) = drive(unobserved(small), request).values()
    assert ids != expected
    text = b"".join(tiny.table.visible_bytes(token_id or 0) for token_id in expected)
    assert re.fullmatch(rb"[a-z ]{30,40}", text)


def run_one(small: Decoder, tiny: Tokenizer, grammar: Grammar, **sampling: Any) -> tuple[bytes, FinishReason | None]:
    params: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0, "seed": 1, **sampling}
    request = Request("a", tuple(random_tokens(1, 9)), SamplingParams(**params), 0.0, grammar=grammar)
    events = Harness(small).run([request])["a"]
    assert events[-1].error is None
    text = b"".join(tiny.table.visible_bytes(token_id) for token_id in tokens_of(events))
    return text, events[-1].finish_reason


END = frozenset((2,))


def test_a_complete_grammar_ends_also_those_who_ignore_end_tokens(
    small: Decoder, tiny: Tokenizer, tiny_compiler: GrammarCompiler
) -> None:
    """They go on while the grammar lets them, and so do those who want more tokens."""
    grammar = tiny_compiler.compile(GrammarSpec("regex", "(ab){0,9}"))
    freely = [run_one(small, tiny, grammar, stop_token_ids=END, seed=seed)[0] for seed in range(4)]
    assert min(map(len, freely)) < 18, "the model never ends by itself: the test shows nothing"
    assert run_one(small, tiny, grammar) == (b"ab" * 9, "stop")
    assert run_one(small, tiny, grammar, stop_token_ids=END, min_tokens=79) == (b"ab" * 9, "stop")
    forced = tiny_compiler.compile(GrammarSpec("choice", ("x",)))
    assert run_one(small, tiny, forced, stop_token_ids=END, min_tokens=79) == (b"x", "stop")
    assert run_one(small, tiny, forced, stop_token_ids=END, logit_bias=((2, -100.0),)) == (b"x", "stop")
    # A stop token of the client's own, which the grammar wants at once.
    x = tiny.encode("x")[0]
    assert run_one(small, tiny, forced, stop_token_ids=frozenset((x,)), min_tokens=5) == (b"x", "stop")


def test_length_cuts_an_answer_off(small: Decoder, tiny: Tokenizer, tiny_compiler: GrammarCompiler) -> None:
    grammar = tiny_compiler.compile(GrammarSpec("regex", "(ab){9}"))
    text, reason = run_one(small, tiny, grammar, stop_token_ids=END, max_tokens=3)
    assert reason == "length"
    assert (b"ab" * 9).startswith(text)


def test_logprobs_are_of_the_model_and_not_of_the_grammar(small: Decoder, tiny_compiler: GrammarCompiler) -> None:
    grammar = tiny_compiler.compile(GrammarSpec("choice", ("x",)))
    params = SamplingParams(max_tokens=5, temperature=0.0, stop_token_ids=END, num_logprobs=3)
    request = Request("a", tuple(random_tokens(1, 9)), params, 0.0)
    free, held = (Harness(small).run([each])["a"][0].logprobs for each in (request, replace(request, grammar=grammar)))
    assert free is not None
    assert held is not None
    assert held.top == free.top
    assert held.token_logprob < free.token_logprob


def test_a_neighbour_without_a_grammar_is_not_touched(small: Decoder, tiny_compiler: GrammarCompiler) -> None:
    requests = small_requests(tiny_compiler)
    alone = drive(unobserved(small), [requests[2]])["r2"]
    assert drive(unobserved(small), requests)["r2"] == alone


# --------------------------------------------------------------------------- grammars that take long, or fail


class SlowMatcher:
    """Allows everything, once the gate is open; `fails` after the first token."""

    def __init__(self, grammar: SlowGrammar) -> None:
        self.error: str | None = None
        self._grammar = grammar

    def accept(self, token_id: int) -> None:
        if self._grammar.fails == "panic":
            raise BaseException("a panic")
        if self._grammar.fails:
            self.error = self._grammar.fails

    def mask(self) -> bytes:
        assert self._grammar.gate.wait(30)
        return b"\xff" * 40


class SlowGrammar:
    end_token_ids = frozenset((2,))
    first_mask = b"\xff" * 40

    def __init__(self, fails: str = "") -> None:
        self.gate = threading.Event()
        self.fails = fails

    def start(self) -> SlowMatcher:
        return SlowMatcher(self)


@pytest.fixture
def slow() -> Iterator[SlowGrammar]:
    grammar = SlowGrammar()
    yield grammar
    grammar.gate.set()


@pytest.mark.parametrize("ahead", [False, True], ids=["one step", "a step ahead"])
def test_a_slow_grammar_holds_up_nobody_but_itself(small: Decoder, slow: SlowGrammar, ahead: bool) -> None:
    harness = unobserved(late(small) if ahead else small)
    runner, scheduler = harness.runner, harness.scheduler
    params = SamplingParams(max_tokens=20, temperature=0.0)
    for name, grammar in (("slow", slow), ("quick", None)):
        scheduler.add(Request(name, tuple(random_tokens(3, 9)), params, 0.0, grammar=grammar))
    answers: dict[str, list[int | None]] = {"slow": [], "quick": []}
    was_left_out = False
    while scheduler.has_work:
        harness.now += 1.0
        unready = runner.unready_requests()
        was_left_out |= "slow" in unready
        plan = scheduler.plan(unready)
        if plan is not None:
            runner.launch(plan)
        if plan is None and not runner.num_in_flight:
            assert unready == {"slow"}
            if not slow.gate.is_set():
                assert {name: len(ids) for name, ids in answers.items()} == {"quick": 20, "slow": 1}
                slow.gate.set()
            runner.await_ready(30.0)
            continue
        if runner.num_in_flight > (runner.steps_ahead if plan is not None else 0):
            for event in scheduler.commit(*runner.land()):
                answers[event.request_id].append(event.token_id)
    assert was_left_out
    assert len(answers["slow"]) == 20
    assert answers["slow"] == answers["quick"], "both have the same prompt, and every token is allowed"
    runner.close()


@pytest.mark.parametrize("fails", ["it grows too large", "panic"])
def test_a_grammar_that_fails_ends_its_own_request_alone(small: Decoder, slow: SlowGrammar, fails: str) -> None:
    slow.fails = fails
    slow.gate.set()
    params = SamplingParams(max_tokens=6, temperature=0.0)
    requests = [Request(name, tuple(random_tokens(3, 9)), params, 0.0) for name in ("bad", "good")]
    events = Harness(small).run([replace(requests[0], grammar=slow), requests[1]])
    assert events["bad"][-1].finish_reason == "refused"
    assert fails in (events["bad"][-1].error or "")
    assert len(tokens_of(events["bad"])) == 1
    assert len(tokens_of(events["good"])) == 6


def test_the_workers_end_with_the_runner(small: Decoder, slow: SlowGrammar) -> None:
    slow.gate.set()
    harness = Harness(small)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    harness.run([Request("a", tuple(random_tokens(3, 9)), params, 0.0, grammar=slow)])
    threads = [*harness.runner._grammars._threads]
    assert len(threads) == grammar_masks.NUM_WORKERS
    harness.runner.close()
    assert not any(thread.is_alive() for thread in threads)
