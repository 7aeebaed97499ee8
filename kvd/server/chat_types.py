"""The body of POST /v1/chat/completions: structure, limits, and messages as the chat template wants them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvd.errors import RequestError
from kvd.server.common_types import GenerationFields, check_max_tokens
from kvd.server.responses import invalid, short
from kvd.server.validation import check_choice, check_range

_ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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


class NamedToolChoice(msgspec.Struct, kw_only=True):
    type: str
    function: FunctionChoice


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
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
        """What the model is told of."""
        if self.tool_choice == "none":
            return []
        return [tool.function for tool in self.tools or () if tool.function is not None]

    @property
    def required_functions(self) -> list[FunctionDefinition]:
        """Of which the model must call one; empty: it is free."""
        if isinstance(self.tool_choice, NamedToolChoice):
            wanted = self.tool_choice.function.name
            return [function for function in self.offered_functions if function.name == wanted]
        return self.offered_functions if self.tool_choice == "required" else []

    @property
    def is_one_call(self) -> bool:
        """At most one call is wanted."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedToolChoice)

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
            if not TOOL_NAME.fullmatch(tool.function.name):
                path = f"tools[{index}].function.name"
                raise invalid(path, f"'{path}' must be 1 to 64 of A-Z a-z 0-9 _ -")
            names.add(tool.function.name)
        if isinstance(self.tool_choice, NamedToolChoice):
            check_choice("tool_choice.type", self.tool_choice.type, ("function",))
            if (name := self.tool_choice.function.name) not in names:
                raise invalid("tool_choice", f"'tool_choice' names '{short(name)}', which is not in 'tools'")
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


def _check_part(part: ContentPart, path: str) -> None:
    if part.type != "text":
        raise _unsupported_part(part, path)
    if part.text is None:
        raise invalid(f"{path}.text", f"'{path}.text' is required")


def _unsupported_part(part: ContentPart, path: str) -> RequestError:
    return invalid(f"{path}.type", f"'{path}' is of kind '{short(part.type)}'; this model reads text only")
