"""Listening, draining and closing."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from kvd.errors import StartupError
from kvd.server.app import build_app
from kvd.server.lifecycle import serve
from kvd.server.settings import ServerSettings
from kvd.text.text_model import TextModel
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import MODEL, FakeEngine, parse_events

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("host", "port", "parts"),
    [("127.0.0.1", None, ("port ", "--port")), ("203.0.113.1", 0, ("203.0.113.1", "--host"))],
)
async def test_unusable_address_is_one_line(
    text_model: TextModel, host: str, port: int | None, parts: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if port is None else port
        app = build_app(FakeEngine(text_model), text_model, config=ServerSettings())
        with pytest.raises(StartupError) as refused:
            await serve(app, host, port)
    message = str(refused.value)
    assert all(part in message for part in parts)
    assert "\n" not in message
    if port:
        assert str(port) in message


async def test_url_is_reachable(text_model: TextModel) -> None:
    for host, expected in (("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:")):
        server = await serve(build_app(FakeEngine(text_model), text_model, config=ServerSettings()), host, 0)
        assert server.url.startswith(expected)
        assert server.port > 0
        await server.close()


async def test_draining_refuses_new_requests_and_finishes_running_ones(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    whole = asyncio.create_task(harness.post(CHAT, {"messages": USER}))
    stream = asyncio.create_task(harness.stream_text(CHAT, {"messages": USER}))
    await harness.engine.reach(2)
    harness.server.begin_drain()
    for path in (CHAT, "/v1/completions", "/health"):
        method = "GET" if path == "/health" else "POST"
        async with harness.session.request(
            method, harness.url + path, json={"model": MODEL, "messages": USER}
        ) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
            assert (await response.json())["error"]["code"] == "server_is_overloaded"
    for _ in range(24):
        harness.engine.permits.release()
    assert (await whole)[0] == 200
    assert parse_events(await stream)


async def test_what_the_end_of_the_drain_cancels_is_a_503(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    whole = asyncio.create_task(harness.post(CHAT, {"messages": USER}))
    await harness.engine.reach(1)
    harness.server.begin_drain()
    for request_id in harness.engine.running_ids:
        await harness.engine.abort(request_id)
    status, answer = await whole
    assert (status, answer["error"]["code"]) == (503, "server_is_overloaded")


async def test_close_ends_what_still_runs(start_server: StartServer) -> None:
    harness = await start_server(keepalive_seconds=0.01)
    harness.engine.permits = asyncio.Semaphore(0)
    body = {"model": MODEL, "prompt": "a", "stream": True}
    async with harness.session.post(harness.url + "/v1/completions", json=body) as response:
        rest = asyncio.create_task(response.read())
        await harness.server.close()
        with pytest.raises(aiohttp.ClientPayloadError):
            await rest
    assert len(harness.engine.aborted) == 1
