"""The one middleware: access rules before a handler, and one shape for everything that goes wrong in it.

Event loop only. Invariant: whatever happens in a handler, the client gets JSON with a request id, or nothing
because it has left; keys, bodies and query strings are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from http import HTTPStatus

from aiohttp import web

from kvd.errors import EngineFailure, RequestError
from kvd.server.base_url import mend_base_url
from kvd.server.keys import Client
from kvd.server.messages_errors import is_messages_path, messages_error_object
from kvd.server.responses import (
    ErrorForm,
    error_object,
    error_response,
    request_too_large,
    short,
    translate_http_exception,
)
from kvd.server.state import CLIENT, REQUEST_ID, STATE, ServerState, describe_client, start_request_id

logger = logging.getLogger("kvd.server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_LEFT = 499
_BODY_STATUSES = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
OPEN_PATHS = frozenset({"/health", "/v1/health", "/metrics", "/v1/metrics"})
_IS_ORIGIN_ALLOWED = web.RequestKey("is_origin_allowed", bool)


@web.middleware
async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every request passes here, also those to unknown routes."""
    started = time.monotonic()
    start_request_id(request, "req")
    try:
        response = await _answer(request, handler)
    except (asyncio.CancelledError, ConnectionError):
        _log(request, CLIENT_LEFT, started)
        raise
    _log(request, response.status, started)
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    state = request.app[STATE]
    try:
        _check_access(request, state)
        if _is_preflight(request):
            return web.Response(status=HTTPStatus.NO_CONTENT)
        if request.path not in OPEN_PATHS:
            headers = request.headers
            key = state.guard.identify(headers.get("Authorization"), headers.get("x-api-key"))
            if key is not None:
                request[CLIENT] = Client.of_key(key)
        with _hold(request, state):
            return await handler(request)
    except RequestError as error:
        return _refuse(request, error)
    except web.HTTPRequestEntityTooLarge:
        return _refuse(request, request_too_large(state.settings.max_body_bytes))
    except web.HTTPException as error:
        path = request.rel_url.raw_path
        hint = await _without_slash(request) or mend_base_url(path, f"{request.scheme}://{short(request.host, 100)}")
        return translate_http_exception(error, method=request.method, path=path, form=_error_form(request), hint=hint)
    except ConnectionError:
        raise
    except Exception:
        logger.exception("request %s failed", request[REQUEST_ID])
        failure = EngineFailure(f"request {request[REQUEST_ID]} failed; the server's log says why")
        return error_response(failure, _error_form(request))


async def _without_slash(request: web.Request) -> str | None:
    """What route is meant where only the slashes at the end of the path are too many."""
    path = request.rel_url.raw_path
    meant = path.rstrip("/")
    if meant in ("", path):
        return None
    found = await request.app.router.resolve(request.clone(rel_url=meant))
    is_unknown = isinstance(found.http_exception, web.HTTPNotFound)
    return None if is_unknown else f"{short(meant, 100)} has no slash at its end"


def _error_form(request: web.Request) -> ErrorForm:
    """Decided by the path, since much goes wrong before a handler is found."""
    if is_messages_path(request.path):
        return partial(messages_error_object, request_id=request[REQUEST_ID])
    return error_object


def _refuse(request: web.Request, error: RequestError) -> web.Response:
    """The error as an answer; a connection whose body was not understood to its end cannot carry another request."""
    response = error_response(error, _error_form(request))
    if error.status in _BODY_STATUSES or request.content.exception() is not None:
        response.force_close()
    return response


@contextlib.contextmanager
def _hold(request: web.Request, state: ServerState) -> Iterator[None]:
    """What a request holds while it is answered: a place of its key's, except on control routes, and its body."""
    is_limited = request.method == "POST" and not request.path.removeprefix("/v1").startswith("/kvd/")
    with state.limits.hold(state.client(request)) if is_limited else contextlib.nullcontext():
        try:
            yield
        finally:
            state.bodies.release(request)


def _check_access(request: web.Request, state: ServerState) -> None:
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    state.guard.check_host(host)
    state.guard.check_origin(origin, host)
    request[_IS_ORIGIN_ALLOWED] = origin is not None


def _is_preflight(request: web.Request) -> bool:
    headers = request.headers
    return request.method == "OPTIONS" and "Origin" in headers and "Access-Control-Request-Method" in headers


async def add_common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Request id and CORS on every answer, errors and streams included (the `on_response_prepare` signal)."""
    headers = response.headers
    headers["Server"] = "kvd"
    headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    if is_messages_path(request.path):
        headers["request-id"] = request.get(REQUEST_ID, "")
    if "Origin" in request.headers:
        headers["Vary"] = "Origin"
    if not request.get(_IS_ORIGIN_ALLOWED):
        return
    headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
    headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
    if _is_preflight(request):
        wanted = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type, x-api-key")
        headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
        headers["Access-Control-Allow-Headers"] = wanted
        headers["Access-Control-Max-Age"] = "600"
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"


def _is_watching(request: web.Request) -> bool:
    """Whether it only looks at the server, as probes, scrapers and dashboards do several times a second."""
    path = request.path
    return path in OPEN_PATHS or (request.method == "GET" and path.removeprefix("/v1").startswith("/kvd/"))


def _log(request: web.Request, status: int, started: float) -> None:
    is_dull = _is_watching(request) and (status < 400 or status == CLIENT_LEFT)
    level = logging.DEBUG if is_dull else logging.INFO
    logger.log(
        level,
        "%s %s %d %.0f ms %s %s",
        request.method,
        short(request.rel_url.raw_path, 100),
        status,
        1000 * (time.monotonic() - started),
        request[REQUEST_ID],
        describe_client(request),
    )
