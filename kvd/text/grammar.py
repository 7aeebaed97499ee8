"""Grammars that an answer is held to: from what a request asks for to a set of allowed tokens per step.

Purpose: the engine samples only tokens after which the text can still become a sentence of the grammar (llguidance
does the parsing), so that even a small model answers with what was asked for.
Owner: `GrammarCompiler` is made at start-up and may be used by several worker threads at once; compiling takes up to a
quarter of a second, so never on the event loop. A `Matcher` belongs to one request and to one thread at a time.
Invariant: the bytes that a grammar speaks of are those that the detokenizer makes of the same tokens, with the leading
space that a sentencepiece model's first word carries: open the output with `continues_text`. Control tokens are no
text to a grammar: none is allowed but where the grammar names it, and end tokens only where the answer may end.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import llguidance
import msgspec

from kvd.errors import RequestError
from kvd.text.grammar_tokens import TokenizerForGrammars
from kvd.text.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 1_000_000
MAX_CACHED_GRAMMARS = 32
MAX_CALLS = 16
"""Tool calls of one answer. Without a bound a small model goes on calling until its tokens are spent."""
MAX_COMPILING = 2
"""More would take the processor away from the engine."""

_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,  # 1 to 2 kB each, shared by all requests that use the grammar
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""What a hostile grammar can cost; measured in docs/measurements.md."""

_WHITESPACE = r"[ \t\n\r]{1,40}"
"""Between the parts of a JSON text. Without a bound a small model may go on with blanks until its tokens are spent."""
_MAX_ERROR_CHARACTERS = 200

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "tool_calls"]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How one tool is called: a beginning, JSON that fits the schema (itself JSON text), an end.

    Control tokens of the vocabulary that stand in `begin` and `end` are written as those tokens.
    """

    begin: str
    schema: str
    end: str


@dataclass(frozen=True, slots=True)
class CallForms:
    """What an answer that consists of tool calls looks like: opening, call, (separator, call)*, closing."""

    calls: tuple[CallForm, ...]
    opening: str = ""
    separator: str = "\n"
    closing: str = ""
    is_parallel: bool = True  # several calls are allowed, up to MAX_CALLS


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a request asks for.

    kind          json_object: any JSON object. json_schema: JSON that fits a schema. regex: the whole answer matches,
                  where `\\d` is 0-9. choice: one of some texts. lark: a grammar in llguidance's Lark dialect.
                  tool_calls: tool calls.
    source        the schema as JSON text, the expression, the texts, the grammar or the forms; "" for json_object
    strict        for JSON schemas: `oneOf` is refused instead of taken for `anyOf`
    lenient       for JSON schemas: what a grammar cannot express is left to the model instead of refused
    begins_after  the text, such as `</think>`, up to which the model may write what it likes first; None: nothing
    opens_with    the text, such as `<think>`, with which such a beginning opens; it may then be left out altogether
    alternative   what the answer may be as well
    param         the field of the request body that errors name
    """

    kind: GrammarKind
    source: str | tuple[str, ...] | CallForms = ""
    strict: bool = False
    lenient: bool = False
    begins_after: str | None = None
    opens_with: str | None = None
    alternative: GrammarSpec | None = None
    param: str = field(default="response_format", compare=False)


def schema_text(schema: Mapping[str, Any] | bool, *, param: str) -> str:
    """A parsed JSON schema as the text that a `GrammarSpec` or `CallForm` takes. Raises RequestError."""
    try:
        # Measured first: this is the fast way to write JSON, and a huge schema would hold up the event loop.
        if len(msgspec.json.encode(schema)) <= MAX_SOURCE_CHARACTERS:
            return json.dumps(schema, ensure_ascii=False)
    except (RecursionError, ValueError, TypeError) as error:
        raise RequestError("the JSON schema is nested too deeply or is no JSON", param=param) from error
    raise RequestError("the JSON schema is too large", param=param)


class GrammarCompiler:
    """Compiles grammars for one model, and keeps those that were used last. Any thread.

    end_token_ids: with any of these an answer ends. num_logits: how many tokens sampling chooses from.
    """

    def __init__(self, tokenizer: Tokenizer, *, end_token_ids: Iterable[int], num_logits: int) -> None:
        self._tokenizer = tokenizer
        self._num_logits = num_logits
        self._end_token_ids = frozenset(each for each in end_token_ids if each < tokenizer.vocab_size)
        self._vocabulary: TokenizerForGrammars | None = None
        self._lock = threading.Lock()
        self._compiling = threading.Semaphore(MAX_COMPILING)
        self._compiled: OrderedDict[GrammarSpec, Grammar] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError (400, naming `spec.param`) for a grammar that is wrong, unsupported or too large."""
        with self._lock:
            known = self._compiled.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
                return known
        with self._compiling:
            grammar = self._compile(spec)
        with self._lock:
            self._compiled[spec] = grammar
            while len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return grammar

    def _compile(self, spec: GrammarSpec) -> Grammar:
        if not self._end_token_ids:
            raise RequestError("this model has no end token, so no answer can be held to a grammar", param=spec.param)
        vocabulary = self._open_vocabulary()
        source = json.dumps({"grammars": _grammars(spec, vocabulary)})
        matcher = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=_LIMITS)
        first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{_NAMES[spec.kind]} cannot be used: {_reason(matcher)}", param=spec.param)
        return Grammar(matcher, first_mask, self._end_token_ids, self._num_logits)

    def _open_vocabulary(self) -> TokenizerForGrammars:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = TokenizerForGrammars(self._tokenizer, self._end_token_ids)
            return self._vocabulary


class Grammar:
    """A compiled grammar; implements `core.Grammar`. Read-only, any thread.

    Requests share what its lexer has learnt.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, first_mask: bytes, end_token_ids: frozenset[int], num_logits: int
    ) -> None:
        self.end_token_ids = end_token_ids
        self.first_mask = _fitted(first_mask, num_logits)
        self._matcher = matcher
        self._num_logits = num_logits

    def start(self) -> Matcher:
        """A matcher at the beginning."""
        return Matcher(self._matcher.deep_copy(), self.end_token_ids, self._num_logits)


class Matcher:
    """Where one answer stands in its grammar; implements `core.GrammarMatcher`. Lets other threads run meanwhile.

    error  why nothing more can be said about what may follow, such as a limit that was reached; None: all is well
    """

    def __init__(self, matcher: llguidance.LLMatcher, end_token_ids: frozenset[int], num_logits: int) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._num_logits = num_logits

    def accept(self, token_id: int) -> None:
        """The token that was sampled. After an end token the place no longer changes."""
        if self.error is None and token_id not in self._end_token_ids:
            self._matcher.consume_token(token_id)
            self._note_error()

    def mask(self) -> bytes:
        """A bit per token, int32 words of [⌈num_logits / 32⌉], 1: allowed. None is allowed after an error."""
        mask = b"" if self.error is not None else self._matcher.compute_bitmask()
        self._note_error()
        return _fitted(b"" if self.error is not None else mask, self._num_logits)

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = f"the grammar cannot be followed any further: {_reason(self._matcher)}"


# --------------------------------------------------------------------------- from a spec to llguidance's grammars

_NAMES: dict[GrammarKind, str] = {
    "json_object": "the JSON grammar",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "lark": "the grammar",
    "tool_calls": "the parameters of the tools",
}


def _grammars(spec: GrammarSpec, vocabulary: TokenizerForGrammars) -> list[dict[str, Any]]:
    """The first of these is where an answer begins; others are called by name."""
    grammars = _answer(spec, vocabulary)
    if spec.alternative is not None:
        others = _answer(spec.alternative, vocabulary)
        grammars[0]["name"], others[0]["name"] = "first", "second"
        grammars = [{"lark_grammar": "start: @first | @second"}, *grammars, *others]
    if sum(len(json.dumps(each)) for each in grammars) > MAX_SOURCE_CHARACTERS:
        raise RequestError(f"{_NAMES[spec.kind]} is too large", param=spec.param)
    if spec.begins_after is None:
        return grammars
    grammars[0]["name"] = "answer"
    before = "before" if spec.opens_with is None else f"({vocabulary.literal(spec.opens_with)} before)?"
    if vocabulary.is_control(spec.begins_after):
        rule = f"before: /(.|\\n)*/ {vocabulary.literal(spec.begins_after)} blank"
    else:
        rule = f"before: thought blank\nthought[suffix={json.dumps(spec.begins_after)}]: /(.|\\n)*/"
    head = f'start: {before} @answer\n{rule}\nblank: "\\n"{{0,2}}\n'
    return [{"lark_grammar": head}, *grammars]


def _answer(spec: GrammarSpec, vocabulary: TokenizerForGrammars) -> list[dict[str, Any]]:
    source = spec.source
    match spec.kind:
        case "json_object":
            return [{"json_schema": _schema('{"type": "object"}', spec)}]
        case "json_schema":
            assert isinstance(source, str)
            return [{"json_schema": _schema(source, spec)}]
        case "regex":
            assert isinstance(source, str)
            return [{"lark_grammar": f"start: /{llguidance.regex_to_lark(source, 'd')}/"}]
        case "choice":
            assert isinstance(source, tuple)
            if not source or "" in source:
                raise RequestError("a choice needs texts that are not empty", param=spec.param)
            # A terminal: the lexer takes thousands of texts, of rules the parser takes only so many side by side.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in source)
            return [{"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}]
        case "lark":
            assert isinstance(source, str)
            return [{"lark_grammar": source}]
        case "tool_calls":
            assert isinstance(source, CallForms)
            return _calls(source, spec, vocabulary)


def _calls(forms: CallForms, spec: GrammarSpec, vocabulary: TokenizerForGrammars) -> list[dict[str, Any]]:
    calls, schemas = [], []
    for index, form in enumerate(forms.calls):
        calls.append(f"{vocabulary.literal(form.begin)} @arguments{index} {vocabulary.literal(form.end)}")
        schemas.append({"name": f"arguments{index}", "json_schema": _schema(form.schema, spec)})
    more = f" ({vocabulary.literal(forms.separator)} call){{0,{MAX_CALLS - 1}}}" if forms.is_parallel else ""
    opening, closing = vocabulary.literal(forms.opening), vocabulary.literal(forms.closing)
    return [{"lark_grammar": f"start: {opening} call{more} {closing}\ncall: " + " | ".join(calls)}, *schemas]


def _schema(text: str, spec: GrammarSpec) -> dict[str, Any]:
    """A schema with the options that llguidance takes from it."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("the JSON schema is nested too deeply or is no JSON", param=spec.param) from error
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise RequestError("a JSON schema is an object", param=spec.param)
    options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": not spec.strict, "lenient": spec.lenient}
    return {**schema, "x-guidance": options}


def _reason(matcher: llguidance.LLMatcher) -> str:
    """One line of what llguidance says."""
    if matcher.get_error().startswith("NoExtension"):
        return "no answer can satisfy it"
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()] or [matcher.stop_reason()]
    # Errors of a regular expression show it first, which may take many lines, and say at last what is wrong.
    reason = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    return reason[:_MAX_ERROR_CHARACTERS]


def _fitted(mask: bytes, num_logits: int) -> bytes:
    """A mask over the logits, of which there may be more or fewer than tokens."""
    num_bytes = -(-num_logits // 32) * 4
    if len(mask) > num_bytes or num_logits % 32:
        value = int.from_bytes(mask, "little") & ((1 << num_logits) - 1)
        return value.to_bytes(num_bytes, "little")
    return mask.ljust(num_bytes, b"\0")
