"""The body of POST /v1/responses: structure and limits. Event loop or worker thread; no I/O.

Items and tools stay mappings here, since the kinds that clients send grow by the month; `responses_input` reads the
kinds that it knows. Fields that kvd does not know are skipped.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvd.server.common_types import SamplingFields
from kvd.server.responses import invalid, short
from kvd.server.validation import check_choice, check_object, check_range, unsupported

_EFFORT = re.compile(r"[a-z]{1,16}")
_STATEFUL = {
    "previous_response_id": "this server keeps no answers; send the whole conversation as 'input'",
    "conversation": "this server keeps no conversations; send the whole one as 'input'",
    "prompt": "this server keeps no prompt templates; send the text as 'instructions' and 'input'",
}
"""Fields that refer to something the server would have to remember, and what to do in their place."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """OpenAI's fields, beside those that it shares with chat completions."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    @property
    def format(self) -> TextFormat:
        """The form of the answer's text; plain text where nothing is said."""
        stated = self.text.format if self.text is not None else None
        return stated or TextFormat(type="text")

    def check(self) -> None:
        """Raise a 400 that names the first field that is wrong; what chat completions check too is left to them."""
        for name, remedy in _STATEFUL.items():
            if getattr(self, name) is not None:
                raise unsupported(name, remedy)
        if self.background:
            raise unsupported("background", "this server answers while the client waits; leave it out")
        if not self.input:
            raise invalid("input", "'input' must be a text or a list with at least one item")
        check_choice("truncation", self.truncation, ("auto", "disabled"))
        check_range("max_output_tokens", self.max_output_tokens, 1, 2**31)
        check_range("top_logprobs", self.top_logprobs, 0, 20)
        self._check_reasoning()
        self._check_format()

    def _check_reasoning(self) -> None:
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort is not None and not _EFFORT.fullmatch(effort):
            raise invalid("reasoning.effort", f"'reasoning.effort' must be a word like low, not '{short(effort)}'")

    def _check_format(self) -> None:
        check_choice("text.format.type", self.format.type, ("text", "json_object", "json_schema"))
        if self.format.type == "json_schema":
            if self.format.schema is None:
                raise invalid("text.format.schema", "'text.format.schema' is required for type 'json_schema'")
            if not self.format.name:
                raise invalid("text.format.name", "'text.format.name' is required for type 'json_schema'")


class FunctionTool(msgspec.Struct, kw_only=True):
    """The one kind of tool that a model is offered."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict is True,
        }


class InputPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[InputPart]


class FunctionCallItem(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str


class CustomCallItem(msgspec.Struct, kw_only=True):
    """A call whose argument is free text, of a tool that another model was offered."""

    call_id: str
    name: str
    input: str


class CallOutputItem(msgspec.Struct, kw_only=True):
    call_id: str
    output: str | list[InputPart]


class ReasoningItem(msgspec.Struct, kw_only=True):
    """`encrypted_content`, which only its author can read, is skipped."""

    content: list[InputPart] | None = None


def kind_of(item: dict[str, Any], path: str) -> str:
    """The type of an item or a tool; an item with a role alone is a message."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", f"'{path}' needs a 'type'")
    return kind


def named_choice(choice: dict[str, Any], path: str) -> str:
    """The function that `{"type": "function", "name": …}` names; raises a 400 for every other kind of tool."""
    kind = kind_of(check_object(path, choice), path)
    if kind != "function":
        raise invalid(path, f"'{path}' names a tool of type '{short(kind)}'; the model is offered functions only")
    if not isinstance(name := choice.get("name"), str):
        raise invalid(f"{path}.name", f"'{path}.name' is required")
    return name
