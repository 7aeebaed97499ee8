"""An application served from a thread of its own, for clients that are processes or not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from aiohttp import web

from kvd.server.app import build_app
from kvd.server.lifecycle import serve
from kvd.server.settings import ServerSettings
from kvd.text.text_model import TextModel
from tests.server.fake_insight import FakeDoctor
from tests.server.fakes import END, IM_END, FakeEngine

OpenServer = Callable[[], AbstractAsyncContextManager[str]]
"""Starts a server on the running loop; gives its URL."""


@contextmanager
def serve_in_thread(open_server: OpenServer) -> Iterator[str]:
    """The URL of a server that runs until the context is left."""
    loop, is_up = asyncio.new_event_loop(), threading.Event()
    urls: list[str] = []
    ended = asyncio.Event()

    async def run() -> None:
        try:
            async with open_server() as url:
                urls.append(url)
                is_up.set()
                await ended.wait()
        finally:
            is_up.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="server")
    thread.start()
    try:
        assert is_up.wait(30)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@asynccontextmanager
async def fake_server(
    text: TextModel, *, engine: FakeEngine | None = None, port: int = 0, **settings: object
) -> AsyncIterator[str]:
    """The real application in front of the fake engine, a new one unless it is given."""
    engine = engine or FakeEngine(text)
    chosen = {"end_token_ids": frozenset({END, IM_END}), "shutdown_seconds": 0.2, **settings}
    app = build_app(engine, text, config=ServerSettings(**chosen), doctor=FakeDoctor())  # type: ignore[arg-type]
    server = await serve(app, "127.0.0.1", port)
    try:
        yield server.url
    finally:
        await server.close()
        await engine.close()


@asynccontextmanager
async def scripted_server(*routes: web.RouteDef) -> AsyncIterator[str]:
    """A server with handlers of a test's own."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
