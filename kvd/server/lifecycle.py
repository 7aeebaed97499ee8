"""Listening, draining and closing. Event loop only.

Order of the end: new requests are refused (`begin_drain`), the caller lets the engine finish what runs, then
`close` ends event streams, waits shortly for open connections and cancels the rest.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from aiohttp import web

from kvd.errors import StartupError
from kvd.server.protocol import JsonServer
from kvd.server.state import STATE

BACKLOG = 1024


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        base = await super()._make_server()
        return JsonServer(
            base.request_handler, request_factory=base.request_factory, handler_cancellation=True, **self._kwargs
        )


def create_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a handler when its client leaves, and whose every error is JSON."""
    settings = app[STATE].settings
    return _Runner(app, access_log=None, shutdown_timeout=settings.shutdown_seconds, keepalive_timeout=75.0)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens on `host`:`port`."""

    app: web.Application
    runner: web.AppRunner
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where clients on this machine find it, without a trailing slash or `/v1`."""
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    def begin_drain(self) -> None:
        """Refuse new requests with 503 from now on; what runs goes on."""
        self.app[STATE].is_draining = True

    async def close(self) -> None:
        """Stop listening and end every connection."""
        self.begin_drain()
        await self.runner.cleanup()


async def serve(app: web.Application, host: str, port: int) -> RunningServer:
    """Listen on `host`:`port` (0: any free port) and return the bound address.

    Raises StartupError, one line, when the address cannot be used.
    """
    runner = create_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except BaseException as error:
        await runner.cleanup()
        if isinstance(error, OSError):
            raise _explain(error, host, port) from error
        raise
    bound_host, bound_port = runner.addresses[0][:2]
    return RunningServer(app, runner, str(bound_host), int(bound_port))


def _explain(error: OSError, host: str, port: int) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"port {port} on {host} is already in use; choose another with --port")
    if error.errno == errno.EACCES:
        return StartupError(f"port {port} needs more rights than this user has; choose one above 1023 with --port")
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return StartupError(f"{host} is no address of this machine; choose another with --host")
    return StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}")
