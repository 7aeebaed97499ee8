"""Errors as Anthropic's clients read them: of the Messages routes, whatever goes wrong and wherever. Pure functions."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from kvd.errors import ContextLengthExceeded, RequestError

_MESSAGES_PATH = re.compile(r"(/v1)*/messages(/.*)?", re.DOTALL)  # also with a doubled base path
_CHAT_FORMAT = re.compile(r"\bresponse_format(\.json_schema)?\b")
"""What the chat form calls `output_config.format`."""

_KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Whether requests to `path`, known or not, come from a client of the Messages protocol."""
    return _MESSAGES_PATH.fullmatch(path) is not None


def messages_error_object(error: RequestError, request_id: str) -> dict[str, Any]:
    """The body of an error answer, which is also the data of an `error` event."""
    other = "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": _KINDS.get(error.status, other), "message": _message(error)},
        "request_id": request_id,
    }


def _message(error: RequestError) -> str:
    """The text, with names as this protocol has them.

    Agents read the two numbers of an overflow to know how much to leave out; the longest prompt that is served
    leaves one token of the context to the answer.
    """
    if isinstance(error, ContextLengthExceeded):
        num_tokens, limit = error.extra["n_prompt_tokens"], error.extra["n_ctx"]
        return f"prompt is too long: {num_tokens} tokens > {limit - 1} maximum"
    text = str(error)
    if error.param is not None and error.param not in text:  # there is no other place to name it
        text = f"{error.param}: {text}"
    return _CHAT_FORMAT.sub("output_config.format", text)
