"""Whether the parameters of a tool are a JSON schema at all, whatever a grammar could make of them. Pure functions.

Only what draft 2020-12 forbids is refused, as OpenAI and Anthropic do, and not all of that: `required` as a boolean and
lists under `items` come from older drafts, references and patterns are for whoever resolves them.
"""

from __future__ import annotations

from typing import Any

from kvd.errors import RequestError
from kvd.server.responses import invalid, short

_Place = tuple[Any, str]
"""Where a schema lies: the place of the one around it, and the keys from there; () is the whole."""

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
                      "additionalItems", "unevaluatedItems", "unevaluatedProperties"})  # fmt: skip
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_KNOWN = _SCHEMAS | _LISTS | _MAPS | {"type", "enum", "required"}


def check_schema(name: str, schema: dict[str, Any]) -> None:
    """Raise a 400 that names `name` and says where in the schema the fault is."""
    waiting: list[tuple[_Place | tuple[()], Any]] = [((), schema)]
    while waiting:
        place, part = waiting.pop()
        if not isinstance(part, dict):
            if isinstance(part, bool):
                continue
            raise _wrong(name, place, "must be a schema: an object, true or false")
        for key in _KNOWN.intersection(part):
            value = part[key]
            if key == "type":
                if not (isinstance(value, str) and value in _TYPES):
                    _check_types(name, (place, key), value)
            elif key in _MAPS:
                if not isinstance(value, dict):
                    raise _wrong(name, (place, key), "must be an object of schemas")
                inner = (place, key)
                waiting += [((inner, each), value[each]) for each in value]
            elif key in _SCHEMAS or key in _LISTS:
                if isinstance(value, list):
                    inner = (place, key)
                    waiting += [((inner, str(index)), each) for index, each in enumerate(value)]
                elif key in _LISTS:
                    raise _wrong(name, (place, key), "must be a list of schemas")
                else:
                    waiting.append(((place, key), value))
            elif key == "enum":
                if not isinstance(value, list):
                    raise _wrong(name, (place, key), "must be a list")
            elif not isinstance(value, bool) and not _is_list_of_strings(value):
                raise _wrong(name, (place, key), "must be a list of strings")


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check_types(name: str, place: _Place, value: Any) -> None:
    for kind in value if isinstance(value, list) else [value]:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _wrong(name, place, f"is '{short(kind)}', which is no type of JSON schema")


def _wrong(name: str, place: _Place | tuple[()], fault: str) -> RequestError:
    keys: list[str] = []
    while place:
        place, key = place
        keys.append(key)
    where = "/".join(reversed(keys)) or "it"
    return invalid(name, f"'{name}' is no JSON schema: {short(where, 100)} {fault}")
