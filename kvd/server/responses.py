"""JSON answers and the error shape. Pure functions, event loop only.

Invariant: every error that leaves the server is `{"error": {"message", "type", "param", "code", …}}` with
these four keys always present, unless the protocol of its route has another form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from kvd.errors import RequestError

SHORT_CHARACTERS = 40

ErrorForm = Callable[[RequestError], dict[str, Any]]
"""Makes the body of an error answer."""


def json_response(data: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """`data` as JSON: builtins, dataclasses or msgspec structs."""
    return web.Response(body=msgspec.json.encode(data), status=status, headers=headers, content_type="application/json")


def error_object(error: RequestError) -> dict[str, Any]:
    """The body of an error answer, which is also what a stream sends when it fails half-way."""
    fields = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
    return {"error": {**error.extra, **fields}}


def error_response(error: RequestError, form: ErrorForm = error_object) -> web.Response:
    headers = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(form(error), status=error.status, headers=headers)


def invalid(param: str | None, message: str) -> RequestError:
    """A 400 that blames one parameter of the request."""
    return RequestError(message, param=param)


def request_too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        f"the request body is larger than {limit_bytes} bytes (setting max_body_size)",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        code="request_too_large",
    )


def translate_http_exception(
    error: web.HTTPException, *, method: str, path: str, form: ErrorForm = error_object, hint: str | None = None
) -> web.Response:
    """aiohttp's own refusals (unknown route, wrong method, …) in our shape; `hint` says what route there is."""
    if error.status == HTTPStatus.NOT_FOUND:
        message = f"there is no route {method} {short(path)}" + (f": {hint}" if hint else "")
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{short(path)} does not support {method}; it supports {allowed}"
    else:
        message = error.reason
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    response = error_response(RequestError(message, status=error.status, kind=kind), form)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def short(text: object, limit: int = SHORT_CHARACTERS) -> str:
    """At most `limit` characters of someone's input, printable, for an error message or a log line."""
    clipped = str(text)[: limit + 1]
    printable = re.sub(r"[^\x20-\x7e\u00a1-\ud7ff]", "?", clipped)
    return printable if len(clipped) <= limit else printable[: limit - 1] + "…"
