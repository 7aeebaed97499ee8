"""A real server on a loopback socket in front of the fake engine, and real clients that ignore proxies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest

from kvd.observe.event_log import EventLog
from kvd.server.app import build_app
from kvd.server.lifecycle import RunningServer, serve
from kvd.server.settings import ServerSettings
from kvd.text.text_model import TextModel
from tests.server.fake_insight import FakeDoctor
from tests.server.fakes import END, IM_END, MODEL, FakeEngine, build_text_model


@dataclass
class Harness:
    """One running server and what tests need to talk to it."""

    engine: FakeEngine
    server: RunningServer
    session: aiohttp.ClientSession
    event_log: EventLog
    clients: dict[str, openai.AsyncOpenAI] = field(default_factory=dict)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    def client(self, api_key: str = "none") -> openai.AsyncOpenAI:
        """The asynchronous client; made once per key and closed with the harness."""
        if api_key not in self.clients:
            self.clients[api_key] = openai.AsyncOpenAI(
                base_url=f"{self.url}/v1",
                api_key=api_key,
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False),
            )
        return self.clients[api_key]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection with a small receive buffer; closed with the harness."""
        sock = socket.socket(socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.server.host, self.server.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**22)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        for client in self.clients.values():
            await client.close()
        await self.session.close()
        await self.server.close()
        await self.engine.close()

    def sync_client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
        )

    async def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of one request; `body` is JSON data, or bytes as they are.

        Where it names no model, as few tests are about models, it asks for the one that is served.
        """
        if isinstance(body, dict) and path.partition("?")[0].endswith("/completions"):
            body = {"model": MODEL, **body}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.session.request(method, self.url + path, data=data, headers=headers) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        return await self.call("POST", path, body, **options)

    async def chat_error(self, **fields: Any) -> dict[str, Any]:
        """The error object that a chat request with these fields gets; it must be a 400."""
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        status, answer = await self.post("/v1/chat/completions", body)
        assert status == 400, answer
        assert {"message", "type", "param", "code"} <= set(answer["error"])
        error: dict[str, Any] = answer["error"]
        return error

    async def stream_text(self, path: str, body: dict[str, Any]) -> str:
        """The whole body of a streamed answer."""
        async with self.session.post(self.url + path, json={"model": MODEL, **body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            return await response.text()


StartServer = Callable[..., Awaitable[Harness]]


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return build_text_model(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def start_server(text_model: TextModel) -> AsyncIterator[StartServer]:
    """Start servers with given settings, and with another text model than usual; all are closed at the end."""
    harnesses: list[Harness] = []

    async def start(*, text: TextModel = text_model, **settings: Any) -> Harness:
        settings.setdefault("end_token_ids", frozenset({END, IM_END}))
        settings.setdefault("shutdown_seconds", 0.2)
        engine, event_log = FakeEngine(text), EventLog()
        config = ServerSettings(**settings)
        app = build_app(engine, text, config=config, event_log=event_log, doctor=FakeDoctor())
        server = await serve(app, "127.0.0.1", 0)
        harnesses.append(Harness(engine, server, aiohttp.ClientSession(), event_log))
        return harnesses[-1]

    yield start
    for harness in harnesses:
        await harness.close()


@pytest.fixture
async def harness(start_server: StartServer) -> Harness:
    return await start_server()


class LogLines(logging.Handler):
    """The server's log lines, and a way to wait for one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._arrived = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._arrived.set()

    async def find(self, part: str) -> str:
        """The first line with `part` in it, now or later."""
        while not (found := [line for line in self.lines if part in line]):
            self._arrived.clear()
            await self._arrived.wait()
        return found[0]


@pytest.fixture
def log_lines() -> Iterator[LogLines]:
    handler, logger = LogLines(), logging.getLogger("kvd.server")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


USER = [{"role": "user", "content": "Hi"}]
