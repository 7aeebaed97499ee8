"""The body of POST /v1/chat/completions: structure, limits, and messages as the chat template wants them."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, ClassVar

import msgspec

from kvd.errors import RequestError
from kvd.server.common_types import GenerationFields, check_max_tokens
from kvd.server.responses import invalid, short
from kvd.server.tool_schemas import check_schema
from kvd.server.validation import check_choice, check_range

_ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]+")
MAX_TOOL_NAME = 64


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, kw_only=True):
    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def check(self, path: str) -> None:
        check_choice(f"{path}.role", self.role, _ROLES)
        if self.content is None and self.role != "assistant":
            raise invalid(f"{path}.content", f"'{path}.content' is required for role '{self.role}'")
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                _check_part(part, f"{path}.content[{index}]")

    @property
    def num_characters(self) -> int:
        texts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content]
        texts += [call.function.arguments for call in self.tool_calls or ()]
        texts += [self.reasoning_content or self.reasoning]
        return sum(len(text or "") for text in texts)

    def for_template(self) -> dict[str, Any]:
        """The message as an OpenAI object of builtins; the template's side brings it into the template's form."""
        message: dict[str, Any] = msgspec.to_builtins(self)
        message["content"] = message["content"] or ""
        reasoning = message.pop("reasoning")
        message["reasoning_content"] = message["reasoning_content"] or reasoning
        return {key: value for key, value in message.items() if value is not None}


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool as an OpenAI object of builtins."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionDefinition | None = None


class FunctionChoice(msgspec.Struct, kw_only=True):
    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionChoice | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: str
    tools: list[AllowedTool]


class ToolChoiceObject(msgspec.Struct, kw_only=True):
    """`function`: this one must be called. `allowed_tools`: these may be called, or of these one must be."""

    type: str
    function: FunctionChoice | None = None
    allowed_tools: AllowedTools | None = None

    @classmethod
    def of(cls, name: str) -> ToolChoiceObject:
        """The choice of one function."""
        return cls(type="function", function=FunctionChoice(name=name))

    def check(self, names: Collection[str]) -> None:
        """Raise a 400 unless it is complete and names what is in `names`, the functions in `tools`."""
        check_choice("tool_choice.type", self.type, ("function", "allowed_tools"))
        if self.type == "function":
            if self.function is None:
                raise invalid("tool_choice.function", "'tool_choice.function' is required")
            _check_known(self.function.name, names)
            return
        if (allowed := self.allowed_tools) is None:
            raise invalid("tool_choice.allowed_tools", "'tool_choice.allowed_tools' is required")
        check_choice("tool_choice.allowed_tools.mode", allowed.mode, ("auto", "required"))
        for index, tool in enumerate(allowed.tools):
            if tool.type != "function" or tool.function is None:
                path = f"tool_choice.allowed_tools.tools[{index}]"
                raise invalid(path, f"'{path}' must be a tool of type 'function'")
            _check_known(tool.function.name, names)
        if allowed.mode == "required" and not allowed.tools:
            raise invalid("tool_choice", "'tool_choice' requires a call and allows no tool")

    @property
    def names_one(self) -> bool:
        return self.type == "function"

    @property
    def requires_call(self) -> bool:
        return self.names_one or (self.allowed_tools is not None and self.allowed_tools.mode == "required")

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        functions = [self.function]
        if not self.names_one and self.allowed_tools is not None:
            functions = [tool.function for tool in self.allowed_tools.tools]
        return frozenset(function.name for function in functions if function is not None)


class ChatRequest(GenerationFields, kw_only=True):
    has_checked_tools: ClassVar[bool] = False
    """Names and schemas of the tools were judged before, by the rules of another protocol."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def requested_tokens(self) -> int | None:
        """The requested length; `max_completion_tokens` wins over `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_functions(self) -> list[FunctionDefinition]:
        """What the model is told of: all where a grammar sees to its choice, so that the prompt stays cached."""
        choice = self.tool_choice
        if choice == "none":
            return []
        functions = [tool.function for tool in self.tools or () if tool.function is not None]
        if isinstance(choice, ToolChoiceObject) and not choice.requires_call:
            functions = [function for function in functions if function.name in choice.names]
        return functions

    @property
    def required_functions(self) -> list[FunctionDefinition]:
        """Of which the model must call one; empty: it is free."""
        choice = self.tool_choice
        if not isinstance(choice, ToolChoiceObject):
            return self.offered_functions if choice == "required" else []
        if not choice.requires_call:
            return []
        return [function for function in self.offered_functions if function.name in choice.names]

    @property
    def is_one_call(self) -> bool:
        """At most one call is wanted."""
        is_named = isinstance(self.tool_choice, ToolChoiceObject) and self.tool_choice.names_one
        return self.parallel_tool_calls is False or is_named

    @property
    def opens_answer(self) -> bool:
        """Whether the template begins a new assistant turn after the messages."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def check(self, vocab_size: int) -> None:
        """Raise a 400 that names the first field that is wrong."""
        if not self.messages:
            raise invalid("messages", "'messages' must hold at least one message")
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        super().check(vocab_size)
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        check_max_tokens("max_tokens", self.max_tokens, None)
        check_max_tokens(name, self.requested_tokens, self.min_tokens)
        check_range("top_logprobs", self.top_logprobs, 0, 20)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        self._check_tools()
        self._check_template()

    def _check_tools(self) -> None:
        names = set()
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function" or tool.function is None:
                raise invalid(f"tools[{index}].type", f"'tools[{index}]' must be a tool of type 'function'")
            if not self.has_checked_tools:
                check_tool_name(f"tools[{index}].function.name", tool.function.name, MAX_TOOL_NAME)
                check_schema(f"tools[{index}].function.parameters", tool.function.parameters or {})
            names.add(tool.function.name)
        if isinstance(self.tool_choice, ToolChoiceObject):
            self.tool_choice.check(names)
            return
        check_choice("tool_choice", self.tool_choice, ("none", "auto", "required"))
        if self.tool_choice == "required" and not names:
            raise invalid("tool_choice", "'tool_choice' is 'required', but there are no 'tools'")

    def _check_template(self) -> None:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise invalid(
                    "continue_final_message",
                    "'continue_final_message' and 'add_generation_prompt' exclude each other",
                )
            if self.messages[-1].role != "assistant":
                raise invalid(
                    "continue_final_message",
                    "'continue_final_message' needs a last message of role 'assistant'",
                )


def check_tool_name(path: str, name: str, max_characters: int) -> None:
    """Raise a 400 that names `path` for what cannot be a function's name."""
    if len(name) > max_characters or not TOOL_NAME.fullmatch(name):
        raise invalid(path, f"'{path}' must be 1 to {max_characters} of A-Z a-z 0-9 _ -")


def _check_known(name: str, names: Collection[str]) -> None:
    if name not in names:
        raise invalid("tool_choice", f"'tool_choice' names '{short(name)}', which is not in 'tools'")


def _check_part(part: ContentPart, path: str) -> None:
    if part.type != "text":
        raise _unsupported_part(part, path)
    if part.text is None:
        raise invalid(f"{path}.text", f"'{path}.text' is required")


def _unsupported_part(part: ContentPart, path: str) -> RequestError:
    return invalid(f"{path}.type", f"'{path}' is of kind '{short(part.type)}'; this model reads text only")
