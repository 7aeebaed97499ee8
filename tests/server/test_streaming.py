"""Keep-alive comments, errors before and after the first byte, and clients that leave or read slowly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from kvd.errors import ServerOverloaded
from tests.server.conftest import USER, Harness, LogLines, StartServer
from tests.server.fakes import MODEL

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_full_queue_is_a_503_before_any_event(harness: Harness, stream: bool, path: str) -> None:
    harness.engine.refusal = ServerOverloaded("32 requests are waiting; try again later", retry_after_seconds=3)
    body = {"model": MODEL, "messages": USER, "prompt": "a", "stream": stream}
    async with harness.session.post(harness.url + path, json=body) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "3"
        assert response.content_type == "application/json"
        error = (await response.json())["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "server_is_overloaded", None)
    harness.engine.refusal = None
    assert (await harness.post(CHAT, {"messages": USER}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_failure_before_the_first_token_is_a_500(harness: Harness, stream: bool) -> None:
    harness.engine.fail_after = 0
    status, answer = await harness.post(CHAT, {"messages": USER, "stream": stream})
    assert status == 500
    assert answer["error"]["type"] == "server_error"
    assert harness.engine.submitted[0].request_id in answer["error"]["message"]


async def test_engine_failure_in_mid_stream_is_an_event(harness: Harness) -> None:
    harness.engine.fail_after = 3
    body = await harness.stream_text(CHAT, {"messages": USER})
    data = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert data[-1] == "[DONE]"
    error = json.loads(data[-2])["error"]
    assert error["type"] == "server_error"
    assert harness.engine.submitted[0].request_id in error["message"]
    with pytest.raises(openai.APIError, match="planted"):
        async for _ in await harness.client().chat.completions.create(model=MODEL, messages=USER, stream=True):
            pass


async def test_keepalive_comments_before_and_between_tokens(start_server: StartServer) -> None:
    harness = await start_server(keepalive_seconds=0.01)
    harness.engine.permits = asyncio.Semaphore(0)
    async with harness.session.post(
        harness.url + CHAT, json={"model": MODEL, "messages": USER, "stream": True}
    ) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        harness.engine.permits.release()
        before = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        while before[-1].startswith(b":") or b"Hello"[:1] not in before[-1]:
            before.append(await response.content.readuntil(b"\n\n"))
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        for _ in range(20):
            harness.engine.permits.release()
        rest = (await response.read()).decode()
    deltas = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")]
    assert "".join(delta["choices"][0]["delta"].get("content", "") for delta in deltas) == "ello world"
    assert rest.endswith("data: [DONE]\n\n")


async def test_failure_after_a_comment_is_an_event(start_server: StartServer) -> None:
    harness = await start_server(keepalive_seconds=0.01)
    harness.engine.permits, harness.engine.fail_after = asyncio.Semaphore(0), 0
    async with harness.session.post(
        harness.url + CHAT, json={"model": MODEL, "messages": USER, "stream": True}
    ) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        harness.engine.permits.release()
        body = await response.text()
    assert response.status == 200
    assert '"error"' in body
    assert body.endswith("data: [DONE]\n\n")


async def test_the_client_comes_with_comments(start_server: StartServer) -> None:
    harness = await start_server(keepalive_seconds=0.005)
    harness.engine.permits = asyncio.Semaphore(0)

    async def hand_out_permits() -> None:
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert harness.engine.permits is not None
            harness.engine.permits.release()

    task = asyncio.create_task(hand_out_permits())
    stream = await harness.client().chat.completions.create(model=MODEL, messages=USER, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello world"
    await task


# --------------------------------------------------------------------------- clients that leave


async def open_raw(
    harness: Harness, path: str, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await harness.connect()
    data = json.dumps({"model": MODEL, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return reader, writer


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_the_request(
    harness: Harness, log_lines: LogLines, stream: bool, num_tokens: int, is_reset: bool
) -> None:
    harness.engine.permits = asyncio.Semaphore(num_tokens)
    reader, writer = await open_raw(harness, CHAT, {"messages": USER, "stream": stream})
    await harness.engine.reach(1)
    if stream and num_tokens:
        await reader.readuntil(b'"delta":{"content":')
    if is_reset:
        writer.transport.abort()
    else:
        writer.close()
    await harness.engine.reach(0)
    assert harness.engine.aborted == [harness.engine.submitted[0].request_id]
    assert harness.engine.aborted[0] in await log_lines.find(" 499 ")
    harness.engine.permits = None
    assert (await harness.post(CHAT, {"messages": USER}))[0] == 200


async def test_disconnect_aborts_every_prompt(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(4)
    _, writer = await open_raw(harness, "/v1/completions", {"prompt": ["a", "b", "c"], "stream": True})
    await harness.engine.reach(3)
    writer.close()
    await harness.engine.reach(0)
    assert len(harness.engine.aborted) == 3


async def test_half_closed_connection_counts_as_gone(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    _, writer = await open_raw(harness, CHAT, {"messages": USER})
    await harness.engine.reach(1)
    writer.write_eof()
    await harness.engine.reach(0)
    assert len(harness.engine.aborted) == 1


async def test_the_client_breaks_off(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(2)
    stream = await harness.client().chat.completions.create(model=MODEL, messages=USER, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await harness.engine.reach(0)
    assert len(harness.engine.aborted) == 1


async def test_a_finished_request_is_not_aborted(harness: Harness) -> None:
    await harness.stream_text(CHAT, {"messages": USER})
    await harness.post(CHAT, {"messages": USER})
    assert harness.engine.aborted == []


async def test_a_slow_reader_holds_up_nobody(harness: Harness) -> None:
    """One client reads nothing of a long answer; others are served, and it gets everything in the end."""
    harness.engine.reply = "x" * 400
    body = {"messages": USER, "stream": True, "logprobs": True, "top_logprobs": 20}
    reader, _ = await open_raw(harness, CHAT, body)
    for _ in range(5):
        assert (await harness.post(CHAT, {"messages": USER}))[0] == 200
    await harness.engine.reach(0)
    data = await reader.readuntil(b"data: [DONE]\n\n")
    assert data.count(b'"token":"x"') >= 400


async def test_requests_run_side_by_side(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(harness.post(CHAT, {"messages": USER, "stream": False})) for _ in range(20)]
    await harness.engine.reach(20)
    for _ in range(20 * 12):
        harness.engine.permits.release()
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_operator_abort_ends_the_answer_with_an_error(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    whole = asyncio.create_task(harness.post(CHAT, {"messages": USER}))
    await harness.engine.reach(1)
    (request_id,) = harness.engine.running_ids
    assert (await harness.post(f"/kvd/requests/{request_id}/abort", {}))[0] == 200
    status, answer = await whole
    assert status == 499
    assert answer["error"]["code"] == "request_aborted"
