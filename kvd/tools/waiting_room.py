"""What answers while the model is being loaded: 503 to everybody, with the reason.

Purpose: a client that comes early gets an answer, not a refused or a hanging connection. Owner: a thread with an
event loop of its own, so that the main thread can load and still be interrupted. Invariant: it works on
duplicates of the sockets; those of the caller stay open and keep listening after `close`, so that no connection
is refused while one server takes over from the other.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence

from aiohttp import web

from kvd.server.protocol import JsonServer

RETRY_AFTER_SECONDS = 5


class WaitingRoom:
    """Answers on `sockets` from construction until `close`."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = [listening.dup() for listening in sockets]
        self._loop = asyncio.new_event_loop()
        self._done: asyncio.Event | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-waiting-room", daemon=True)
        self._thread.start()
        self._is_up.wait()

    def close(self) -> None:
        """Finish the answers that are being sent and end the thread; idempotent."""
        if self._thread.is_alive() and self._done is not None:
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._is_up.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._done = asyncio.Event()
        runner = web.ServerRunner(JsonServer(_refuse), shutdown_timeout=1.0)
        await runner.setup()
        try:
            for duplicate in self._sockets:
                await web.SockSite(runner, duplicate).start()
            self._is_up.set()
            await self._done.wait()
        finally:
            await runner.cleanup()
            await _cancel_others()


async def _cancel_others() -> None:
    """End what waits for bodies that never came; the loop would complain of it when it closes."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _refuse(request: web.BaseRequest) -> web.StreamResponse:
    error = {
        "message": "the model is being loaded",
        "type": "server_error",
        "param": None,
        "code": "server_is_overloaded",
    }
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"}
    response = web.json_response({"error": error}, status=503, headers=headers)
    response.force_close()
    return response
