"""Requests that forget tokens: what reaches the engine, and that every form of answer says what was forgotten."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from kvd.config import MIN_KV_EVICTION_TOKENS, SETTINGS
from kvd.core import BLOCK_SIZE, KVEviction
from kvd.scheduler.dropping import MIN_BUDGET_BLOCKS
from kvd.server.common_types import MIN_KV_BUDGET_TOKENS
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import parse_events

ENDPOINTS = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
]
each_endpoint = pytest.mark.parametrize(("path", "body"), ENDPOINTS)


def test_settings_and_fields_agree() -> None:
    assert SETTINGS["kv_eviction"].kind.words == get_args(KVEviction)  # type: ignore[attr-defined]
    assert MIN_KV_BUDGET_TOKENS == MIN_KV_EVICTION_TOKENS == MIN_BUDGET_BLOCKS * BLOCK_SIZE


@each_endpoint
@pytest.mark.parametrize("mode", get_args(KVEviction))
async def test_the_engine_gets_what_was_asked_for(harness: Harness, path: str, body: dict[str, Any], mode: str) -> None:
    budget = None if mode == "none" else MIN_KV_BUDGET_TOKENS
    status, _ = await harness.post(path, {**body, "kv_eviction": mode, "kv_budget_tokens": budget})
    assert status == 200
    assert {(each.kv_eviction, each.kv_budget_tokens) for each in harness.engine.submitted} == {(mode, budget)}


@each_endpoint
async def test_the_server_s_default_is_overridden_by_a_request(
    start_server: StartServer, path: str, body: dict[str, Any]
) -> None:
    harness = await start_server(kv_eviction="streaming")
    for fields in ({}, {"kv_eviction": None}, {"kv_budget_tokens": 200}, {"kv_eviction": "none"}):
        assert (await harness.post(path, {**body, **fields}))[0] == 200
    got = [(each.kv_eviction, each.kv_budget_tokens) for each in harness.engine.submitted if not each.choice_index]
    assert got == [("streaming", None), ("streaming", None), ("streaming", 200), ("none", None)]


@each_endpoint
async def test_a_whole_answer_says_what_was_forgotten(harness: Harness, path: str, body: dict[str, Any]) -> None:
    num_choices = len(body.get("prompt", "a"))
    harness.engine.num_dropped = 48
    _, answer = await harness.post(path, {**body, "kv_eviction": "streaming"})
    assert answer["usage"]["kvd"] == {"dropped_tokens": 48 * num_choices}
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    harness.engine.num_dropped = 0
    _, answer = await harness.post(path, {**body, "kv_eviction": "streaming"})
    assert answer["usage"]["kvd"] == {"dropped_tokens": 0}
    _, answer = await harness.post(path, body)
    assert "kvd" not in answer["usage"]


@each_endpoint
async def test_the_usage_chunk_says_what_was_forgotten(harness: Harness, path: str, body: dict[str, Any]) -> None:
    harness.engine.num_dropped = 48
    streamed = {**body, "kv_eviction": "heavy_hitter", "stream_options": {"include_usage": True}}
    chunks: list[Any] = parse_events(await harness.stream_text(path, streamed))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["kvd"] == {"dropped_tokens": 48 * len(body.get("prompt", "a"))}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@each_endpoint
async def test_without_a_usage_chunk_the_last_chunk_says_it(harness: Harness, path: str, body: dict[str, Any]) -> None:
    harness.engine.num_dropped = 48
    chunks: list[Any] = parse_events(await harness.stream_text(path, {**body, "kv_eviction": "sliding_window"}))
    _, whole = await harness.post(path, {**body, "kv_eviction": "sliding_window"})
    assert [chunk.get("usage") for chunk in chunks] == [None] * (len(chunks) - 1) + [whole["usage"]]
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert all("usage" not in chunk for chunk in chunks[:-1])
    text = await harness.stream_text(path, body)
    assert "usage" not in text, "nothing changes for those who forget nothing"
