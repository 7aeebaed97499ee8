"""Parameters of tools that are no JSON schema are refused whatever the choice; what real clients send is not."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.server.tool_schemas import check_schema
from tests.server.conftest import USER, Harness

BAD: list[tuple[Any, str]] = [
    ({"type": "objekt"}, "type is 'objekt'"),
    ({"type": "STRING"}, "type is 'STRING'"),
    ({"type": None}, "type is 'None'"),
    ({"type": ["object", "nul"]}, "type is 'nul'"),
    ({"properties": []}, "properties must be an object of schemas"),
    ({"properties": {"a": 3}}, "properties/a must be a schema"),
    ({"properties": {"a": {"items": {"type": "any"}}}}, "properties/a/items/type is 'any'"),
    ({"properties": {"a": {"enum": "x"}}}, "properties/a/enum must be a list"),
    ({"required": "a"}, "required must be a list of strings"),
    ({"required": [1]}, "required must be a list of strings"),
    ({"anyOf": {}}, "anyOf must be a list of schemas"),
    ({"allOf": [{}, {"not": None}]}, "allOf/1/not must be a schema"),
    ({"$defs": {"a": {"type": "x" * 100}}}, "$defs/a/type is 'xxx"),
]

GOOD: list[Any] = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"a": {"type": "string"}}},
    {"type": ["object", "null"], "properties": {"a": {"enum": ["x", None, 3]}, "b": True}},
    {"properties": {"type": {"type": "string"}, "required": {"type": "boolean"}, "enum": {"const": 1}}},
    {"properties": {"a": {"type": "string", "required": True}}},
    {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
    {"properties": {"a": {"type": "array", "items": [{"type": "string"}], "minItems": 1}}},
    {"properties": {"a": {"type": "string", "format": "uri", "pattern": "(?<year>\\d{4})", "default": {"type": 3}}}},
    {"additionalProperties": {}, "patternProperties": {"^x": {}}, "examples": [{"type": 7}], "x-order": 3},
]
ROUTES = {
    "/v1/chat/completions": (lambda schema: {"type": "function", "function": {"name": "f", "parameters": schema}},
                             {"messages": USER}, "tools[0].function.parameters"),
    "/v1/responses": (lambda schema: {"type": "function", "name": "f", "parameters": schema},
                      {"model": "alias", "input": "Hi"}, "tools[0].parameters"),
    "/v1/messages": (lambda schema: {"name": "f", "input_schema": schema},
                     {"messages": USER, "max_tokens": 3}, "tools[0].input_schema"),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("schema", "fault"), BAD, ids=str)
async def test_what_is_no_schema_is_refused(harness: Harness, route: str, schema: Any, fault: str) -> None:
    tool, body, name = ROUTES[route]
    status, answer = await harness.post(route, {**body, "tools": [tool(schema)]})
    assert status == 400
    assert fault in answer["error"]["message"]
    assert f"'{name}' is no JSON schema" in answer["error"]["message"]
    assert answer["error"].get("param", name) == name
    assert not harness.engine.submitted


@pytest.mark.parametrize("schema", GOOD, ids=str)
async def test_what_clients_send_is_not(harness: Harness, schema: Any) -> None:
    for route, (tool, body, _) in ROUTES.items():
        status, answer = await harness.post(route, {**body, "tools": [tool(schema)]})
        assert status == 200, (route, answer)


def test_a_deep_schema_is_no_recursion() -> None:
    schema: dict[str, Any] = {"type": "objekt"}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(Exception, match="is 'objekt'"):
        check_schema("tools", schema)
    while schema.get("items"):  # a nest of this depth must not be left to the interpreter
        schema = schema.pop("items")
