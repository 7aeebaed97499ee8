"""/openapi.json describes every route, and a server that is asked by it answers as it says."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.mark.parametrize("name", RANGES)
async def test_stated_ranges_are_the_real_ones(harness: Harness, name: str) -> None:
    schema = build_document(ALL_ROUTES)["components"]["schemas"]["ChatRequest"]["properties"][name]
    number = next(choice for choice in schema["anyOf"] if choice["type"] != "null")
    for value in (number["minimum"] - 1, number["maximum"] + 1):
        assert (await harness.chat_error(**{name: value}))["param"] == name
    body = {"messages": USER, "kv_eviction": "streaming", name: number["maximum"]}
    status, answer = await harness.post("/v1/chat/completions", body)
    assert status == 200 or answer["error"]["message"].startswith(f"'{name}': "), "valid, if not offered"


# --------------------------------------------------------------------------- asked by a machine


@pytest.fixture(scope="module")
def server_url(text_model: TextModel) -> Iterator[str]:
    """The server has a thread of its own, since schemathesis is not asynchronous."""
    with serve_in_thread(lambda: fake_server(text_model, body_timeout_seconds=5)) as url:
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
@settings(max_examples=2000, **QUICK)
def test_the_same_with_many_examples(case: schemathesis.Case, server_url: str, session: requests.Session) -> None:
    case.call_and_validate(base_url=server_url, session=session, checks=CHECKS)
