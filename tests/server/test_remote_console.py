"""The console over HTTP: it says what the one in the server's process says, and survives whatever a server does."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvd.config_keys import ApiKey
from kvd.insight import Console
from kvd.observe.event_log import EventLog
from kvd.server.app import build_app
from kvd.server.lifecycle import serve
from kvd.server.settings import ServerSettings
from kvd.server.snapshot_json import encode_snapshot
from kvd.server.state import STATE
from kvd.text.text_model import TextModel
from kvd.tools import remote_console
from kvd.tools.event_stream import EventStream
from kvd.tools.remote_console import RemoteConsole, RemoteFailed
from kvd.views import Snapshot
from tests.server.conftest import Harness, StartServer
from tests.server.fake_insight import MISS, TIMELINE
from tests.server.fakes import END, IM_END, MODEL, FakeEngine
from tests.server.threaded import scripted_server

CHAIN = "ab" * 16


@asynccontextmanager
async def remote(url: str, key: str | None = None, **options: float) -> AsyncIterator[RemoteConsole]:
    console = RemoteConsole(url, key, **options)
    try:
        yield console
    finally:
        await console.aclose()


async def failure(call: Awaitable[object]) -> str:
    """The one line that a call fails with."""
    with pytest.raises(RemoteFailed) as caught:
        await call
    line = str(caught.value)
    assert line
    assert line.isprintable()
    return line


async def until(say: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until it is so; pytest's own limit ends a test that waits in vain."""
    while not await say():  # noqa: ASYNC110 - what is waited for is on the other side of a socket
        await asyncio.sleep(0.01)


# --------------------------------------------------------------------------- the same as in the process


async def test_it_says_what_the_local_console_says(start_server: StartServer) -> None:
    harness = await start_server(show_prompts=True)
    harness.engine.observe("time_to_first_token_seconds", 0.5, 1e9)
    harness.event_log.add("warning", "kind", "something", "req-1")
    local: Console = harness.server.app[STATE].console
    async with remote(harness.url) as console:
        snapshot, here = await console.snapshot(), await local.snapshot(details=True)
        assert snapshot.info == here.info
        assert (snapshot.misses, snapshot.histograms) == (here.misses, here.histograms)
        assert await console.block_map(8, 1) == await local.block_map(8, 1)
        assert await console.timeline(TIMELINE.request_id) == TIMELINE
        assert await console.timeline("nobody") is None
        assert await console.timelines(5) == await local.timelines(5)
        assert await console.prefixes(5) == await local.prefixes(5)
        assert await console.doctor() == await local.doctor()
        for name in (CHAIN, MISS.request_id):
            assert await console.reveal(name) == await local.reveal(name)
        await until(lambda: _has_events(console, harness.event_log))
        assert await console.events(1) == harness.event_log.recent(1)
        assert await console.events(0) == ()


async def _has_events(console: RemoteConsole, log: EventLog) -> bool:
    return await console.events(1000) == log.recent()


async def test_acts(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    task = asyncio.create_task(harness.post("/v1/completions", {"prompt": "a"}))
    await harness.engine.reach(1)
    (running,) = harness.engine.running_ids
    async with remote(harness.url) as console:
        assert [row.request_id for row in (await console.snapshot()).requests] == [running]
        assert await console.abort(running) is True
        assert await console.abort(running) is False
        assert await console.reset_cache() == 7
        assert await console.pin(CHAIN) == 5
        assert await console.pin("nothing") == 0
        assert await console.drop_prefix(CHAIN) == 0
        assert await console.unpin(CHAIN) is True
        assert await console.unpin(CHAIN) is False
        assert await console.keep_turn(CHAIN) == 5
        assert await console.keep_turn("nothing") == 0
        saved = await console.save_session("mine", CHAIN)
        assert (saved.name, saved.num_tokens) == ("mine", 80)
        assert await console.restore_session("mine") == saved
        assert "no session" in await failure(console.restore_session("other"))
        assert await console.drop_prefix(CHAIN) == 5
        assert await console.drop_prefix(CHAIN) == 0
    await task


async def test_ids_are_one_segment_of_a_path(harness: Harness) -> None:
    async with remote(harness.url) as console:
        for name in ("../../health", "a/b?c#d", "é %2F"):
            assert await console.timeline(name) is None
            assert await console.abort(name) is False


async def test_an_answer_with_several_choices_has_no_timeline_but_theirs(harness: Harness) -> None:
    harness.server.app[STATE].note_choices("cmpl-1", ("cmpl-1-0", "cmpl-1-1"))
    async with remote(harness.url) as console:
        assert await console.timeline("cmpl-1") is None


async def test_tls_where_there_is_none_is_named(harness: Harness) -> None:
    async with remote(harness.url.replace("http:", "https:")) as console:
        line = await failure(console.snapshot())
    assert "no TLS connection" in line
    assert "does it speak http:// only?" in line
    assert "_ssl.c" not in line


async def test_prompt_text_is_refused_with_the_reason(harness: Harness) -> None:
    async with remote(harness.url) as console:
        assert "show_prompts" in await failure(console.reveal(CHAIN))


# --------------------------------------------------------------------------- who is let in


async def test_a_key_is_sent_and_a_missing_one_explained(start_server: StartServer) -> None:
    harness = await start_server(api_keys=(ApiKey("me", "hush"),))
    async with remote(harness.url, "hush") as console:
        assert (await console.snapshot()).info.model == MODEL
        assert await console.reset_cache() == 7
    for key in (None, "wrong-key"):
        async with remote(harness.url, key) as console:
            for line in (await failure(console.snapshot()), await failure(console.reset_cache())):
                assert "--key" in line
                assert "KVD_API_KEY" in line
                assert "wrong-key" not in line


async def test_proxies_are_bypassed_on_loopback(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with remote(harness.url) as console:
        assert (await console.snapshot()).info.model == MODEL


# --------------------------------------------------------------------------- a server that goes and comes


@asynccontextmanager
async def running(text: TextModel, port: int, log: EventLog, **info: object) -> AsyncIterator[tuple[int, FakeEngine]]:
    engine = FakeEngine(text, **info)
    config = ServerSettings(end_token_ids=frozenset({END, IM_END}), shutdown_seconds=0.2)
    server = await serve(build_app(engine, text, config=config, event_log=log), "127.0.0.1", port)
    try:
        yield server.port, engine
    finally:
        await server.close()
        await engine.close()


async def test_it_connects_again_after_a_restart_on_the_same_port(text_model: TextModel) -> None:
    log = EventLog()
    for number in range(3):
        log.add("info", "kind", f"first {number}")
    async with running(text_model, 0, log) as (port, _):
        console = RemoteConsole(f"http://127.0.0.1:{port}", None, interval_seconds=0.1)
        await console.snapshot()
        await until(lambda: _has_events(console, log))

    async def is_lost() -> bool:
        try:
            await console.snapshot()
        except RemoteFailed:
            return True
        return False

    async def is_back() -> bool:
        return not await is_lost()

    await until(is_lost)
    await until(lambda: _says(console, "Connection refused"))
    assert "Connection refused" in await failure(console.reset_cache())
    second = EventLog()
    second.append(log.recent()[-1])
    second.add("info", "kind", "second")
    async with running(text_model, port, second, version="9.9.9"):
        await until(is_back)
        assert (await console.snapshot()).info.version == "9.9.9"
        wanted = (*log.recent(), second.recent()[-1])
        await until(lambda: _equals(console.events(1000), wanted))
        await console.aclose()


async def _says(console: RemoteConsole, text: str) -> bool:
    return text in await failure(console.snapshot())


async def _equals(call: Awaitable[object], value: object) -> bool:
    return await call == value


async def test_a_server_that_loads_is_waited_for(text_model: TextModel) -> None:
    is_loading = True
    snapshot = encode_snapshot(await FakeEngine(text_model).snapshot())

    async def events(request: web.Request) -> web.StreamResponse:
        if is_loading:
            error = {"message": "the model is being loaded", "type": "server_error", "param": None, "code": "x"}
            return web.json_response({"error": error}, status=503)
        return await send_events(request, b"event: snapshot\ndata: " + snapshot + b"\n\n", stays_open=True)

    async with scripted_server(web.get("/kvd/events", events)) as url, remote(url) as console:
        assert "the model is being loaded" in await failure(console.snapshot())
        is_loading = False

        async def serves() -> bool:
            try:
                return bool(await console.snapshot())
            except RemoteFailed:
                return False

        await until(serves)


async def test_silence_is_noticed(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life are no snapshots: one that hangs behind them is lost as well."""
    monkeypatch.setattr(remote_console, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(remote_console, "INTERVAL_SECONDS", (0.01, 60.0))

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b": keep-alive\n\n")
            await asyncio.sleep(0.01)

    async with scripted_server(web.get("/kvd/events", events)) as url, remote(url, interval_seconds=0.01) as console:
        assert "no snapshot for 0.2 s" in await failure(console.snapshot())


async def test_nothing_there_at_all() -> None:
    async with remote("http://127.0.0.1:9") as console:
        for line in (await failure(console.snapshot()), await failure(console.doctor())):
            assert line == "nothing answers at http://127.0.0.1:9: Connection refused; is kvd running?"
    async with remote("http://no-such-host.invalid") as console:
        assert "nothing answers at" in await failure(console.doctor())


# --------------------------------------------------------------------------- a hostile one


async def send_events(request: web.Request, body: bytes, *, stays_open: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(body)
    if stays_open:
        await asyncio.Event().wait()
    return response


BAD_EVENTS = {
    "garbage": b"event: snapshot\ndata: {garbage\n\n",
    "wrong types": b'event: snapshot\ndata: {"time": "now", "info": 3}\n\n',
    "nothing in it": b"event: snapshot\ndata: {}\n\n",
    "no UTF-8": b'event: snapshot\ndata: {"time": "\xff\xfe"}\n\n',
    "deep": b"event: snapshot\ndata: " + b"[" * 100_000 + b"\n\n",
    "bad log": b'event: log\ndata: {"level": 3}\n\n',
    "escapes": b'event: snapshot\ndata: {"\x1b[2J": \x1b[31m}\n\n',
    "an end": b"",
}


@pytest.mark.parametrize("name", BAD_EVENTS)
async def test_events_that_make_no_sense(name: str) -> None:
    async def events(request: web.Request) -> web.StreamResponse:
        return await send_events(request, BAD_EVENTS[name])

    async with scripted_server(web.get("/kvd/events", events)) as url, remote(url) as console:
        assert url in await failure(console.snapshot())


async def test_an_endless_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_console, "MAX_ANSWER_BYTES", 2**20)

    async def endless(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if request.path == "/kvd/events" else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    routes = (web.get("/kvd/events", endless), web.get("/kvd/doctor", endless))
    async with scripted_server(*routes) as url, remote(url) as console:
        assert "a line has more than 1,048,576 bytes" in await failure(console.snapshot())
        assert "more than 1,048,576 bytes" in await failure(console.doctor())


BAD_ANSWERS = {
    "garbage": web.Response(body=b"\x00\xff{"),
    "null": web.Response(body=b"null"),
    "a list": web.Response(body=b"[]"),
    "numbers for words": web.Response(body=json.dumps({"findings": 3, "timelines": 3, "dropped_blocks": "x"}).encode()),
    "a page": web.Response(text="<html>hello</html>", content_type="text/html"),
    "an error without words": web.Response(status=500, body=b"{}"),
    "an error of odd types": web.Response(status=400, body=b'{"error": [1]}'),
    "a redirect": web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}),
    "another 404": web.Response(status=404, body=b'{"detail": "Not Found"}'),
    "said to be compressed": web.Response(body=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_answers_that_make_no_sense(name: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        model = BAD_ANSWERS[name]
        return web.Response(status=model.status, body=model.body, headers=model.headers)

    async with scripted_server(web.route("*", "/{path:.*}", answer)) as url, remote(url) as console:
        for call in (console.snapshot(), console.doctor(), console.timelines(3), console.block_map(3)):
            assert url in await failure(call)
        for act in (console.reset_cache(), console.save_session("a", "b"), console.timeline("a")):
            assert url in await failure(act)


async def test_it_reads_a_newer_server(text_model: TextModel) -> None:
    data = json.loads(encode_snapshot(await FakeEngine(text_model).snapshot()))
    data |= {"added_later": [1]}
    data["info"] |= {"added_later": {}}

    async def events(request: web.Request) -> web.StreamResponse:
        body = b"event: later\ndata: 1\n\nevent: snapshot\r\ndata: %s\r\n\r\n" % json.dumps(data).encode()
        return await send_events(request, body, stays_open=True)

    async with scripted_server(web.get("/kvd/events", events)) as url, remote(url) as console:
        assert (await console.snapshot()).info.model == MODEL


async def test_what_is_kept_of_a_server_is_bounded(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_console, "MAX_EVENTS", 5)
    log = b"".join(
        b'event: log\ndata: {"time": %d, "level": "info", "kind": "k", "message": "m"}\n\n' % number
        for number in range(5000)
    )
    snapshot = b"event: snapshot\ndata: " + encode_snapshot(await FakeEngine(text_model).snapshot()) + b"\n\n"

    async def events(request: web.Request) -> web.StreamResponse:
        return await send_events(request, snapshot + log + snapshot, stays_open=True)

    async with scripted_server(web.get("/kvd/events", events)) as url, remote(url) as console:

        async def newest() -> list[float]:
            return [event.time for event in await console.events(1000)]

        await until(lambda: _equals(newest(), [4995, 4996, 4997, 4998, 4999]))


# --------------------------------------------------------------------------- events out of pieces

EVENTS = (
    b": hello\n\nevent: a\ndata: 1\n\nevent: b\r\ndata: 2\r\ndata:3\r\n\r\ndata: 4\n\nid: 7\n\nevent: c\ndata: \n\n"
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=20))
def test_pieces_may_be_cut_anywhere(cuts: list[int]) -> None:
    stream, found = EventStream(1000), list[tuple[str, bytes]]()
    places = [0, *sorted(cuts), len(EVENTS)]
    for start, end in itertools.pairwise(places):
        found += stream.feed(EVENTS[start:end])
    assert found == [("a", b"1"), ("b", b"2\n3"), ("", b"4"), ("c", b"")]


@pytest.mark.parametrize("piece", [b"x" * 101, b"data: " + b"x" * 101 + b"\n", b"data: " + b"x" * 40 + b"\n"])
def test_lines_and_events_have_a_bound(piece: bytes) -> None:
    stream = EventStream(100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        stream.feed(3 * piece)


async def test_snapshots_that_wait_together_are_read_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0
    decode = remote_console.decode_snapshot

    def count(data: bytes) -> Snapshot:
        nonlocal num_read
        num_read += 1
        return decode(data)

    monkeypatch.setattr(remote_console, "decode_snapshot", count)
    one = b"event: snapshot\ndata: " + encode_snapshot(await harness.engine.snapshot()) + b"\n\n"

    async def events(request: web.Request) -> web.StreamResponse:
        return await send_events(request, one * 20, stays_open=True)

    async with scripted_server(web.get("/kvd/events", events)) as url, remote(url) as console:
        await console.snapshot()
        assert num_read < 20
