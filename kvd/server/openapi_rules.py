"""What the types of request bodies leave open and their checks demand, as far as JSON schema can say it.

A table of constraints by schema, property and JSON type, added to what msgspec makes of the types. A test sends what
lies just outside of each and wants a 400 for it, so that the table cannot promise what is not checked. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from kvd.core import KVEviction
from kvd.server.cache_control import MAX_CHAIN_CHARACTERS
from kvd.server.chat_types import MAX_TOOL_NAME, TOOL_NAME
from kvd.server.common_types import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, RANGES
from kvd.server.messages_types import MAX_LONG_TOOL_NAME

Rule = Mapping[str, Mapping[str, Any]]
"""JSON type → constraints on values of that type."""

_MAX_TOKENS = 2**31
_AT_LEAST_ONE: Rule = {"array": {"minItems": 1}}


def _integer(low: int, high: int) -> Rule:
    return {"integer": {"minimum": low, "maximum": high}}


def _tool_name(max_characters: int) -> Rule:
    return {"string": {"pattern": f"^{TOOL_NAME.pattern}$", "maxLength": max_characters}}


def _words(*words: str) -> Rule:
    return {"string": {"enum": list(words)}}


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOP: Rule = {
    "string": {"minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
    "array": {"maxItems": MAX_STOP_STRINGS, "items": _STOP_STRING},
}
_SHARED: dict[str, Rule] = {
    **{
        name: {kind: {"minimum": low, "maximum": high} for kind in ("integer", "number")}
        for name, (low, high) in RANGES.items()
    },
    "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
    "top_k": {"integer": {"minimum": -1}},
    "stop": _STOP,
    "kv_eviction": _words(*get_args(KVEviction)),
}

RULES: dict[str, dict[str, Rule]] = {
    "ChatRequest": _SHARED
    | {
        "messages": _AT_LEAST_ONE,
        "max_tokens": _integer(1, _MAX_TOKENS),
        "max_completion_tokens": _integer(1, _MAX_TOKENS),
        "top_logprobs": _integer(0, 20),
        "tool_choice": _words("none", "auto", "required"),
    },
    "CompletionRequest": _SHARED
    | {
        "prompt": {"string": {"minLength": 1}, "array": {"minItems": 1}},
        "max_tokens": _integer(0, _MAX_TOKENS),
        "logprobs": _integer(0, 5),
        "best_of": _integer(1, 128),
    },
    "ResponsesRequest": {name: rule for name, rule in _SHARED.items() if name != "n"}
    | {
        "input": {"string": {"minLength": 1}, "array": {"minItems": 1}},
        "max_output_tokens": _integer(1, _MAX_TOKENS),
        "top_logprobs": _integer(0, 20),
        "truncation": _words("auto", "disabled"),
    },
    "MessagesRequest": {"messages": _AT_LEAST_ONE, "max_tokens": _integer(1, _MAX_TOKENS)},
    "CountTokensRequest": {"messages": _AT_LEAST_ONE},
    "ChatMessage": {"role": _words("system", "developer", "user", "assistant", "tool")},
    "ContentPart": {"type": _words("text")},
    "Tool": {"type": _words("function")},
    "FunctionDefinition": {"name": _tool_name(MAX_TOOL_NAME)},
    "InputMessage": {"role": _words("user", "assistant", "system")},
    "ToolDefinition": {"name": _tool_name(MAX_LONG_TOOL_NAME)},
    "ToolChoice": {"type": _words("auto", "any", "tool", "none")},
    "Thinking": {"type": _words("enabled", "disabled", "adaptive", "between_tools")},
    "DetokenizeRequest": {"tokens": {"array": {"items": {"type": "integer", "minimum": 0}}}},
    "ChainRequest": {"chain": {"string": {"minLength": 1, "maxLength": MAX_CHAIN_CHARACTERS}}},
}
"""Schema → property → rule."""

REQUIRED: Mapping[str, Mapping[str, Any]] = {
    name: {"model": {"type": "string"}} for name in ("ChatRequest", "CompletionRequest")
}
"""Schema → properties whose type may be left out where it stands for something else → what they are in a request."""


def add_rules(components: Mapping[str, dict[str, Any]]) -> None:
    """Add the rules to the schemas in `components`, in place."""
    for name, needed in REQUIRED.items():
        if (schema := components.get(name)) is not None:
            schema["properties"] |= needed
            schema["required"] = sorted({*schema.get("required", ()), *needed})
    for name, rules in RULES.items():
        properties = components.get(name, {}).get("properties", {})
        for field, rule in rules.items():
            schema = properties.get(field, {})
            for choice in schema.get("anyOf", (schema,)):
                choice.update(rule.get(choice.get("type", ""), {}))
