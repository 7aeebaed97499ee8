"""Tool calls written as a Python list: `[get_weather(city="Paris", days=2), now()]`.

Purpose: one more of `tool_formats`. Nothing marks such a list, so it counts only at the beginning of an answer and only
with the names of tools that were offered. Values are Python literals, JSON's `true`, `false` and `null` included; what
is neither is passed on as a string, so that arguments are a JSON object whatever the model writes.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from kvd.errors import RequestError
from kvd.text.answer_source import AnswerSource, Steps
from kvd.text.grammar import MAX_CALLS, GrammarSpec, schema_text
from kvd.text.tool_formats import Call, Tool, ToolFormat, read_name

_JSON_WORDS = {"true": True, "false": False, "null": None}


class Pythonic(ToolFormat):
    """`[name(argument=value, …), …]`, as Llama 4 and some of Llama 3.2 write it."""

    name = "pythonic"

    def read(self, source: AnswerSource, tool_names: Collection[str]) -> Steps[None]:
        is_list = (yield from source.skip_spaces()) == "["
        while is_list and (yield from _reads_call(source, tool_names)):
            char = yield from source.skip_spaces()
            is_list = char == ","
            if char == "]":
                source.drop()
                break
        if source.held:
            source.give_back()
        while True:
            yield from source.next()
            source.release_text()

    def write(self, calls: Sequence[Call]) -> str:
        written = (
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        return f"[{', '.join(written)}]"

    def grammar(self, tools: Sequence[Tool], *, one_call: bool) -> GrammarSpec:
        more = "" if one_call else f' (", " call){{0,{MAX_CALLS - 1}}}'
        rules = [f'start: "[" call{more} "]"']
        rules.append("call: " + " | ".join(f"call{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            rules += _call_rules(f"call{index}", tool)
        return GrammarSpec("lark", "\n".join(rules), param="tools")


# --------------------------------------------------------------------------- reading


def _reads_call(source: AnswerSource, tool_names: Collection[str]) -> Steps[bool]:
    """One call; False where there is none. From its first argument on it stands, and ends where it cannot go on."""
    name = yield from read_name(source, (yield from source.skip_spaces()))
    if name not in tool_names or source.held[-1] != "(":
        return False
    num_arguments = 0
    is_whole = False
    while not is_whole:
        if (char := (yield from source.skip_spaces())) == ")":
            is_whole = True
            break
        key = yield from read_name(source, char)
        char = source.held[-1]
        if char.isspace():
            char = yield from source.skip_spaces()
        if not key.isidentifier() or char != "=":
            break
        value, char = yield from _read_value(source)
        if not num_arguments:
            source.begin_call(name)
        source.drop()
        source.add_arguments(f"{', ' if num_arguments else '{'}{json.dumps(key)}: {_as_json(value)}")
        num_arguments += 1
        is_whole = char == ")"
    if num_arguments:
        source.add_arguments("}")
    elif is_whole:
        source.begin_call(name)
        source.add_arguments("{}")
    else:
        return False
    source.end_call()
    return is_whole


def _read_value(source: AnswerSource) -> Steps[tuple[str, str]]:
    """The text of a value, and the comma or bracket behind it."""
    start = len(source.held)
    depth = 0
    quote = ""
    is_escaped = False
    while True:
        char = yield from source.next()
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in ",)" and not depth:
            return "".join(source.held[start:-1]).strip(), char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1


def _as_json(text: str) -> str:
    """The value as JSON; text that is no literal becomes a string."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in the model's strings
            tree = _Words().visit(ast.parse(text, mode="eval"))
        return json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


class _Words(ast.NodeTransformer):
    """JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


# --------------------------------------------------------------------------- grammar


def _call_rules(rule: str, tool: Tool) -> list[str]:
    """Lark rules for a call: required arguments in their order, then some of the others. Values are JSON."""
    schema = tool.schema
    properties: dict[str, Any] = schema.get("properties") or {}
    names = list(properties)
    required = [name for name in names if name in (schema.get("required") or ())]
    optional = [name for name in names if name not in required]
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = []
    for index, name in enumerate(names):
        if not name.isidentifier():
            raise RequestError(f"the tool {tool.name} has a parameter that is no name in Python", param="tools")
        value = properties[name] if isinstance(properties[name], dict) else {}
        options = {"whitespace_flexible": False, "lenient": not tool.is_strict}
        rules.append(f'{rule}_{index}: "{name}=" {rule}_value{index}')
        text = schema_text({**shared, **value, "x-guidance": options}, param="tools")
        rules.append(f"{rule}_value{index}: %json {text}")
    places = {name: f"{rule}_{index}" for index, name in enumerate(names)}
    more = [f'(", " {places[name]})?' for name in optional]
    if required:
        arguments = ' ", " '.join(places[name] for name in required) + " " + " ".join(more)
    else:
        starts = [f"{places[name]} {' '.join(more[index + 1 :])}" for index, name in enumerate(optional)]
        arguments = f"({' | '.join(starts)})?" if starts else ""
    return [f'{rule}: "{tool.name}(" {arguments} ")"', *rules]
