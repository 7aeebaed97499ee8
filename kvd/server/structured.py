"""What a request's answer is held to: from the fields of a body to a grammar. Pure functions.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` say the same; a request may use one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvd.server.common_types import GenerationFields
from kvd.server.responses import invalid
from kvd.server.validation import check_object, unsupported
from kvd.text.grammar import GrammarSpec, schema_text

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def requested_grammar(body: GenerationFields) -> GrammarSpec | None:
    """The grammar that `body` asks for, if any. Raises a 400 for a malformed or doubled wish."""
    wishes = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *(
            _spec(kind, value, param=field)
            for field, kind in _GUIDED.items()
            if (value := getattr(body, field)) is not None
        ),
    ]
    if len(wishes) > 1:
        raise invalid(wishes[1].param, f"'{wishes[0].param}' and '{wishes[1].param}' exclude each other")
    return wishes[0] if wishes else None


def _of_response_format(value: Any) -> list[GrammarSpec]:
    if value is None or value["type"] == "text":
        return []
    if value["type"] == "json_object":
        return [GrammarSpec("json_object")]
    wanted = value["json_schema"]
    if not isinstance(schema := wanted.get("schema"), dict):
        raise invalid("response_format.json_schema.schema", "'response_format.json_schema.schema' must be an object")
    param = "response_format"
    return [GrammarSpec("json_schema", schema_text(schema, param=param), strict=wanted.get("strict") is True)]


def _of_structured_outputs(value: Any) -> list[GrammarSpec]:
    if value is None:
        return []
    wishes = {key: wish for key, wish in check_object("structured_outputs", value).items() if wish is not None}
    if unknown := [key for key in wishes if key not in _KINDS and wishes[key] is not False]:
        raise unsupported(f"structured_outputs.{unknown[0][:40]}", f"must be one of {', '.join(_KINDS)}")
    return [
        _spec(key, wish, param=f"structured_outputs.{key}")
        for key, wish in wishes.items()
        if key in _KINDS and wish is not False
    ]


def _spec(kind: str, value: Any, *, param: str) -> GrammarSpec:
    match kind:
        case "json_object":
            return GrammarSpec("json_object", param=param)
        case "json":
            return GrammarSpec("json_schema", schema_text(_schema(value, param), param=param), param=param)
        case "choice":
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise invalid(param, f"'{param}' must be a list of strings")
            return GrammarSpec("choice", tuple(value), param=param)
        case _:
            if not isinstance(value, str) or not value:
                raise invalid(param, f"'{param}' must be a string that is not empty")
            return GrammarSpec("regex" if kind == "regex" else "lark", value, param=param)


def _schema(value: Any, param: str) -> dict[str, Any]:
    """A schema as an object or as JSON text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(param, f"'{param}' is not valid JSON") from None
    return check_object(param, value)
