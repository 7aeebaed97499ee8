"""From the body of a Responses request to that of a chat completion. Event loop or worker thread; no I/O.

Every kind of item that has a meaning for a text model is read; what would change the answer if it were left out is
refused by name (images, references to stored items), and kinds that belong to hosted tools or are unknown are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvd.errors import RequestError
from kvd.server.chat_types import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    Tool,
    ToolCall,
    ToolChoiceObject,
)
from kvd.server.common_types import SamplingFields
from kvd.server.responses import invalid, short
from kvd.server.responses_types import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    FunctionTool,
    InputPart,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    kind_of,
    named_choice,
)
from kvd.server.validation import check_choice, convert_value

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_SAME_NAME = ("model", "parallel_tool_calls", *SamplingFields.__struct_fields__)
"""Fields that mean the same in both protocols."""


@dataclass(frozen=True, slots=True)
class Translation:
    """The request as a chat completion, and the tools that the model is offered: place in the body → tool."""

    chat: ChatRequest
    tools: dict[str, FunctionTool]

    @contextmanager
    def blaming_own_fields(self) -> Iterator[None]:
        """Complaints about the chat completion come out with the names of the fields that the client sent."""
        try:
            yield
        except RequestError as error:
            if error.param is not None:
                error.param = self._rename(error.param)
                error.args = (_QUOTED_NAME.sub(lambda found: f"'{self._rename(found[1])}'", str(error)),)
            raise

    def _rename(self, name: str) -> str:
        if tool := _TOOL_PATH.match(name):
            return list(self.tools)[int(tool[1])] + name[tool.end() :]
        for pattern, replacement in _RENAMED:
            if found := pattern.match(name):
                return replacement + name[found.end() :]
        return name


_RENAMED = (
    (re.compile(r"messages\b"), "input"),
    (re.compile(r"max_(?:completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"response_format(?:\.json_schema)?\b"), "text.format"),
)
_TOOL_PATH = re.compile(r"tools\[(\d+)\](?:\.function\b)?")
_QUOTED_NAME = re.compile(r"'([\w.\[\]]+)'")


def to_chat(body: ResponsesRequest) -> Translation:
    """Raises a 400 for what this server cannot show to a model."""
    tools, choice = _read_tools(body)
    chat = ChatRequest(
        messages=_with_instructions(body.instructions, _read_items(body.input)),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=[_to_chat_tool(tool) for tool in tools.values()] or None,
        tool_choice=choice,
        response_format=_response_format(body),
        chat_template_kwargs=_template_kwargs(body),
        **{name: getattr(body, name) for name in _SAME_NAME},
    )
    return Translation(chat, tools)


# --------------------------------------------------------------------------- items


class _Conversation:
    """Collects messages. What the assistant says and calls in one turn becomes one message, as templates expect."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._turn: ChatMessage | None = None

    def add(self, message: ChatMessage) -> None:
        """A message of somebody else, which ends the assistant's turn."""
        self._turn = None
        self.messages.append(message)

    def add_reasoning(self, text: str) -> None:
        if text:
            self._open(is_new=True).reasoning_content = text

    def add_text(self, text: str) -> None:
        turn = self._open(is_new=self._turn is not None and bool(self._turn.content or self._turn.tool_calls))
        turn.content = text

    def add_call(self, call: ToolCall) -> None:
        turn = self._open(is_new=False)
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _open(self, *, is_new: bool) -> ChatMessage:
        if self._turn is None or is_new:
            self._turn = ChatMessage(role="assistant")
            self.messages.append(self._turn)
        return self._turn

    def finish(self) -> list[ChatMessage]:
        """The messages; a turn of which only reasoning has come down to us is no message."""
        return [
            message for message in self.messages if message.role != "assistant" or message.content is not None
            or message.tool_calls
        ]  # fmt: skip


def _read_items(items: str | list[dict[str, Any]]) -> list[ChatMessage]:
    if isinstance(items, str):
        return [ChatMessage(role="user", content=items)]
    conversation = _Conversation()
    for index, item in enumerate(items):
        _read_item(item, f"input[{index}]", conversation)
    messages = conversation.finish()
    if not messages:
        raise invalid("input", "'input' has no item that this server could show to the model")
    return messages


def _read_item(item: dict[str, Any], path: str, conversation: _Conversation) -> None:
    match kind_of(item, path):
        case "message":
            _read_message(convert_value(item, MessageItem, path), path, conversation)
        case "function_call":
            call = convert_value(item, FunctionCallItem, path)
            conversation.add_call(_tool_call(call.call_id, call.name, call.arguments))
        case "custom_tool_call":
            custom = convert_value(item, CustomCallItem, path)
            arguments = json.dumps({"input": custom.input}, ensure_ascii=False)
            conversation.add_call(_tool_call(custom.call_id, custom.name, arguments))
        case "function_call_output" | "custom_tool_call_output":
            result = convert_value(item, CallOutputItem, path)
            text = _text_of(result.output, f"{path}.output", separator="\n")
            conversation.add(ChatMessage(role="tool", content=text, tool_call_id=result.call_id))
        case "reasoning":
            reasoning = convert_value(item, ReasoningItem, path)
            conversation.add_reasoning(_text_of(reasoning.content or [], f"{path}.content", separator=""))
        case "item_reference":
            raise invalid(path, f"'{path}' refers to a stored item; this server keeps none, so send the item itself")
        case _:
            pass


def _read_message(item: MessageItem, path: str, conversation: _Conversation) -> None:
    check_choice(f"{path}.role", item.role, _ROLES)
    if item.role == "assistant":
        conversation.add_text(_text_of(item.content, f"{path}.content", separator=""))
        return
    content: str | list[ContentPart]
    if isinstance(item.content, str) or len(item.content) == 1:
        content = _text_of(item.content, f"{path}.content", separator="")
    else:
        parts = enumerate(item.content)
        content = [ContentPart(type="text", text=_text_of_part(part, f"{path}.content[{n}]")) for n, part in parts]
    conversation.add(ChatMessage(role=item.role, content=content))


def _text_of(content: str | Sequence[InputPart], path: str, *, separator: str) -> str:
    if isinstance(content, str):
        return content
    return separator.join(_text_of_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _text_of_part(part: InputPart, path: str) -> str:
    if part.type == "refusal":
        return part.refusal or ""
    if part.type not in _TEXT_PARTS:
        raise invalid(f"{path}.type", f"'{path}' is of kind '{short(part.type)}'; this model reads text only")
    if part.text is None:
        raise invalid(f"{path}.text", f"'{path}.text' is required")
    return part.text


def _tool_call(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))


def _with_instructions(instructions: str | None, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Instructions and the system and developer messages that follow them are one message.

    Many templates take one system message only, and agents send several.
    """
    num_leading = next(
        (index for index, message in enumerate(messages) if message.role not in ("system", "developer")), len(messages)
    )
    leading, rest = messages[:num_leading], messages[num_leading:]
    if instructions:
        leading = [ChatMessage(role="system", content=instructions), *leading]
    if len(leading) < 2:
        return [*leading, *rest]
    texts = [text for message in leading for text in _texts_of(message)]
    return [ChatMessage(role="system", content="\n\n".join(texts)), *rest]


def _texts_of(message: ChatMessage) -> Iterator[str]:
    if isinstance(message.content, list):
        yield from (part.text or "" for part in message.content)
    else:
        yield message.content or ""


# --------------------------------------------------------------------------- tools and options


def _read_tools(body: ResponsesRequest) -> tuple[dict[str, FunctionTool], str | ToolChoiceObject | None]:
    """The functions among the tools, and which of them the model may or must call."""
    tools = {}
    for index, tool in enumerate(body.tools or ()):
        if kind_of(tool, path := f"tools[{index}]") == "function":
            tools[path] = convert_value(tool, FunctionTool, path)
    choice = body.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return _allowed_tools(tools, choice)
        return tools, ToolChoiceObject.of(named_choice(choice, "tool_choice"))
    if choice == "required" and not tools:
        raise invalid("tool_choice", "'tool_choice' is 'required', but there is no function in 'tools'")
    return tools, choice


def _allowed_tools(tools: dict[str, FunctionTool], choice: dict[str, Any]) -> tuple[dict[str, FunctionTool], str]:
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or not isinstance(mode, str):
        raise invalid("tool_choice", "'tool_choice' of type 'allowed_tools' needs 'mode' and a list 'tools'")
    check_choice("tool_choice.mode", mode, ("auto", "required"))
    names = {named_choice(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(allowed)}
    if unknown := names - {tool.name for tool in tools.values()}:
        raise invalid("tool_choice", f"'tool_choice' names '{short(min(unknown))}', which is not in 'tools'")
    if not names and mode == "required":
        raise invalid("tool_choice", "'tool_choice' requires a call and allows no tool")
    return {path: tool for path, tool in tools.items() if tool.name in names}, mode


def _to_chat_tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    stated = body.format
    if stated.type != "json_schema":
        return {"type": stated.type} if stated.type != "text" else None
    schema = {"name": stated.name, "schema": stated.schema, "strict": bool(stated.strict)}
    return {"type": "json_schema", "json_schema": schema}


def _template_kwargs(body: ResponsesRequest) -> dict[str, Any] | None:
    """Reasoning effort under the names that templates know; a template ignores the names that it does not use."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is None:
        return body.chat_template_kwargs
    wishes: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        wishes = {"enable_thinking": False}
    return {**wishes, **(body.chat_template_kwargs or {})}
