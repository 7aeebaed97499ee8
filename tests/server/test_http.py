"""Errors of the HTTP layer itself: routes, methods, sizes, crashes, and what is no HTTP at all."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from typing import Any

import pytest

from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import MODEL
from tests.server.test_guard import real_paths

CHAT = "/v1/chat/completions"


def check_error(answer: Any, kind: str = "invalid_request_error", code: str | None = None) -> None:
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["code"]) == (kind, code)
    assert answer["error"]["message"]


async def test_routes_answer_with_and_without_v1(harness: Harness) -> None:
    for method, path in real_paths():
        if path.endswith("/events"):
            continue
        async with harness.session.request(method, harness.url + path) as response:
            is_whole = path.endswith("reset") or (method == "GET" and not path.endswith(("/timeline", "/reveal/none")))
            assert response.status in ((200,) if is_whole else (400, 403, 404)), path
            assert "no route" not in await response.text(), path


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/v1/chat", "/v1/v1/models", "/" + "x" * 3000, "/%0a%00"])
async def test_unknown_route(harness: Harness, path: str) -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        status, answer = await harness.call(method, path)
        assert status == 404
        check_error(answer)
        assert len(answer["error"]["message"]) < 150


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", CHAT), ("OPTIONS", CHAT), ("POST", "/v1/models"), ("GET", "/tokenize")]
)
async def test_wrong_method(harness: Harness, method: str, path: str) -> None:
    async with harness.session.request(method, harness.url + path) as response:
        assert response.status == 405
        assert response.headers["Allow"]
        check_error(await response.json())


async def test_body_limit(start_server: StartServer) -> None:
    harness = await start_server(max_body_bytes=1000)

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 100

    for data in (b"x" * 1001, chunks()):
        async with harness.session.post(harness.url + CHAT, data=data) as response:
            assert response.status == 413
            check_error(await response.json(), code="request_too_large")
    body = json.dumps({"model": MODEL, "messages": USER}).encode()
    assert (await harness.post(CHAT, body.ljust(1000)))[0] == 200


async def test_more_than_a_mebibyte_is_fine(harness: Harness) -> None:
    body = json.dumps({"model": MODEL, "messages": USER, "metadata": "x" * 3_000_000}).encode()
    async with harness.session.post(harness.url + CHAT, data=io.BytesIO(body)) as response:
        assert response.status == 200


async def test_compressed_bodies(start_server: StartServer) -> None:
    harness = await start_server(max_body_bytes=10_000)
    body = json.dumps({"model": MODEL, "messages": USER}).encode()
    for data, status in ((gzip.compress(body), 200), (body, 400), (gzip.compress(b" " * 10_001), 413)):
        assert (await harness.post(CHAT, data, headers={"Content-Encoding": "gzip"}))[0] == status


async def test_deep_nesting_in_what_a_template_reads(harness: Harness) -> None:
    for depth in (100, 400, 800, 950):
        nested = b"[" * depth + b"]" * depth
        body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %s}}' % nested
        assert (await harness.post(CHAT, body))[0] in (200, 400)


async def test_crash_is_a_500_with_the_request_id(harness: Harness, log_lines: Any) -> None:
    async def crash(*, details: bool = False) -> Any:
        raise ZeroDivisionError("private detail")

    harness.engine.snapshot = crash  # type: ignore[method-assign]
    async with harness.session.get(harness.url + "/metrics") as response:
        assert response.status == 500
        answer = await response.json()
        check_error(answer, kind="server_error")
        assert response.headers["X-Request-Id"] in answer["error"]["message"]
        assert "private" not in answer["error"]["message"]
    assert response.headers["X-Request-Id"] in await log_lines.find("failed")


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_crash_while_streaming(harness: Harness, log_lines: Any, num_tokens: int) -> None:
    class Broken:
        stopped = False
        num_pushed = 0

        def push(self, token_ids: Any) -> str:
            self.num_pushed += 1
            if self.num_pushed > num_tokens:
                raise ZeroDivisionError
            return "x"

    original = harness.engine.text.open_output
    harness.engine.text.open_output = lambda *_, **__: Broken()  # type: ignore[method-assign, assignment, return-value]
    try:
        body = {"model": MODEL, "messages": USER, "stream": True}
        async with harness.session.post(harness.url + CHAT, json=body) as response:
            text = await response.text()
    finally:
        harness.engine.text.open_output = original  # type: ignore[method-assign]
    assert response.status == (200 if num_tokens else 500)
    assert harness.engine.submitted[0].request_id in text
    assert '"type":"server_error"' in text
    assert text.endswith("data: [DONE]\n\n") == bool(num_tokens)
    await harness.engine.reach(0)


# --------------------------------------------------------------------------- raw sockets


async def exchange(harness: Harness, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read one answer: status, headers, body."""
    reader, writer = await harness.connect()
    for part in parts:
        writer.write(part)
        await writer.drain()
    return await read_answer(reader)


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["words", "tls", "version", "header", "long header", "length", "smuggling"],
)
async def test_what_is_no_http_gets_json(harness: Harness, raw: bytes) -> None:
    status, headers, body = await exchange(harness, raw)
    assert status == 400
    assert headers["content-type"].startswith("application/json")
    check_error(json.loads(body))
    assert (await harness.call("GET", "/health"))[0] == 200


async def test_broken_chunks_in_a_body(harness: Harness) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, _, body = await exchange(harness, head, b"zz\r\nnonsense")
    assert status == 400
    check_error(json.loads(body))


async def test_slow_body_arrives_in_the_end(harness: Harness) -> None:
    body = json.dumps({"prompt": "abc"}).encode()
    reader, writer = await harness.connect()
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
    for position in range(len(body)):
        writer.write(body[position : position + 1])
        await writer.drain()
        await asyncio.sleep(0)
    status, _, answer = await read_answer(reader)
    assert status == 200
    assert json.loads(answer)["count"] == 4


async def test_body_that_never_ends_is_cut_off(start_server: StartServer) -> None:
    harness = await start_server(body_timeout_seconds=0.05)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    status, _, body = await exchange(harness, head, b'{"prompt":')
    assert status == 408
    check_error(json.loads(body))


async def test_client_that_leaves_in_the_middle_of_its_body(harness: Harness) -> None:
    _, writer = await harness.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    assert (await harness.call("GET", "/health"))[0] == 200
    assert harness.engine.submitted == []


async def test_pipelined_requests_on_one_connection(harness: Harness) -> None:
    reader, writer = await harness.connect()
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await read_answer(reader))[0] == 200
    assert (await read_answer(reader))[0] == 404


async def test_request_without_a_host_header(harness: Harness) -> None:
    status, _, _ = await exchange(harness, b"GET /health HTTP/1.0\r\n\r\n")
    assert status == 200


async def test_expectations(harness: Harness) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\nExpect: %s\r\n\r\n"
    reader, writer = await harness.connect()
    writer.write(head % b"100-continue")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b'{"prompt":"a"}')
    assert (await read_answer(reader))[0] == 200
    status, _, body = await exchange(harness, head % b"miracles")
    assert status == 417
    check_error(json.loads(body))


async def test_head_requests(harness: Harness) -> None:
    reader, writer = await harness.connect()
    for path, status in ((b"/v1/models", b"200"), (b"/nothing", b"404")):
        writer.write(b"HEAD %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        assert status in (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]


async def test_idle_connections_hold_up_nobody(harness: Harness) -> None:
    for _ in range(100):
        await harness.connect()
    assert (await harness.post(CHAT, {"messages": USER}))[0] == 200
