"""Health, models, metrics, tokenizing, and the operator's routes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvd.server.snapshot_json import decode_log_event, decode_snapshot
from kvd.views import Counters
from tests.server.conftest import USER, Harness, StartServer
from tests.server.fakes import BEGIN, MAX_MODEL_LEN, MODEL

# --------------------------------------------------------------------------- health and models


@pytest.mark.parametrize("line", ["the server is loading", "no progress for 200 s while 3 requests wait"])
async def test_health(harness: Harness, line: str) -> None:
    assert await harness.call("GET", "/health") == (200, {"status": "ok"})
    harness.engine.health_line = line
    async with harness.session.get(harness.url + "/health") as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        error = (await response.json())["error"]
    assert (error["message"], error["code"]) == (line, "server_is_overloaded")


async def test_models(harness: Harness) -> None:
    client = harness.client()
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL, "alias"]
    one = await client.models.retrieve(MODEL)
    assert one == models[0]
    fields = one.to_dict()
    assert (fields["object"], fields["owned_by"], fields["max_model_len"]) == ("model", "kvd", MAX_MODEL_LEN)
    assert (fields["created"], fields["created_at"]) == (1_700_000_000, "2023-11-14T22:13:20Z")
    status, answer = await harness.call("GET", "/v1/models/other/model")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_wildcard_name_accepts_all(start_server: StartServer) -> None:
    harness = await start_server(served_names=("mine", "*"))
    answer = await harness.client().chat.completions.create(model="gpt-5", messages=USER)
    assert answer.model == "gpt-5"
    _, answer = await harness.call("GET", "/v1/models")
    assert [model["id"] for model in answer["data"]] == ["mine"]
    alone = await start_server(served_names=("*",))
    _, answer = await alone.call("GET", "/v1/models")
    assert [model["id"] for model in answer["data"]] == [MODEL]


async def test_served_names_replace_the_engine_s(start_server: StartServer) -> None:
    harness = await start_server(served_names=("mine",))
    assert (await harness.post("/v1/chat/completions", {"messages": USER, "model": MODEL}))[0] == 404
    _, answer = await harness.post("/v1/chat/completions", {"messages": USER, "model": "mine"})
    assert answer["model"] == "mine"


# --------------------------------------------------------------------------- tokenize


async def test_tokenize_and_back(harness: Harness) -> None:
    status, answer = await harness.post("/tokenize", {"prompt": "é!", "return_token_strs": True})
    assert status == 200
    assert answer["tokens"] == [BEGIN, *"é!".encode()]
    assert (answer["count"], answer["max_model_len"]) == (4, MAX_MODEL_LEN)
    assert answer["token_strs"] == ["<|begin|>", "\ufffd", "\ufffd", "!"]
    assert await harness.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "é!"})
    _, bare = await harness.post("/v1/tokenize", {"prompt": "é!", "add_special_tokens": False})
    assert bare["tokens"] == list("é!".encode())


async def test_tokenize_counts_what_chat_uses(harness: Harness) -> None:
    await harness.post("/v1/chat/completions", {"messages": USER})
    _, answer = await harness.post("/tokenize", {"messages": USER})
    assert tuple(answer["tokens"]) == harness.engine.submitted[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
    ],
)
async def test_bad_tokenize_requests(harness: Harness, path: str, body: Any, param: str) -> None:
    status, answer = await harness.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


# --------------------------------------------------------------------------- metrics


async def scrape(harness: Harness) -> dict[tuple[str, str], float]:
    """(sample name, labels beyond model and engine) → value; also checks that the text parses."""
    async with harness.session.get(harness.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            if sample.name.startswith("vllm:"):
                assert labels.pop("engine") == "0"
            samples[sample.name, ",".join(f"{key}={value}" for key, value in sorted(labels.items()))] = sample.value
    return samples


async def test_metrics_have_vllm_s_names_and_types(harness: Harness) -> None:
    async with harness.session.get(harness.url + "/metrics") as response:
        types = {line.split()[2]: line.split()[3] for line in (await response.text()).splitlines() if "# TYPE" in line}
    expected = {
        "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
        "counter": "prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total prompt_tokens_total "
        "prompt_tokens_cached_total generation_tokens_total request_success_total",
        "histogram": "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds "
        "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
        "iteration_tokens_total request_prompt_tokens request_generation_tokens",
    }
    wanted = {f"vllm:{name}": kind for kind, names in expected.items() for name in names.split()}
    assert {name: kind for name, kind in types.items() if name.startswith("vllm:")} == wanted
    assert all(name.startswith(("vllm:", "kvd:")) for name in types)


async def test_metrics_are_the_snapshot(harness: Harness) -> None:
    harness.engine.counters = Counters(
        prompt_tokens=100, prompt_tokens_cached=60, generation_tokens=7, recomputed_tokens=3, prefix_query_tokens=100,
        prefix_hit_tokens=60, num_preemptions=5, num_evicted_blocks=5, finished=(("stop", 4), ("length", 1)),
        partial_hit_tokens=7, ram_hit_tokens=20, disk_hit_tokens=8, num_swaps=2, num_saved_blocks=11,
        num_unsaved_blocks=12, num_restored_blocks=13, num_dropped_tokens=14,
    )  # fmt: skip
    harness.engine.observe("time_to_first_token_seconds", 0.001, 0.03, 9999.0)
    samples = await scrape(harness)
    assert samples["vllm:kv_cache_usage_perc", ""] == 0.25
    assert samples["vllm:num_requests_waiting", ""] == 2
    assert samples["vllm:prefix_cache_hits_total", ""] == 60
    assert samples["vllm:request_success_total", "finished_reason=stop"] == 4
    assert samples["vllm:request_success_total", "finished_reason=abort"] == 0
    name = "vllm:time_to_first_token_seconds"
    assert samples[f"{name}_bucket", "le=0.001"] == 1
    assert samples[f"{name}_bucket", "le=0.04"] == 2
    assert samples[f"{name}_bucket", "le=2560.0"] == 2
    assert samples[f"{name}_bucket", "le=+Inf"] == samples[f"{name}_count", ""] == 3
    assert samples[f"{name}_sum", ""] == pytest.approx(9999.031)
    assert samples["kvd:blocks", "state=active,tier=device"] == 25
    assert samples["kvd:blocks", "state=cached,tier=device"] == 40
    assert samples["kvd:blocks", "state=free,tier=device"] == 35
    assert samples["kvd:blocks", "state=used,tier=ram"] == 30
    assert samples["kvd:blocks", "state=free,tier=ram"] == 20
    assert samples["kvd:prefix_hit_tokens_total", "source=pool"] == 32
    assert samples["kvd:prefix_hit_tokens_total", "source=ram"] == 20
    assert samples["kvd:prefix_hit_tokens_total", "source=disk"] == 8
    assert samples["kvd:partial_hit_tokens_total", ""] == 7
    assert samples["kvd:preemptions_total", "way=recompute"] == 3
    assert samples["kvd:preemptions_total", "way=swap"] == 2
    assert samples["kvd:saved_blocks_total", ""] == 11
    assert samples["kvd:unsaved_blocks_total", ""] == 12
    assert samples["kvd:restored_blocks_total", ""] == 13
    assert samples["kvd:dropped_tokens_total", ""] == 14
    assert (samples["kvd:running_limit", ""], samples["kvd:step_budget_tokens", ""]) == (12, 80)
    assert samples["kvd:evictions_total", "reason=capacity"] == 5
    assert samples["kvd:recomputed_tokens_total", ""] == 3
    assert samples["kvd:kv_bytes_per_token", ""] == 7000.5
    assert samples["kvd:prefix_cache_hit_rate", ""] == 0.6


# --------------------------------------------------------------------------- control routes


async def test_snapshot_over_http(harness: Harness) -> None:
    harness.engine.observe("iteration_tokens_total", 5, 10**6)
    harness.engine.permits = asyncio.Semaphore(0)
    task = asyncio.create_task(harness.post("/v1/chat/completions", {"messages": USER}))
    await harness.engine.reach(1)
    async with harness.session.get(harness.url + "/kvd/snapshot") as response:
        snapshot = decode_snapshot(await response.read())
    here = await harness.engine.snapshot(details=True)
    assert snapshot.info == here.info
    assert snapshot.histograms == here.histograms
    assert snapshot.requests == here.requests
    _, answer = await harness.call("GET", "/kvd/requests")
    assert [view["request_id"] for view in answer["requests"]] == list(harness.engine.running_ids)
    assert answer["requests"][0]["endpoint"] == "chat"
    task.cancel()


async def test_events_are_snapshots_and_log_lines(start_server: StartServer) -> None:
    harness = await start_server(snapshot_seconds=0.005)
    harness.event_log.add("info", "before", "an earlier event")
    async with harness.session.get(harness.url + "/kvd/events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        first = await response.content.readuntil(b"\n\n")
        assert first.startswith(b"event: snapshot\ndata: ")
        assert decode_snapshot(first.split(b"data: ", 1)[1]).info.model == MODEL
        earlier = await response.content.readuntil(b"\n\n")
        assert earlier.startswith(b"event: log\n")
        assert decode_log_event(earlier.split(b"data: ", 1)[1]).kind == "before"
        harness.event_log.add("warning", "now", "something", "req-1")
        while (part := await response.content.readuntil(b"\n\n")).startswith(b"event: snapshot"):
            pass
        assert decode_log_event(part.split(b"data: ", 1)[1]).request_id == "req-1"
        await harness.server.close()
        rest = await response.read()
    assert rest.count(b"event: log") == 0


async def test_abort_by_the_answer_s_id(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    task = asyncio.create_task(harness.post("/v1/completions", {"prompt": ["a", "b"]}))
    await harness.engine.reach(2)
    request_id = min(harness.engine.running_ids).rpartition("-")[0]
    status, answer = await harness.post(f"/kvd/requests/{request_id}/abort", b"")
    assert (status, answer) == (200, {"id": request_id, "aborted": True})
    assert (await task)[0] == 499
    assert len(harness.engine.aborted) == 2
    assert harness.event_log.recent()[-1].request_id == request_id
    status, answer = await harness.post(f"/kvd/requests/{request_id}/abort", b"")
    assert (status, answer["error"]["code"]) == (404, "request_not_found")


async def test_abort_of_one_choice(harness: Harness) -> None:
    harness.engine.permits = asyncio.Semaphore(0)
    task = asyncio.create_task(harness.post("/v1/completions", {"prompt": "a"}))
    await harness.engine.reach(1)
    (engine_id,) = harness.engine.running_ids
    assert (await harness.post(f"/v1/kvd/requests/{engine_id}/abort", b""))[0] == 200
    await task
