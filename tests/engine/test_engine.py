"""The façade and its thread, over the real scheduler and a runner that invents tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from kvd.cache.manager import CacheManager
from kvd.core import PlanItem, Request, Sample, SamplingParams, StepPlan, StepResult, TokenEvent
from kvd.engine.engine import Engine
from kvd.engine.streams import TokenStream
from kvd.errors import ContextLengthExceeded, EngineFailure, ServerOverloaded
from kvd.scheduler.scheduler import Scheduler, SchedulerConfig
from kvd.views import EngineInfo, MemoryBudget, RequestView

BUDGET = MemoryBudget(0, 0, 0, 0, 64, 1024, 64.0, 128.0)
INFO = EngineInfo(
    "fake", ("fake",), "llama", "none", "fake", "cpu", "int8", 512, 4, 64, 100, True, BUDGET, created=0, version="test"
)


class FakeRunner:
    """Samples 7 for everybody. `before_step` may wait, or raise as a broken runner would."""

    steps_ahead = 0

    def __init__(self) -> None:
        self.in_flight: list[StepPlan] = []
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.num_steps = 0
        self.not_finite: set[str] = set()
        self.unready: frozenset[str] = frozenset()
        self.num_awaited = 0
        self.is_closed = False

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    def launch(self, plan: StepPlan) -> None:
        assert len(self.in_flight) <= self.steps_ahead
        self.in_flight.append(plan)

    def land(self) -> tuple[StepPlan, StepResult]:
        plan = self.in_flight[0]
        self.before_step(plan)
        self.num_steps += 1
        samples = tuple(self.sample(item) for item in plan.items if item.samples)
        return self.in_flight.pop(0), StepResult(plan.step_id, samples, 0.001)

    def unready_requests(self) -> frozenset[str]:
        return self.unready

    def await_ready(self, timeout: float) -> None:
        self.num_awaited += 1
        time.sleep(0.001)

    def close(self) -> None:
        self.is_closed = True

    def void(self) -> int:
        step_id = self.in_flight[0].step_id
        self.in_flight.clear()
        return step_id

    def sample(self, item: PlanItem) -> Sample:
        return Sample(item.request_id, None if item.request_id in self.not_finite else 7)


@pytest.fixture(autouse=True, params=[0, 1], ids=["depth-0", "depth-1"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every test runs with a runner that finishes each step first, and with one that has a step in flight meanwhile."""
    depth: int = request.param
    monkeypatch.setattr(FakeRunner, "steps_ahead", depth)
    return depth


class Fixture:
    def __init__(self, num_blocks: int = 64, max_waiting: int = 8) -> None:
        self.runner = FakeRunner()
        manager = CacheManager(num_blocks=(num_blocks,), windows=(0,), enable_prefix_caching=True, key_seed=b"test")
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, max_waiting=max_waiting),
            manager,
            time.monotonic,
        )
        self.log: list[tuple[str, str]] = []
        self.engine = Engine(INFO, scheduler, self.runner, log=lambda *line: self.log.append(line))  # type: ignore[arg-type]


def request(request_id: str, num_prompt: int = 20, max_tokens: int = 5) -> Request:
    return Request(request_id, tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens), time.monotonic())


async def collect(stream: TokenStream) -> list[TokenEvent]:
    return [event async for events in stream for event in events]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition is set by another thread, without a loop
            await asyncio.sleep(0.005)


async def test_a_request_is_answered_and_leaves_nothing_behind() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    events = await collect(fixture.engine.submit(request("a")))
    assert [event.token_id for event in events] == [7] * 5
    assert events[-1].finish_reason == "length"
    assert events[-1].timing is not None
    await until(lambda: fixture.engine._snapshot.counters.finished == (("length", 1),))
    snapshot = await fixture.engine.snapshot()
    assert (snapshot.num_blocks_active, snapshot.counters.generation_tokens) == (0, 5)
    assert snapshot.histograms["time_to_first_token_seconds"].total == 1
    assert snapshot.histograms["inter_token_latency_seconds"].total == 4
    await fixture.engine.stop(1)


async def test_requests_before_start_and_while_draining_are_refused() -> None:
    fixture = Fixture()
    with pytest.raises(ServerOverloaded, match="loading"):
        fixture.engine.submit(request("early"))
    await fixture.engine.start()
    gate = threading.Event()
    fixture.runner.before_step = lambda plan: void(gate.wait(10))
    stream = fixture.engine.submit(request("running"))
    stopping = asyncio.create_task(fixture.engine.stop(10))
    await asyncio.sleep(0)
    with pytest.raises(ServerOverloaded, match="draining"):
        fixture.engine.submit(request("late"))
    assert fixture.engine.health() == "the server is draining"
    gate.set()
    assert (await collect(stream))[-1].finish_reason == "length"
    await stopping


async def test_a_drain_that_takes_too_long_cancels() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    fixture.runner.before_step = lambda plan: time.sleep(0.01)
    stream = fixture.engine.submit(request("long", max_tokens=400))
    await fixture.engine.stop(0.05)
    assert (await collect(stream))[-1].finish_reason == "abort"


async def test_abort_ends_a_stream_and_is_harmless_twice() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    fixture.runner.before_step = lambda plan: time.sleep(0.002)
    stream = fixture.engine.submit(request("a", max_tokens=400))
    await anext(stream)
    stream.abort()
    stream.abort()
    assert (await collect(stream))[-1].finish_reason == "abort"
    assert await fixture.engine.abort("a") is False
    assert await fixture.engine.abort("nobody") is False
    await until(lambda: fixture.engine._snapshot.num_blocks_active == 0)
    await fixture.engine.stop(1)


async def test_logits_that_are_not_finite_end_their_own_request_alone() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    fixture.runner.not_finite.add("broken")
    gate = threading.Event()
    fixture.runner.before_step = lambda plan: void(gate.wait(10))
    healthy, broken = (fixture.engine.submit(request(name)) for name in ("healthy", "broken"))
    gate.set()
    last = (await collect(broken))[-1]
    assert (last.finish_reason, last.token_id) == ("error", None)
    assert "not finite" in str(last.error)
    assert [event.token_id for event in await collect(healthy)] == [7] * 5
    assert fixture.engine.health() is None
    await fixture.engine.stop(1)


async def test_a_step_that_fails_is_reported_and_the_next_request_is_served() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    await collect(fixture.engine.submit(request("before")))
    assert (await fixture.engine.snapshot(details=True)).num_blocks_cached

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("a buffer is too small")

    fixture.runner.before_step = fail
    last = (await collect(fixture.engine.submit(request("a"))))[-1]
    assert last.finish_reason == "error"
    assert "too small" in str(last.error)
    assert any(level == "error" for level, _ in fixture.log)
    assert await fixture.engine.reset_cache() == 0, "what the failed step may have written to is gone already"
    fixture.runner.before_step = lambda plan: None
    assert (await collect(fixture.engine.submit(request("b"))))[-1].finish_reason == "length"
    assert fixture.engine.health() is None
    await fixture.engine.stop(1)


async def test_a_device_that_is_lost_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps would fail for ever after, while the server called itself healthy."""
    fixture = Fixture()
    await fixture.engine.start()

    def fail(*_: object) -> int:
        raise RuntimeError("an illegal memory access")

    fixture.runner.before_step = fail  # type: ignore[assignment]
    monkeypatch.setattr(fixture.runner, "void", fail)
    last = (await collect(fixture.engine.submit(request("a"))))[-1]
    assert last.finish_reason == "error"
    assert "illegal memory access" in str(last.error)
    assert "illegal memory access" in str(fixture.engine.health())
    with pytest.raises(EngineFailure):
        fixture.engine.submit(request("b"))
    await fixture.engine.stop(0)


async def test_a_dead_engine_is_reported_to_everybody() -> None:
    fixture = Fixture()
    await fixture.engine.start()

    def die(plan: StepPlan) -> None:
        raise SystemExit("the thread ends")

    fixture.runner.before_step = die
    last = (await collect(fixture.engine.submit(request("a"))))[-1]
    assert last.finish_reason == "error"
    with pytest.raises(EngineFailure):
        fixture.engine.submit(request("b"))
    assert "the engine stopped" in str(fixture.engine.health())
    assert (await fixture.engine.snapshot()).state == "failed"
    await fixture.engine.stop(0)


async def test_impossible_requests_are_refused_at_once() -> None:
    fixture = Fixture(num_blocks=4)
    await fixture.engine.start()
    with pytest.raises(ContextLengthExceeded):
        fixture.engine.submit(request("long", num_prompt=600))
    with pytest.raises(ContextLengthExceeded, match="64"):
        fixture.engine.submit(request("larger-than-the-pool", num_prompt=64))
    assert (await collect(fixture.engine.submit(request("short"))))[-1].finish_reason == "length"
    await fixture.engine.stop(1)


async def test_a_full_queue_refuses_at_once() -> None:
    fixture = Fixture(max_waiting=2)
    await fixture.engine.start()
    gate = threading.Event()
    fixture.runner.before_step = lambda plan: void(gate.wait(10))
    streams = []
    with pytest.raises(ServerOverloaded):  # noqa: PT012 - which one is refused depends on what is running already
        for index in range(20):
            streams.append(fixture.engine.submit(request(f"r{index}")))
    assert 2 <= len(streams) <= 7
    gate.set()
    for stream in streams:
        assert (await collect(stream))[-1].finish_reason == "length"
    await fixture.engine.stop(1)


async def test_only_requests_fill_the_queue() -> None:
    """Questions and aborts on their way to the engine thread are no requests; a request that has ended is none."""
    fixture = Fixture(max_waiting=2)
    await fixture.engine.start()
    gate, has_begun = threading.Event(), threading.Event()
    fixture.runner.before_step = lambda plan: void((has_begun.set(), gate.wait(10)))
    streams = [fixture.engine.submit(request("r0"))]
    await until(has_begun.is_set)
    questions = [asyncio.create_task(fixture.engine.abort("nobody")) for _ in range(10)]
    await asyncio.sleep(0)
    streams += [fixture.engine.submit(request(f"r{number}")) for number in range(1, 6)]
    with pytest.raises(ServerOverloaded, match="6 requests"):
        fixture.engine.submit(request("r6"))
    gate.set()
    for stream in streams:
        assert (await collect(stream))[-1].finish_reason == "length"
    assert not any(await asyncio.gather(*questions))
    await fixture.engine.stop(1)


async def test_no_progress_shows_in_health() -> None:
    fixture = Fixture()
    fixture.engine._wedged_after_seconds = 0.05
    await fixture.engine.start()
    gate = threading.Event()
    fixture.runner.before_step = lambda plan: void(gate.wait(10))
    stream = fixture.engine.submit(request("a"))
    await until(lambda: fixture.engine.health() is not None)
    assert "no progress" in str(fixture.engine.health())
    gate.set()
    await collect(stream)
    assert fixture.engine.health() is None
    await fixture.engine.stop(1)


async def test_a_question_that_nobody_waits_for_any_more_harms_nobody() -> None:
    """A dashboard or a client may give up while a long step runs; the engine answers into the void."""
    fixture = Fixture()
    await fixture.engine.start()
    gate, has_begun = threading.Event(), threading.Event()

    def hold(plan: StepPlan) -> None:
        has_begun.set()
        gate.wait(10)

    fixture.runner.before_step = hold
    stream = fixture.engine.submit(request("a"))
    await until(has_begun.is_set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await fixture.engine.snapshot(details=True)
    gate.set()
    assert (await collect(stream))[-1].finish_reason == "length"
    assert fixture.engine.health() is None
    await fixture.engine.stop(1)


async def test_a_question_to_an_engine_that_dies_is_answered() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    gate, has_begun = threading.Event(), threading.Event()

    def die(plan: StepPlan) -> None:
        has_begun.set()
        gate.wait(10)
        raise SystemExit("the thread ends")

    fixture.runner.before_step = die
    stream = fixture.engine.submit(request("a"))
    await until(has_begun.is_set)
    asking = asyncio.create_task(fixture.engine.reset_cache())
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(10):
        with pytest.raises(EngineFailure, match="the thread ends"):
            await asking
        assert (await collect(stream))[-1].finish_reason == "error"
        with pytest.raises(EngineFailure):
            await fixture.engine.abort("a")
    await fixture.engine.stop(0)


async def test_an_idle_engine_tells_its_age_and_its_state() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    first = await fixture.engine.snapshot()
    await asyncio.sleep(0.02)
    assert (await fixture.engine.snapshot()).uptime_seconds > first.uptime_seconds
    await fixture.engine.stop(0)
    assert (await fixture.engine.snapshot()).state == "draining"


async def test_idle_time_is_no_lack_of_progress() -> None:
    fixture = Fixture()
    fixture.engine._wedged_after_seconds = 0.05
    await fixture.engine.start()
    await asyncio.sleep(0.06)
    stream = fixture.engine.submit(request("a"))
    assert fixture.engine.health() is None, "the engine thread had no time to see the request"
    await collect(stream)
    await fixture.engine.stop(1)


async def test_details_show_the_request_table() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    fixture.runner.before_step = lambda plan: time.sleep(0.005)
    stream = fixture.engine.submit(request("a", max_tokens=300))
    await anext(stream)
    snapshot = await fixture.engine.snapshot(details=True)
    assert [view.request_id for view in snapshot.requests] == ["a"]
    stream.abort()
    await fixture.engine.stop(1)


async def test_observers_that_ask_during_one_step_share_one_request_table() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    gate, has_begun = threading.Event(), threading.Event()
    fixture.runner.before_step = lambda plan: void((has_begun.set(), gate.wait(10)))
    stream = fixture.engine.submit(request("a", max_tokens=1))
    await until(has_begun.is_set)
    num_built = 0
    build = fixture.engine._scheduler.request_views

    def count() -> tuple[RequestView, ...]:
        nonlocal num_built
        num_built += 1
        return build()

    fixture.engine._scheduler.request_views = count  # type: ignore[method-assign]
    observers = [asyncio.create_task(fixture.engine.snapshot(details=True)) for _ in range(5)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*observers)
    assert num_built == 1
    await collect(stream)
    await fixture.engine.stop(1)


async def test_an_idle_engine_takes_no_steps_and_no_time() -> None:
    fixture = Fixture()
    await fixture.engine.start()
    await collect(fixture.engine.submit(request("a")))
    await until(lambda: fixture.engine._snapshot.counters.finished == (("length", 1),))
    await asyncio.sleep(0.1)  # the last step is published before its events go out, and once more after them
    steps, published = fixture.runner.num_steps, fixture.engine._last_published
    await asyncio.sleep(0.1)
    assert fixture.runner.num_steps == steps
    assert fixture.engine._last_published == published, "the thread sleeps until somebody comes"
    await fixture.engine.stop(1)


def void(_: object) -> None:
    """A callback's result, not wanted."""
