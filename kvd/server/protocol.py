"""The HTTP protocol of every server of ours, also of the one that answers while a model loads.

Event loop only. Invariant: what is no HTTP at all is answered in JSON too, and is one log line and no error of ours.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from kvd.errors import RequestError
from kvd.server.responses import error_response, short

logger = logging.getLogger("kvd.server")


class _Protocol(web.RequestHandler):
    """aiohttp answers what is no HTTP at all in plain text; here that, too, is JSON and one log line."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        if status >= 500:
            logger.error("answering failed", exc_info=exc)
            error = RequestError("the server failed; its log says why", status=status, kind="server_error")
        else:
            reason = short((message or "").strip().splitlines()[0] if message else "bad request", 100)
            logger.info("malformed request from %s: %s", request.remote, reason)
            error = RequestError(f"malformed HTTP request: {reason}", status=status)
        response = error_response(error)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A broken body was answered with a 400; that its connection then ends is no fault of ours."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


class JsonServer(web.Server):
    """aiohttp's low-level server with this protocol."""

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)
