"""The body of POST /v1/messages, and its translation into the chat form that everything else works on.

Pure functions and structs; event loop or worker thread. Fields without an effect here (metadata, service_tier,
cache_control, betas, container, …) are accepted and skipped, as are fields nobody knows.

Invariants: consecutive turns of one role become one message, as the protocol states it; what changes on every
request without meaning anything to a model is left out, since it would defeat the prefix cache; parameters are named
in errors as the client spelled them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import msgspec

from kvd.errors import RequestError
from kvd.server.chat_types import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    Tool,
    ToolCall,
    ToolChoiceObject,
    check_tool_name,
)
from kvd.server.common_types import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, check_max_tokens
from kvd.server.responses import invalid, short
from kvd.server.tool_schemas import check_schema
from kvd.server.validation import check_choice, convert_value

MAX_LONG_TOOL_NAME = 128
"""Most characters of a tool's name; OpenAI's protocols have 64."""

BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a system block that Claude Code changes on every request."""

_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_TURN_SEPARATOR = "\n"
_SYSTEM_SEPARATOR = "\n\n"


class Block(msgspec.Struct, kw_only=True):
    """A content block of any kind; which fields count depends on `type`."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    thinking: str | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool of the client (`custom`), or one that Anthropic's own servers or models would know."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")


class _Chat(ChatRequest, kw_only=True):
    has_checked_tools: ClassVar[bool] = True


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """All that becomes part of a prompt: the whole body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise a 400 that names the first field that is wrong; blocks are checked as they are translated."""
        if not self.messages:
            raise invalid("messages", "'messages' must hold at least one message")
        for index, message in enumerate(self.messages):
            check_choice(f"messages[{index}].role", message.role, _ROLES)
        if self.thinking is not None:
            check_choice("thinking.type", self.thinking.type, _THINKING)
            check_choice("thinking.display", self.thinking.display, ("summarized", "omitted"))
        self._check_tools()

    def _check_tools(self) -> None:
        for index, tool in enumerate(self.tools or ()):
            if not tool.is_custom:
                continue
            check_tool_name(f"tools[{index}].name", tool.name or "", MAX_LONG_TOOL_NAME)
            if tool.input_schema is None:
                raise invalid(f"tools[{index}].input_schema", f"'tools[{index}].input_schema' is required")
            check_schema(f"tools[{index}].input_schema", tool.input_schema)
        if (choice := self.tool_choice) is None:
            return
        check_choice("tool_choice.type", choice.type, ("auto", "any", "tool", "none"))
        if choice.type == "tool" and choice.name is None:
            raise invalid("tool_choice.name", "'tool_choice.name' is required when 'tool_choice.type' is 'tool'")
        if choice.type in ("any", "tool") and not self._offered_tools():
            raise invalid("tool_choice", f"'tool_choice' is '{choice.type}', but 'tools' has none to be called here")

    def _offered_tools(self) -> list[Tool]:
        """The client's own tools. Those that Anthropic's servers run, or its models were taught, are left out."""
        return [
            Tool(
                type="function",
                function=FunctionDefinition(
                    name=tool.name or "",
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                ),
            )
            for tool in self.tools or ()
            if tool.is_custom
        ]

    def to_chat(self) -> ChatRequest:
        """The conversation in the chat form, without any sampling. Raises a 400 for blocks that are not served."""
        messages = _translate(self.system, self.messages)
        choice = self.tool_choice
        return _Chat(
            model=self.model,
            messages=messages,
            tools=self._offered_tools() or None,
            tool_choice=None if choice is None else _translate_choice(choice),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
            chat_template_kwargs=self._template_kwargs(),
            response_format=self._response_format(),
            continue_final_message=messages[-1].role == "assistant" or None,
        )

    def _template_kwargs(self) -> dict[str, Any] | None:
        """Templates of models that can think read `enable_thinking`; an explicit kwarg of the client wins."""
        if self.thinking is None:
            return self.chat_template_kwargs
        return {"enable_thinking": self.thinking.type != "disabled", **(self.chat_template_kwargs or {})}

    def _response_format(self) -> dict[str, Any] | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = {"name": "output", "schema": self.output_config.format.schema, "strict": True}
        return {"type": "json_schema", "json_schema": schema}


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A body of POST /v1/messages: the conversation, and how to answer it."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_eviction: str | None = None
    kv_budget_tokens: int | None = None

    @property
    def omits_thinking(self) -> bool:
        """Whether thinking is to be shown as an empty block."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def check(self) -> None:
        check_max_tokens("max_tokens", self.max_tokens, None)
        stops = self.stop_sequences or ()
        if len(stops) > MAX_STOP_STRINGS:
            raise invalid(
                "stop_sequences", f"'stop_sequences' has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed"
            )
        for text in stops:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise invalid(
                    "stop_sequences",
                    f"a stop sequence has {len(text)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed",
                )
        super().check()

    def to_chat(self) -> ChatRequest:
        """The whole request in the chat form."""
        return msgspec.structs.replace(
            super().to_chat(),
            max_tokens=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            cache_salt=self.cache_salt,
            priority=self.priority,
            kv_eviction=self.kv_eviction,
            kv_budget_tokens=self.kv_budget_tokens,
        )


def _translate_choice(choice: ToolChoice) -> str | ToolChoiceObject:
    if choice.type == "tool":
        return ToolChoiceObject.of(choice.name or "")
    return "required" if choice.type == "any" else choice.type


# --------------------------------------------------------------------------- messages


def _translate(system: str | list[Block] | None, turns: list[InputMessage]) -> list[ChatMessage]:
    """System turns before the conversation belong to its head. Later ones are turns of the user: they must stay where
    they are, or all cached tokens after the head would be lost, and few templates know a system turn in the middle.
    """
    head = [] if system is None else [_system_text(system, "system")]
    num_leading = next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))
    head += [_system_text(turn.content, f"messages[{index}]") for index, turn in enumerate(turns[:num_leading])]
    head = [text for text in head if text]
    messages = [ChatMessage(role="system", content=_SYSTEM_SEPARATOR.join(head))] if head else []
    for index, turn in enumerate(turns[num_leading:], num_leading):
        for message in _translate_turn(turn, f"messages[{index}]"):
            _append(messages, message)
    if not messages:
        raise invalid("messages", "'messages' has no text")
    if messages[-1].tool_calls:
        raise invalid("messages", "'messages' ends with a tool_use block; its tool_result must follow")
    return messages


def _system_text(content: str | list[Block], path: str) -> str:
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BILLING_HEADER) else content
    texts = [_text_of(block, f"{path}[{index}]") for index, block in enumerate(content)]
    return _SYSTEM_SEPARATOR.join(text for text in texts if text and not text.startswith(BILLING_HEADER))


def _translate_turn(turn: InputMessage, path: str) -> Iterable[ChatMessage]:
    if turn.role == "system":
        text = _system_text(turn.content, path)
        return [ChatMessage(role="user", content=text)] if text else []
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    if turn.role == "assistant":
        return [_assistant_message(turn.content, path)]
    return _user_messages(turn.content, path)


def _user_messages(blocks: list[Block], path: str) -> Iterator[ChatMessage]:
    for index, block in enumerate(blocks):
        place = f"{path}.content[{index}]"
        if block.type == "tool_result":
            yield _tool_message(block, place)
        else:
            yield ChatMessage(role="user", content=_text_of(block, place))


def _tool_message(block: Block, path: str) -> ChatMessage:
    """The chat form has no word for a failed call: the model is told in the result's text."""
    if block.tool_use_id is None:
        raise invalid(f"{path}.tool_use_id", f"'{path}.tool_use_id' is required")
    text = _result_text(block.content, f"{path}.content")
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=text)


def _result_text(content: Any, path: str) -> str:
    """`content` of a tool_result: nothing, a string, or text blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = convert_value(content, list[Block], path)
    return _TURN_SEPARATOR.join(_text_of(block, f"{path}[{index}]") for index, block in enumerate(blocks))


def _assistant_message(blocks: list[Block], path: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{path}.content[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # only whoever redacted it can read it
            case "tool_use":
                calls.append(_tool_call(block, place))
            case _:
                texts.append(_text_of(block, place))
    return ChatMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _tool_call(block: Block, path: str) -> ToolCall:
    for field in ("id", "name"):
        if getattr(block, field) is None:
            raise invalid(f"{path}.{field}", f"'{path}.{field}' is required")
    if not isinstance(block.input, dict):
        raise invalid(f"{path}.input", f"'{path}.input' must be an object")
    arguments = msgspec.json.encode(block.input).decode()
    return ToolCall(id=block.id, function=FunctionCall(name=block.name or "", arguments=arguments))


def _text_of(block: Block, path: str) -> str:
    if block.type != "text":
        raise _unsupported(block, path)
    if block.text is None:
        raise invalid(f"{path}.text", f"'{path}.text' is required")
    return block.text


def _unsupported(block: Block, path: str) -> RequestError:
    return invalid(f"{path}.type", f"'{path}' is of kind '{short(block.type)}'; this model reads text only")


def _append(messages: list[ChatMessage], message: ChatMessage) -> None:
    """Add a message, or to the one before it where the same role goes on speaking."""
    last = messages[-1] if messages else None
    if last is None or last.role != message.role or message.role in ("tool", "system"):
        messages.append(message)
        return
    last.content = _join(last.content, message.content, _TURN_SEPARATOR)
    last.reasoning_content = _join(last.reasoning_content, message.reasoning_content, _TURN_SEPARATOR) or None
    last.tool_calls = [*(last.tool_calls or ()), *(message.tool_calls or ())] or None


def _join(first: Any, second: Any, separator: str) -> str:
    return separator.join(text for text in (first, second) if text)
