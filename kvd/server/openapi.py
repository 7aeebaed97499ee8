"""GET /openapi.json: an OpenAPI 3.1 document of every route, made from the request types and one table.

Invariant: a document describes exactly the routes that it was built for; one that is missing from the table is a
`KeyError` when the document is built, which a test does for all of them. Structure and types of bodies come from the
types that parse them; what is checked after parsing is repeated here as far as JSON schema can say it. Event loop only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from kvd import __version__
from kvd.server import insight_routes as insight
from kvd.server.cache_control import DEFAULT_PREFIXES, MAX_PREFIXES, ChainRequest
from kvd.server.chat_types import ChatRequest
from kvd.server.completion_types import CompletionRequest
from kvd.server.control import SNAPSHOT_SECONDS
from kvd.server.messages_types import CountTokensRequest, MessagesRequest
from kvd.server.openapi_rules import add_rules
from kvd.server.operations import DetokenizeRequest, TokenizeRequest
from kvd.server.responses import json_response
from kvd.server.responses_types import ResponsesRequest

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

_ALWAYS = (400, 403, 500)
_KEYED = (401,)
_POSTED = (429,)
_BODY = (408, 413, 503)
_GENERATED = (404, 499, 503, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the table.

    body      what parses the request body; None: a body is not read
    answers   media types of the 200
    errors    statuses beyond those that every route of its kind may have
    query     parameters after the question mark, by name, as JSON schemas
    prefix    how the document names the route; each also answers with or without /v1
    is_open   no key is needed
    """

    summary: str
    body: type | None = None
    answers: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    query: Mapping[str, Mapping[str, Any]] | None = None
    prefix: str = ""
    is_open: bool = False


def _generation(summary: str, body: type) -> Operation:
    return Operation(summary, body, answers=(JSON, EVENTS), errors=_GENERATED, prefix="/v1")


def _whole(name: str, low: int, high: int, default: int) -> dict[str, dict[str, Any]]:
    """A query parameter that is a whole number."""
    return {name: {"type": "integer", "minimum": low, "maximum": high, "default": default}}


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/chat/completions"): _generation("Answer a conversation", ChatRequest),
    ("POST", "/completions"): _generation("Continue a text", CompletionRequest),
    ("POST", "/responses"): _generation("Answer a conversation, as OpenAI's Responses API", ResponsesRequest),
    ("POST", "/messages"): _generation("Answer a conversation, as Anthropic's Messages API", MessagesRequest),
    ("POST", "/messages/count_tokens"): Operation(
        "Count the prompt tokens of a Messages request", CountTokensRequest, errors=(404, 503), prefix="/v1"
    ),
    ("GET", "/models"): Operation("List the served models", prefix="/v1"),
    ("GET", "/models/{model}"): Operation("Describe one served model", errors=(404,), prefix="/v1"),
    ("GET", "/health"): Operation("Say whether requests are served", errors=(503,), is_open=True),
    ("GET", "/metrics"): Operation("Metrics in the text format of Prometheus", answers=(TEXT,), is_open=True),
    ("GET", "/openapi.json"): Operation("This document"),
    ("POST", "/tokenize"): Operation("Text or messages to token ids", TokenizeRequest, errors=(404,)),
    ("POST", "/detokenize"): Operation("Token ids to text", DetokenizeRequest, errors=(404,)),
    ("GET", "/kvd/snapshot"): Operation("The engine's state"),
    ("GET", "/kvd/events"): Operation(
        "Snapshots and the event log, without end",
        answers=(EVENTS,),
        query={"interval": {"type": "number", "minimum": SNAPSHOT_SECONDS[0], "maximum": SNAPSHOT_SECONDS[1]}},
    ),
    ("GET", "/kvd/requests"): Operation("The request table"),
    ("POST", "/kvd/requests/{request_id}/abort"): Operation("End a request", errors=(404,)),
    ("POST", "/kvd/requests/{request_id}/keep"): Operation("Keep the blocks of a turn that ended", errors=(404, 409)),
    ("GET", "/kvd/requests/{request_id}/timeline"): Operation("What became of a request", errors=(404,)),
    ("GET", "/kvd/timelines"): Operation(
        "The requests that ended last", query=_whole("limit", 1, insight.MAX_TIMELINES, insight.DEFAULT_TIMELINES)
    ),
    ("GET", "/kvd/blocks"): Operation(
        "What the blocks of the KV cache hold",
        query=_whole("cells", 1, insight.MAX_CELLS, insight.DEFAULT_CELLS) | _whole("group", 0, insight.MAX_GROUPS, 0),
    ),
    ("GET", "/kvd/doctor"): Operation("Why prompts missed the cache, and what to change", errors=(404,)),
    ("GET", "/kvd/reveal/{name}"): Operation("Prompt text behind a prefix or a miss", errors=(404,)),
    ("GET", "/kvd/log"): Operation(
        "The newest events of the log", query=_whole("limit", 1, insight.MAX_LOG_EVENTS, insight.DEFAULT_LOG_EVENTS)
    ),
    ("GET", "/kvd/cache/prefixes"): Operation(
        "Cached chains of blocks", query=_whole("limit", 1, MAX_PREFIXES, DEFAULT_PREFIXES)
    ),
    ("POST", "/kvd/cache/pin"): Operation("Hold a chain in the cache", ChainRequest, errors=(404, 409)),
    ("POST", "/kvd/cache/unpin"): Operation("Let a pinned chain go", ChainRequest, errors=(404, 409)),
    ("POST", "/kvd/cache/drop"): Operation("Forget a chain", ChainRequest, errors=(404, 409)),
    ("POST", "/kvd/cache/reset"): Operation("Drop what is cached"),
    ("POST", "/kvd/sessions/{name}/save"): Operation("Write a chain to a file", ChainRequest, errors=(404, 409)),
    ("POST", "/kvd/sessions/{name}/restore"): Operation("Read a chain from a file", errors=(404, 409)),
}
"""(Method, path without `/v1`) → operation."""

_REFERENCE = "#/components/schemas/{name}"
_STATUS_WORDS = {
    200: "The answer",
    400: "Something in the request is wrong; `param` names it",
    401: "No key, or a wrong one",
    403: "A foreign Host or Origin",
    404: "No such model, request, chain or session",
    408: "The body did not arrive in time",
    409: "The request still runs, or the session cannot be used",
    413: "The body is too large",
    429: "The key is over its limit; Retry-After says when to come back",
    499: "An operator aborted the request",
    500: "A fault of the server",
    503: "Loading, draining, or too many requests; Retry-After says when to come back",
    504: "The request ran out of time",
}
_ANY_NAME = {"type": "string", "minLength": 1}
_PATH_VARIABLES = {"name": {"type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"}}
"""Schemas of the variables in paths: `name` is a session's."""

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


async def openapi_document(request: web.Request) -> web.Response:
    """The document of the routes that this application has."""
    served = {
        (route.method, route.resource.canonical.removeprefix("/v1"))
        for route in request.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    return json_response(build_document(served))


def build_document(routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The document of `routes`: pairs (method, path without `/v1`), variables written `{name}`."""
    table = {route: OPERATIONS[route] for route in routes}
    bodies = [operation.body for operation in OPERATIONS.values() if operation.body in {o.body for o in table.values()}]
    types = [body for body in dict.fromkeys(bodies) if body is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    add_rules(components)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        if (method, path) in table:
            entry = _describe(path, operation, None if operation.body is None else by_type[operation.body])
            entry["operationId"] = f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', path).rstrip('_')}"
            paths.setdefault(operation.prefix + path, {})[method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvd",
            "version": __version__,
            "description": "Every route answers with and without /v1. Fields that are not listed are ignored.",
        },
        "paths": paths,
        "security": [{"bearer": []}, {"header": []}, {}],
        "components": {
            "schemas": {**components, "Error": _ERROR, "MessagesError": _MESSAGES_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _describe(path: str, operation: Operation, body: dict[str, Any] | None) -> dict[str, Any]:
    error = _REFERENCE.format(name="MessagesError" if path.startswith("/messages") else "Error")
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_VARIABLES.get(name, _ANY_NAME)}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (operation.query or {}).items()]
    entry: dict[str, Any] = {"summary": operation.summary, "parameters": parameters}
    if body is not None:
        entry["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if operation.is_open:
        entry["security"] = []
    answer: dict[str, Any] = {kind: {} for kind in operation.answers}  # an event stream has no one schema
    if JSON in answer:
        answer[JSON] = {"schema": {"type": "object"}}
    entry["responses"] = {"200": {"description": _STATUS_WORDS[200], "content": answer}} | {
        str(status): {
            "description": _STATUS_WORDS[status],
            "content": {JSON: {"schema": {"$ref": error}}},
        }
        for status in sorted(_error_statuses(path, operation))
    }
    return entry


def _error_statuses(path: str, operation: Operation) -> set[int]:
    statuses = {*_ALWAYS, *operation.errors}
    if not operation.is_open:
        statuses |= {*_KEYED}
    if operation.body is not None:
        statuses |= {*_BODY}
        if not path.startswith("/kvd/"):
            statuses |= {*_POSTED}
    return statuses
