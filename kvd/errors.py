"""Every error that kvd raises on purpose.

Purpose: one readable line for a person, and the right exit code or HTTP status for a machine.
Anything else that reaches the top is a bug of ours and is reported as one.

    KvdError
    ├── ConfigError             a bad flag, key or value: exit code 2
    ├── StartupError            kvd cannot start here: exit code 1
    │   ├── ModelNotFound       no such directory, catalogue name or hub id
    │   ├── DownloadError       the hub or the package index did not deliver
    │   ├── CheckpointError     files missing, truncated or contradicting each other; the file is named
    │   ├── UnsupportedModel    an architecture, format or tensor type that kvd does not serve, by name
    │   └── NotEnoughMemory     does not fit; carries the largest setting that would
    └── RequestError            one request is refused: HTTP status, type, code and parameter
        ├── ContextLengthExceeded
        ├── ServerOverloaded    queue full, loading or draining: 503 with Retry-After
        ├── SessionError        a session file is missing, damaged or another model's
        └── EngineFailure       a fault of ours while the request ran: 500
"""

from __future__ import annotations

from typing import Any


class KvdError(Exception):
    """Base class. `str(error)` is one line that a user can act on."""

    exit_code = 1


class ConfigError(KvdError):
    """A flag, key or value that kvd cannot use; names source, key, expectation and nearest valid name."""

    exit_code = 2


class StartupError(KvdError):
    """kvd cannot start: port in use, disk full, missing files."""


class ModelNotFound(StartupError):
    """The `model` string is neither a directory, nor in the catalogue, nor on the hub."""


class DownloadError(StartupError):
    """A download broke off, was refused or did not match its checksum."""


class CheckpointError(StartupError):
    """A checkpoint's files are missing, truncated or contradict each other."""


class UnsupportedModel(StartupError):
    """The model is readable, but kvd does not serve its architecture, format or tensor type."""


class NotEnoughMemory(StartupError):
    """The configuration does not fit; the message has the numbers and the largest setting that fits."""


class RequestError(KvdError):
    """One request is refused, nobody else is affected.

    `status` is the HTTP status, `kind` the `type` field of the error body, `code` and `param` its fields
    of the same names, `extra` further fields of the error object, `retry_after_seconds` the header.
    """

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        kind: str | None = None,
        code: str | None = None,
        extra: dict[str, Any] | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.extra = extra or {}
        self.retry_after_seconds = retry_after_seconds
        if status is not None:
            self.status = status
        if kind is not None:
            self.kind = kind
        if code is not None:
            self.code = code


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for one more token, in the model's context or in the whole KV pool."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, num_prompt_tokens: int, limit_tokens: int, param: str = "messages") -> None:
        super().__init__(message, param=param, extra={"n_prompt_tokens": num_prompt_tokens, "n_ctx": limit_tokens})


class ServerOverloaded(RequestError):
    """Queue full, still loading, or draining."""

    status = 503
    kind = "server_error"
    code = "server_is_overloaded"

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)


class SessionError(RequestError):
    """A session cannot be saved or restored: no such name or chain, a damaged file, another model or format."""

    code = "session_error"


class EngineFailure(RequestError):
    """The engine failed while this request ran; the message carries the request id."""

    status = 500
    kind = "server_error"
