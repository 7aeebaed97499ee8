"""/openapi.json describes every route, and a server that is asked by it answers as it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvd.server.app import ROUTES
from kvd.server.common_types import RANGES
from kvd.server.openapi import OPERATIONS, build_document
from kvd.server.openapi_rules import RULES
from kvd.text.text_model import TextModel
from tests.server.conftest import USER, Harness
from tests.server.threaded import fake_server, serve_in_thread

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = ["/kvd/events"]
ALL_ROUTES = {(method, path.replace("{model:.+}", "{model}")) for method, path, _ in ROUTES}


def test_every_route_is_described_and_nothing_else() -> None:
    assert set(OPERATIONS) == ALL_ROUTES


async def test_the_server_hands_the_document_out(harness: Harness) -> None:
    for path in ("/openapi.json", "/v1/openapi.json"):
        status, document = await harness.call("GET", path)
        assert status == 200
        assert document == build_document(ALL_ROUTES)
    assert document["openapi"].startswith("3.1")
    references = set(find_values(document, "$ref"))
    assert references <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    identifiers = [entry["operationId"] for entries in document["paths"].values() for entry in entries.values()]
    assert len(set(identifiers)) == len(identifiers) == len(ALL_ROUTES)


def find_values(value: Any, key: str) -> Iterator[Any]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict) and key in value:
        yield value[key]
    for child in children:
        yield from find_values(child, key)


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "ChatRequest": ("/v1/chat/completions", {"messages": USER}),
    "CompletionRequest": ("/v1/completions", {"prompt": "a"}),
    "ResponsesRequest": ("/v1/responses", {"model": "alias", "input": "a"}),
    "MessagesRequest": ("/v1/messages", {"messages": USER, "max_tokens": 3}),
    "CountTokensRequest": ("/v1/messages/count_tokens", {"messages": USER}),
    "ChainRequest": ("/kvd/cache/pin", {"chain": "ab" * 16}),
}


def values_outside(constraints: Mapping[str, Any]) -> Iterator[Any]:
    """Values that a rule excludes, as near to it as they get."""
    for word, limit in constraints.items():
        match word:
            case "minimum":
                yield limit - 1
            case "maximum":
                yield limit + 1
            case "exclusiveMinimum":
                yield limit
            case "minLength":
                yield "x" * (limit - 1)
            case "maxLength":
                yield "x" * (limit + 1)
            case "minItems":
                yield []
            case "maxItems":
                yield ["x"] * (limit + 1)
            case "enum":
                yield limit[0] + "x"
            case "items":
                yield from ([value] for value in values_outside(limit))
            case "type":
                pass
            case _:
                raise AssertionError(word)


@pytest.mark.parametrize("name", ASKED)
async def test_what_the_document_excludes_is_refused(harness: Harness, name: str) -> None:
    route, body = ASKED[name]
    assert (await harness.post(route, body))[0] == 200
    num_values = 0
    for field, rule in RULES[name].items():
        for value in (value for constraints in rule.values() for value in values_outside(constraints)):
            status, answer = await harness.post(route, {**body, field: value})
            assert status == 400, (field, value, answer)
            assert field in answer["error"]["message"] or field == "chain", answer
            num_values += 1
    assert num_values


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "ResponsesRequest"])
async def test_what_the_document_allows_is_not_refused(harness: Harness, name: str) -> None:
    route, body = ASKED[name]
    for field, (low, high) in RANGES.items():
        if field not in RULES[name]:
            continue
        for value in (low, high):
            status, answer = await harness.post(route, {**body, "kv_eviction": "streaming", field: value})
            assert status == 200, (field, value, answer)


# --------------------------------------------------------------------------- asked by a machine


@pytest.fixture(scope="module")
def server_url(text_model: TextModel) -> Iterator[str]:
    """The server has a thread of its own, since schemathesis is not asynchronous."""
    with serve_in_thread(lambda: fake_server(text_model, body_timeout_seconds=5, served_names=("*",))) as url:
        yield url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        opened.trust_env = False
        yield opened


schema = schemathesis.openapi.from_dict(build_document(ALL_ROUTES)).exclude(path=ENDLESS)
QUICK = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck), "database": None}


@schema.parametrize()
@settings(max_examples=20, **QUICK)
def test_no_fault_and_no_status_that_is_not_stated(
    case: schemathesis.Case, server_url: str, session: requests.Session
) -> None:
    case.call_and_validate(base_url=server_url, session=session, checks=CHECKS)


@pytest.mark.full
@schema.parametrize()
@settings(max_examples=300, **QUICK)
def test_the_same_with_many_examples(case: schemathesis.Case, server_url: str, session: requests.Session) -> None:
    case.call_and_validate(base_url=server_url, session=session, checks=CHECKS)
