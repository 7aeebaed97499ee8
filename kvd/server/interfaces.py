"""What the server needs of engine and text, as protocols: it never imports an implementation.

Everything here is called on the event loop, except `TextModel.encode_prompt` and `encode_chat`, which may
also be called from a worker thread.
"""

from __future__ import annotations

from typing import Protocol

from kvd.core import FinishReason, Request, TokenEvent
from kvd.observe.local_console import ConsoleEngine
from kvd.views import EngineInfo


class TokenStream(Protocol):
    """The token events of one request, a list per wake-up; the last event has a finish reason."""

    request_id: str

    def __aiter__(self) -> TokenStream: ...

    async def __anext__(self) -> list[TokenEvent]: ...

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request early; idempotent, and harmless after the end."""
        ...


class GenerationEngine(ConsoleEngine, Protocol):
    """The engine's façade."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Request) -> TokenStream:
        """Queue a request, or raise a `RequestError` at once."""
        ...

    def health(self) -> str | None:
        """None when requests are served, else one line that says why not."""
        ...
