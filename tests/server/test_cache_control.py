"""The operator's routes about the cache: prefixes, pins, kept turns, sessions, reset."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from kvd.config_keys import ApiKey
from kvd.server.state import MAX_RECENT_CHOICES, STATE
from kvd.views import PrefixView
from tests.server.conftest import USER, Harness, StartServer

CHAIN = "ab" * 16

ROUTES = [
    ("GET", "/kvd/cache/prefixes"),
    ("POST", "/kvd/cache/pin"),
    ("POST", "/kvd/cache/unpin"),
    ("POST", "/kvd/cache/drop"),
    ("POST", "/kvd/cache/reset"),
    ("POST", "/kvd/requests/some-id/keep"),
    ("POST", "/kvd/sessions/name/save"),
    ("POST", "/kvd/sessions/name/restore"),
]


async def finished_chat(harness: Harness) -> str:
    """The id of an answer that is complete."""
    status, answer = await harness.post("/v1/chat/completions", {"messages": USER})
    assert status == 200
    request_id: str = answer["id"]
    return request_id


async def finished_pair(harness: Harness) -> str:
    """The id of an answer with two choices."""
    status, answer = await harness.post("/v1/completions", {"prompt": ["a", "b"]})
    assert (status, len(answer["choices"])) == (200, 2)
    request_id: str = answer["id"]
    return request_id


# --------------------------------------------------------------------------- who may


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_routes_need_the_key_and_refuse_foreign_pages(start_server: StartServer, method: str, path: str) -> None:
    harness = await start_server(api_keys=(ApiKey("me", "secret"),))
    assert (await harness.call(method, path, {"chain": CHAIN}))[0] == 401
    headers = {"Authorization": "Bearer secret", "Origin": "https://evil.example"}
    assert (await harness.call(method, path, {"chain": CHAIN}, headers=headers))[0] == 403
    assert harness.engine.num_resets == 0
    assert not harness.engine.pinned
    assert not harness.engine.dropped
    assert not harness.engine.kept
    assert not harness.engine.sessions


# --------------------------------------------------------------------------- prefixes and pins


async def test_prefixes_are_listed_pinned_ones_first(harness: Harness) -> None:
    request_id = await finished_chat(harness)
    assert await harness.post("/kvd/cache/pin", {"chain": request_id}) == (
        200,
        {"chain": request_id, "pinned_blocks": 3},
    )
    _, answer = await harness.call("GET", "/kvd/cache/prefixes")
    assert msgspec.convert(answer["prefixes"], list[PrefixView]) == [
        PrefixView(request_id, 48, 2, is_pinned=True, is_active=False),
        PrefixView(CHAIN, 80, 2, is_pinned=False, is_active=False),
    ]
    _, answer = await harness.call("GET", "/v1/kvd/cache/prefixes?limit=1")
    assert [view["prefix_id"] for view in answer["prefixes"]] == [request_id]


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1.5", "", "²", "9" * 30])
async def test_a_bad_limit_is_refused(harness: Harness, limit: str) -> None:
    status, answer = await harness.call("GET", f"/kvd/cache/prefixes?limit={limit}")
    assert (status, answer["error"]["param"]) == (400, "limit")


async def test_pin_and_unpin(harness: Harness) -> None:
    assert await harness.post("/kvd/cache/pin", {"chain": CHAIN}) == (200, {"chain": CHAIN, "pinned_blocks": 5})
    assert harness.engine.pinned == {CHAIN}
    assert await harness.post("/kvd/cache/unpin", {"chain": CHAIN}) == (200, {"chain": CHAIN, "unpinned": True})
    assert not harness.engine.pinned
    assert [event.kind for event in harness.event_log.recent()] == ["pin", "unpin"]
    for route in ("pin", "unpin"):
        status, answer = await harness.post(f"/kvd/cache/{route}", {"chain": "cd" * 16 if route == "pin" else CHAIN})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "chain_not_found", "chain")


@pytest.mark.parametrize("path", ["/kvd/cache/pin", "/kvd/cache/unpin", "/kvd/sessions/name/save"])
@pytest.mark.parametrize("body", [{}, {"chain": 3}, {"chain": ""}, {"chain": " "}, {"chain": "x" * 201}])
async def test_a_bad_chain_is_refused(harness: Harness, path: str, body: dict[str, Any]) -> None:
    status, answer = await harness.post(path, body)
    assert (status, answer["error"]["param"]) == (400, "chain")
    assert (await harness.post(path, b"{"))[0] == 400


async def test_a_choice_of_several_has_to_be_named(harness: Harness) -> None:
    request_id = await finished_pair(harness)
    status, answer = await harness.post("/kvd/cache/pin", {"chain": request_id})
    assert (status, answer["error"]["param"]) == (400, "chain")
    assert f"{request_id}-0" in answer["error"]["message"]
    assert (await harness.post("/kvd/cache/pin", {"chain": f"{request_id}-1"}))[0] == 200
    assert harness.engine.pinned == {f"{request_id}-1"}


async def test_a_running_request_is_no_chain_yet(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    task = asyncio.create_task(harness.post("/v1/completions", {"prompt": ["a", "b"]}))
    await harness.engine.reach(2)
    choice = min(harness.engine.running_ids)
    for path, body in (
        ("/kvd/cache/pin", {"chain": choice}),
        ("/kvd/sessions/name/save", {"chain": choice.rpartition("-")[0]}),
        (f"/kvd/requests/{choice}/keep", None),
    ):
        status, answer = await harness.post(path, body)
        assert (status, answer["error"]["code"]) == (409, "request_running"), path
    harness.engine.permits = None
    task.cancel()


# --------------------------------------------------------------------------- turns


async def test_a_turn_is_kept_by_the_answer_s_id(harness: Harness) -> None:
    request_id = await finished_chat(harness)
    assert await harness.post(f"/kvd/requests/{request_id}/keep", b"") == (200, {"id": request_id, "kept_blocks": 3})
    assert harness.engine.kept == [request_id]
    pair = await finished_pair(harness)
    assert await harness.post(f"/kvd/requests/{pair}/keep", b"") == (200, {"id": pair, "kept_blocks": 6})
    assert harness.engine.kept[1:] == [f"{pair}-0", f"{pair}-1"]
    status, answer = await harness.post("/kvd/requests/nobody/keep", b"")
    assert (status, answer["error"]["code"]) == (404, "request_not_found")


async def test_only_the_latest_choices_are_remembered(harness: Harness) -> None:
    first = await finished_pair(harness)
    state = harness.server.app[STATE]
    for number in range(MAX_RECENT_CHOICES - 1):
        state.note_choices(f"later-{number}", ("a", "b"))
        del state.active[f"later-{number}"]
    assert state.engine_ids(first) == (f"{first}-0", f"{first}-1")
    state.note_choices("last", ("a", "b"))
    assert state.engine_ids(first) == (first,)
    assert len(state.recent_choices) == MAX_RECENT_CHOICES


# --------------------------------------------------------------------------- sessions


async def test_a_session_is_saved_and_restored(harness: Harness) -> None:
    request_id = await finished_chat(harness)
    info = {"name": "my.chat_1-a", "num_tokens": 48, "num_bytes": 1000}
    assert await harness.post("/kvd/sessions/my.chat_1-a/save", {"chain": request_id}) == (200, info)
    assert harness.engine.sessions == {"my.chat_1-a": request_id}
    assert await harness.post("/kvd/sessions/my.chat_1-a/restore", b"") == (200, info)
    assert [event.kind for event in harness.event_log.recent()] == ["session_saved", "session_restored"]


async def test_what_the_engine_says_about_a_session_is_passed_on(harness: Harness) -> None:
    status, answer = await harness.post("/kvd/sessions/other/restore", b"")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "session_error", "name")
    status, answer = await harness.post("/kvd/sessions/other/save", {"chain": "cd" * 16})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "session_error", "chain")


@pytest.mark.parametrize(
    "name", [".hidden", "..", "a%2Fb", "..%2Fx", "a%00", "a%0A", "ä", "a b", "x" * 65, "%2e%2e", "a:b"]
)
@pytest.mark.parametrize("action", ["save", "restore"])
async def test_a_name_that_is_no_plain_file_name_is_refused(harness: Harness, name: str, action: str) -> None:
    reader, writer = await harness.connect()  # clients tidy paths up before they send them
    body = b'{"chain": "%s"}' % CHAIN.encode()
    path = f"/kvd/sessions/{name}/{action}".encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    writer.write(head % (path, len(body)) + body)
    answer = await reader.read()
    assert answer.split()[1] in (b"400", b"404"), answer
    assert not harness.engine.sessions


# --------------------------------------------------------------------------- reset


async def test_cache_reset(harness: Harness) -> None:
    await harness.post("/kvd/cache/pin", {"chain": CHAIN})
    status, answer = await harness.post("/kvd/cache/reset", b"")
    assert status == 200
    assert answer == {
        "dropped_blocks": 7,
        "active_blocks": 25,
        "pinned_blocks": 5,
        "tiers": ["pool", "ram", "disk"],
    }
    assert harness.engine.num_resets == 1
    assert (await harness.call("GET", "/kvd/cache/reset"))[0] == 405
