"""How models write tool calls: one small class per format, for reading, for writing, and for holding a model to it.

Purpose: the parser asks a format to read an answer, prompts for templates that know no tools have it write calls, and
a grammar made of its forms has even a small model call a tool as asked.
Owner: immutable; formats are shared by all requests.
Rule for reading: what turns out to be no call is given back as text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvd.text.answer_source import AnswerSource, Steps
from kvd.text.grammar import CallForm, CallForms, GrammarSpec, schema_text
from kvd.text.json_calls import read_arguments, read_json_call

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a call in the history."""

_NAME_CHARACTER = re.compile(r"[A-Za-z0-9_.\-]")
_MAX_NAME_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Tool:
    """A function on offer. `parameters` is a JSON schema; None: it takes no arguments."""

    name: str
    parameters: dict[str, Any] | None = None
    is_strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """What arguments a model held to a grammar may write: of an object with properties, only these."""
        schema = self.parameters or {"type": "object", "properties": {}}
        if "properties" in schema:
            return {"additionalProperties": False, **schema}
        return schema


class ToolFormat(ABC):
    """One way to write calls.

    markers   tokens that must reach the parser although they are special in some vocabularies
    opening   what marks the beginning of a call; "" where nothing does for certain
    closing   what stands behind a call and is lost without harm where the answer ends within it
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[str] = ""
    closing: ClassVar[str] = ""

    @abstractmethod
    def read(self, source: AnswerSource, tool_names: Collection[str]) -> Steps[None]:
        """Release text and calls for as long as characters come."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Calls as the model would have written them."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, one_call: bool) -> GrammarSpec:
        """What holds an answer to calls of these tools. Raises RequestError for a schema that cannot be written."""


class MarkedFormat(ToolFormat):
    """A format whose calls are fixed text around arguments in JSON."""

    def grammar(self, tools: Sequence[Tool], *, one_call: bool) -> GrammarSpec:
        return GrammarSpec(
            "tool_calls",
            self.forms(tools, one_call=one_call),
            lenient=not all(tool.is_strict for tool in tools),
            param="tools",
        )

    @abstractmethod
    def forms(self, tools: Sequence[Tool], *, one_call: bool) -> CallForms:
        """Calls of these tools as the model would write them."""


def _is_name(name: str) -> bool:
    return bool(name)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object_forms(tools: Sequence[Tool], arguments_key: str, before: str = "", after: str = "") -> tuple[CallForm, ...]:
    return tuple(
        CallForm(
            f'{before}{{"name": {_dump(tool.name)}, "{arguments_key}": ',
            schema_text(tool.schema, param="tools"),
            f"}}{after}",
        )
        for tool in tools
    )


class Hermes(MarkedFormat):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes, Qwen and many others write it."""

    name = "hermes"
    opening = "<tool_call>"
    closing = "</tool_call>"
    markers = (opening, closing)

    def read(self, source: AnswerSource, tool_names: Collection[str]) -> Steps[None]:
        follows_call = False
        while True:
            markers = (self.opening, self.closing) if follows_call else (self.opening,)
            if (yield from source.read_until(markers)) == self.closing:
                source.drop()
                follows_call = False
            elif (yield from source.skip_spaces()) == "{" and (yield from read_json_call(source, _is_name)):
                source.settle()
                follows_call = True
            else:
                source.give_back()

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f'{self.opening}\n{{"name": {_dump(name)}, "arguments": {_dump(arguments)}}}\n{self.closing}'
            for name, arguments in calls
        )

    def forms(self, tools: Sequence[Tool], *, one_call: bool) -> CallForms:
        calls = _object_forms(tools, "arguments", f"{self.opening}\n", f"\n{self.closing}")
        return CallForms(calls, separator="\n", is_parallel=not one_call)


class LlamaJson(MarkedFormat):
    """`{"name": …, "parameters": …}` at the beginning of an answer or after `<|python_tag|>`; several with `;`.

    Nothing marks such a call, so only an object with the name of a tool that was offered is one.
    """

    name = "llama3_json"
    opening = "<|python_tag|>"
    markers = (opening,)

    def read(self, source: AnswerSource, tool_names: Collection[str]) -> Steps[None]:
        while True:
            if (yield from self._reads_call(source, tool_names)):
                source.settle()
                continue
            source.give_back()
            yield from source.read_until((self.opening,))

    def _reads_call(self, source: AnswerSource, tool_names: Collection[str]) -> Steps[bool]:
        char = yield from source.skip_spaces()
        if char in ";," and source.num_calls:
            char = yield from source.skip_spaces()
        return char == "{" and (yield from read_json_call(source, tool_names.__contains__, only_call_keys=True))

    def write(self, calls: Sequence[Call]) -> str:
        return "; ".join(f'{{"name": {_dump(name)}, "parameters": {_dump(arguments)}}}' for name, arguments in calls)

    def forms(self, tools: Sequence[Tool], *, one_call: bool) -> CallForms:
        return CallForms(_object_forms(tools, "parameters"), separator="; ", is_parallel=not one_call)


class Mistral(MarkedFormat):
    """`[TOOL_CALLS] [{"name": …, "arguments": …}]`, and the newer `[TOOL_CALLS]name[ARGS]{…}`; both are read.

    writes_args   the template speaks the newer one
    """

    name = "mistral"
    opening = "[TOOL_CALLS]"
    args_marker = "[ARGS]"
    markers = (opening, args_marker, "[CALL_ID]")

    def __init__(self, *, writes_args: bool = False) -> None:
        self.writes_args = writes_args

    def read(self, source: AnswerSource, tool_names: Collection[str]) -> Steps[None]:
        while True:
            yield from source.read_until((self.opening,))
            char = yield from source.skip_spaces()
            num_calls = source.num_calls
            if char == "[":
                is_whole = yield from self._read_list(source)
            elif char == "{":
                is_whole = yield from read_json_call(source, _is_name)
            else:
                is_whole = yield from self._read_named(source, char)
            if is_whole:
                source.settle()
            elif source.num_calls > num_calls:
                source.unread()
                source.settle()
            else:
                source.give_back()

    def _read_list(self, source: AnswerSource) -> Steps[bool]:
        while (yield from source.skip_spaces()) == "{":
            if not (yield from read_json_call(source, _is_name)):
                return False
            if (char := (yield from source.skip_spaces())) != ",":
                if char == "]":
                    source.drop()
                    return True
                return False
        return False

    def _read_named(self, source: AnswerSource, char: str) -> Steps[bool]:
        name = yield from read_name(source, char)
        char = source.held[-1]
        while name and char == "[":
            tag = "["
            while char not in "] \n{" and len(tag) < _MAX_NAME_CHARACTERS:
                char = yield from source.next()
                tag += char
            if tag == self.args_marker:
                char = yield from source.skip_spaces()
            elif tag == "[CALL_ID]":
                while (char := (yield from source.next())) != "[" and not char.isspace():
                    pass
            else:
                return False
        if not name or char != "{":
            return False
        source.begin_call(name, num_held=1)
        yield from read_arguments(source)
        return True

    def write(self, calls: Sequence[Call]) -> str:
        if self.writes_args:
            return "".join(f"{self.opening}{name}{self.args_marker}{_dump(arguments)}" for name, arguments in calls)
        return f"{self.opening} " + _dump([{"name": name, "arguments": arguments} for name, arguments in calls])

    def forms(self, tools: Sequence[Tool], *, one_call: bool) -> CallForms:
        if self.writes_args:
            calls = tuple(
                CallForm(f"{self.opening}{tool.name}{self.args_marker}", schema_text(tool.schema, param="tools"), "")
                for tool in tools
            )
            return CallForms(calls, separator="", is_parallel=not one_call)
        calls = _object_forms(tools, "arguments")
        return CallForms(calls, opening=f"{self.opening} [", separator=", ", closing="]", is_parallel=not one_call)


def read_name(source: AnswerSource, char: str) -> Steps[str]:
    """A name that begins with `char`; the character behind it is the newest that is held."""
    name = ""
    while _NAME_CHARACTER.fullmatch(char) and len(name) < _MAX_NAME_CHARACTERS:
        name += char
        char = yield from source.next()
    return name
