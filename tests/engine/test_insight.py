"""What a running engine says about itself: map, timelines, chains, admissions, and what it tells the event log."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE, Request, SamplingParams, TokenEvent
from kvd.engine.engine import Engine
from kvd.engine.reporting import Reporter
from kvd.errors import ContextLengthExceeded, RequestError
from kvd.insight import Admission
from kvd.scheduler.scheduler import Scheduler, SchedulerConfig
from kvd.views import DiskFacts

from .test_engine import INFO, FakeRunner, collect

Event = tuple[str, str, str, str | None]


class Fixture:
    def __init__(self, num_blocks: int = 64) -> None:
        self.runner = FakeRunner()
        self.admissions: list[Admission] = []
        self.events: list[Event] = []
        manager = CacheManager((num_blocks,), key_seed=b"test")
        config = SchedulerConfig(
            4, 64, 512, expected_growth_factor=0.0, min_expected_growth_tokens=0, target_gap_seconds=None
        )
        self.scheduler = Scheduler(config, manager, time.monotonic)
        self.engine = Engine(
            INFO, self.scheduler, self.runner, log=lambda *line: None,  # type: ignore[arg-type]
            on_admission=self.admissions.extend, on_event=lambda *event: self.events.append(event),
        )  # fmt: skip

    async def run(self, *requests: Request) -> list[list[TokenEvent]]:
        return await asyncio.gather(*[collect(self.engine.submit(each)) for each in requests])


def request(request_id: str, first: int = 0, num_prompt: int = 40, max_tokens: int = 5) -> Request:
    prompt = tuple(range(first, first + num_prompt))
    return Request(
        request_id, prompt, SamplingParams(max_tokens=max_tokens), time.monotonic(), client="x", endpoint="chat"
    )


async def test_an_engine_explains_what_it_has_done() -> None:
    fixture = Fixture()
    engine = fixture.engine
    before = time.time()
    await engine.start()
    await fixture.run(request("a"))
    await fixture.run(request("b"))
    assert [(each.request_id, each.num_cached_tokens) for each in fixture.admissions] == [("a", 0), ("b", 39)]
    timeline = await engine.timeline("b")
    assert timeline is not None
    assert [entry.kind for entry in timeline.entries][:2] == ["queued", "admitted"]
    assert before - 1 <= timeline.arrived <= time.time()
    assert (timeline.client, timeline.endpoint) == ("x", "chat")
    assert await engine.timeline("nobody") is None
    assert [each.request_id for each in await engine.timelines(1)] == ["b"]
    drawn = await engine.block_map(4)
    assert (drawn.num_blocks, len(drawn.cells), drawn.owners[1], sum(drawn.owner_blocks)) == (64, 4, "x", 3)
    for options in ((4, 1), (4, -1), (0, 0)):
        with pytest.raises(RequestError, match="layer groups 0 to 0"):
            await engine.block_map(*options)
    (view,) = await engine.prefixes(5)
    assert view.client == "x"
    assert await engine.chain_tokens(view.prefix_id, 10) == tuple(range(10))
    assert await engine.chain_tokens("b", 10) == tuple(range(10))
    assert await engine.chain_tokens("nobody", 10) == ()
    assert await engine.drop_prefix(view.prefix_id) == 3
    assert await engine.prefixes(5) == ()
    await engine.stop(1)
    snapshot = await engine.snapshot()
    assert snapshot.disk is None
    assert snapshot.cache_histograms["block_reuse_gap_seconds"].total > 0
    assert snapshot.prefill_tokens_per_second > 0
    assert dict(snapshot.counters.evicted_blocks)["dropped"] == 3


async def test_waiting_and_stalling_are_counted_also_while_nothing_is_published() -> None:
    fixture = Fixture()
    gate, has_begun = threading.Event(), threading.Event()

    def hold(plan: object) -> None:
        has_begun.set()
        gate.wait(20)

    await fixture.engine.start()
    fixture.runner.before_step = hold
    task = asyncio.create_task(fixture.run(request("a", max_tokens=1)))
    await asyncio.to_thread(has_begun.wait, 20)
    first = (await fixture.engine.snapshot()).stalled_seconds
    second = (await fixture.engine.snapshot()).stalled_seconds
    assert 0 < first < second
    with_details = await asyncio.wait_for(fixture.engine.snapshot(details=True), 10)
    assert with_details.stalled_seconds > second
    gate.set()
    await task
    assert (await fixture.engine.snapshot()).stalled_seconds == 0.0
    await fixture.engine.stop(1)


async def test_an_engine_outlives_all_who_watch_it() -> None:
    fixture = Fixture(num_blocks=6)
    engine = fixture.engine

    def fail(*_: object) -> None:
        raise RuntimeError("an observer failed")

    fixture.scheduler.admissions.receive = fail
    engine._reporter._on_event = fail
    fixture.scheduler.timelines._clock = fail  # type: ignore[assignment]
    await engine.start()
    answers = await fixture.run(request("a", 0, 30, 60), request("b", 1000, 30, 60))
    assert [events[-1].finish_reason for events in answers] == ["length", "length"]
    with pytest.raises(ContextLengthExceeded):
        engine.submit(request("long", num_prompt=600))
    snapshot = await engine.snapshot()
    assert snapshot.state == "ready"
    assert snapshot.counters.num_preemptions > 0
    assert snapshot.num_blocks_active == 0
    await engine.stop(1)


async def test_preemptions_and_evictions_are_told() -> None:
    fixture = Fixture(num_blocks=6)
    await fixture.engine.start()
    await fixture.run(request("a", 0, 30, 40), request("b", 1000, 30, 40))
    kinds = [event[1] for event in fixture.events]
    assert kinds.count("preempted") == 1, "at most once per interval"
    level, _, message, request_id = next(event for event in fixture.events if event[1] == "preempted")
    assert (level, request_id) == ("warning", "b")
    assert message.startswith("gave way for a; to be computed again (")
    assert kinds.count("evicted") == 1
    assert "had to give way" in next(event for event in fixture.events if event[1] == "evicted")[2]
    await fixture.engine.stop(1)


async def test_refusals_and_failures_are_told() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    for _ in range(3):
        with pytest.raises(ContextLengthExceeded):
            fixture.engine.submit(request("long", num_prompt=600))
    assert [(event[0], event[1], event[3]) for event in fixture.events] == [("warning", "refused", "long")]
    fixture.events.clear()
    fixture.runner.not_finite.add("a")
    await fixture.run(request("a"), request("b", 500))
    assert fixture.events == [("error", "failed", "the model computed logits that are not finite", "a")]
    await fixture.engine.stop(1)


async def test_a_step_that_fails_for_many_is_told_in_one_line() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    gate = threading.Event()

    def fail(plan: object) -> None:
        gate.wait(20)
        raise RuntimeError("broken")

    fixture.runner.before_step = fail
    streams = [fixture.engine.submit(request(f"r{number}", 100 * number)) for number in range(7)]
    gate.set()
    await asyncio.gather(*map(collect, streams))
    failed = [event for event in fixture.events if event[1] == "failed"]
    assert sum(int(event[2].split()[0]) if event[3] is None else 1 for event in failed) == 7
    assert all("broken" in event[2] for event in failed)
    await fixture.engine.stop(1)


# --------------------------------------------------------------------------- the reporter alone


def reporter(events: list[Event], interval_seconds: float = 0.0) -> tuple[Reporter, Any]:
    cache = SimpleNamespace(num_evicted_blocks=0, num_blocks_active=3, num_blocks=8)
    scheduler: Any = SimpleNamespace(num_preemptions=0, latest_preemption=("", ""), cache=cache)
    return Reporter(scheduler, lambda *event: events.append(event), interval_seconds), scheduler


def test_nothing_is_told_when_nothing_has_happened() -> None:
    events: list[Event] = []
    told, _ = reporter(events)
    told.stepped()
    told.ended(
        [TokenEvent("a", 7, 1, 0, 1, finish_reason="stop"), TokenEvent("b", None, 1, 0, 1, finish_reason="abort")]
    )
    assert events == []


def test_evictions_are_added_up_until_they_are_told() -> None:
    events: list[Event] = []
    told, scheduler = reporter(events, interval_seconds=3600.0)
    scheduler.cache.num_evicted_blocks = 1
    told.stepped()
    scheduler.cache.num_evicted_blocks = 1500
    told.stepped()
    assert [event[2] for event in events] == ["1 cached block had to give way; 3 of 8 are in use"]
    told._next_evictions = 0.0
    told.stepped()
    assert events[-1] == ("info", "evicted", "1,499 cached blocks had to give way; 3 of 8 are in use", None)


def test_timeouts_and_impossible_grammars_are_no_errors_of_the_server() -> None:
    events: list[Event] = []
    told, _ = reporter(events)
    told.ended([
        TokenEvent("a", None, 1, 0, 0, finish_reason="timeout", error="timed out"),
        TokenEvent("b", None, 1, 0, 0, finish_reason="refused", error="grammar"),
    ])  # fmt: skip
    assert events == [("warning", "failed", "timed out", "a"), ("warning", "refused", "grammar", "b")]


def test_trouble_with_the_disk_is_told_when_it_begins_and_when_it_is_over() -> None:
    events: list[Event] = []
    told, _ = reporter(events)
    for problem in ("", "full", "full", "", ""):
        told.disk(DiskFacts(1, 2, 3, problem=problem))
    assert events == [("warning", "disk", "full", None), ("info", "disk", "the disk cache works again", None)]


def test_blocks_of_a_request_are_its_clients_before_they_are_known() -> None:
    manager = CacheManager((8,), key_seed=b"test")
    scheduler = Scheduler(SchedulerConfig(4, 64, 512), manager, time.monotonic)
    scheduler.add(request("a", num_prompt=3 * BLOCK_SIZE))
    assert scheduler.plan() is not None
    owners = manager.groups[0].records.owner
    assert [manager.ledger.owners.names[number] for number in owners[:3]] == ["x"] * 3
