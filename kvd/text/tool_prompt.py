"""Tools in a conversation: for templates that know them, and for those that do not.

Purpose: choose the format of calls from the chat template, and bring tools, calls and results of a conversation into a
form that the template can render. A template without tools gets them as plain messages: a description in the system
message, calls as the text that the format writes, results as user messages.
Owner: pure functions; messages are OpenAI's objects and are never changed in place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from kvd.errors import ConfigError
from kvd.text.chat_template import ChatTemplate
from kvd.text.pythonic_calls import Pythonic
from kvd.text.tool_formats import Call, Hermes, LlamaJson, Mistral, ToolFormat

PARSER_NAMES = ("auto", "none", Hermes.name, LlamaJson.name, Mistral.name, Pythonic.name)

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_PYTHONIC_SIGN = re.compile(r"\[\w*func\w*\(\w*=")
_FORBIDS_SYSTEM = re.compile(r"[Ss]ystem role (is )?not supported")


def choose_format(name: str, template: ChatTemplate | None) -> ToolFormat | None:
    """The format of a setting; auto: the one whose signs stand in the template, else hermes."""
    text = template.literal_text if template is not None and template.offers_tools else ""
    match name:
        case "none":
            return None
        case "auto":
            return _recognise(text) or Hermes()
        case Hermes.name:
            return Hermes()
        case LlamaJson.name:
            return LlamaJson()
        case Mistral.name:
            return Mistral(writes_args=Mistral.args_marker in text)
        case Pythonic.name:
            return Pythonic()
        case _:
            raise ConfigError(f"tool_call_parser: {name[:40]!r} is none of {', '.join(PARSER_NAMES)}")


def speaks_format(template: ChatTemplate, tool_format: ToolFormat) -> bool:
    """Whether the template's own way to show tools is that of the format."""
    return template.offers_tools and type(_recognise(template.literal_text)) is type(tool_format)


def _recognise(text: str) -> ToolFormat | None:
    if Mistral.opening in text:
        return Mistral(writes_args=Mistral.args_marker in text)
    if _PYTHONIC_SIGN.search(text):
        return Pythonic()
    if LlamaJson.opening in text or ('"parameters":' in text and '"name":' in text and Hermes.opening not in text):
        return LlamaJson()
    if Hermes.opening in text and "<function=" not in text:
        return Hermes()
    return None


# --------------------------------------------------------------------------- templates that know tools


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mistral's templates want ids of nine letters or digits: others become a digest, alike in call and result."""
    changed = []
    for message in messages:
        message = dict(message)
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [
                {**call, "id": _short_id(call.get("id"))} if isinstance(call, dict) else call
                for call in message["tool_calls"]
            ]
        if message.get("role") == "tool":
            message["tool_call_id"] = _short_id(message.get("tool_call_id"))
        changed.append(message)
    return changed


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    return text if _MISTRAL_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


# --------------------------------------------------------------------------- templates that know none


def as_plain_messages(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    tool_format: ToolFormat,
    template: ChatTemplate,
) -> list[dict[str, Any]]:
    """The same conversation in messages of text alone."""
    plain: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        if message.get("role") == "tool":
            result = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
            if follows_result:
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            written = tool_format.write([_call_of(call) for call in message["tool_calls"]])
            text = _text(message.get("content"))
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**kept, "content": f"{text}\n{written}" if text else written})
        else:
            plain.append(dict(message))
        follows_result = message.get("role") == "tool"
    if tools:
        _describe(tools, tool_format, plain, template)
    return plain


def _describe(
    tools: Sequence[dict[str, Any]], tool_format: ToolFormat, plain: list[dict[str, Any]], template: ChatTemplate
) -> None:
    """Put the tools into the system message, or the first message where the template refuses one."""
    description = _INSTRUCTIONS.format(
        functions="\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools),
        example=tool_format.write([("NAME", {"ARGUMENT": "VALUE"})]),
    )
    first = plain[0] if plain else None
    if first is not None and first.get("role") in ("system", "developer"):
        first["content"] = f"{_text(first.get('content'))}\n\n{description}".lstrip()
    elif first is not None and first.get("role") == "user" and _FORBIDS_SYSTEM.search(template.literal_text):
        first["content"] = f"{description}\n\n{_text(first.get('content'))}"
    else:
        plain.insert(0, {"role": "system", "content": description})


_INSTRUCTIONS = """\
You can call these functions, whose parameters are given as JSON schemas:
{functions}
To call one, answer with its name and arguments in exactly this form:
{example}
Its result follows in <tool_response>. Answer in plain words when you need no function."""


def _call_of(call: dict[str, Any]) -> Call:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if not isinstance(arguments, dict):
        arguments = {} if arguments is None else {"arguments": arguments}
    return str(function.get("name")), arguments


def _text(content: Any) -> str:
    if isinstance(content, list | tuple):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
