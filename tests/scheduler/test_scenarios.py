"""Whole situations against a machine of known speed, which alone moves the clock."""

from __future__ import annotations

import itertools

import pytest

from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE, Request, SamplingParams, StepPlan, TokenEvent
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.scheduler import Rates, Scheduler
from kvd.views import Counters

from .fake_runner import FakeRunner, Speed
from .invariants import check_everything
from .truth import Truth

MACHINE = Speed(decode_seconds=0.005, prefill_seconds_per_token=1 / 2000, move_seconds=0.0002)
"""5 ms for a step of any size, 2,000 prompt tokens per second, 5,000 blocks per second between pool and RAM."""
BLOCK_BYTES = 1000


class Machine:
    """A scheduler whose steps take as long as `speed` says. Planning depth 0."""

    def __init__(
        self,
        *,
        speed: Speed = MACHINE,
        num_blocks: int = 20_000,
        num_ram_slots: int = 0,
        rates: dict[str, float] | None = None,
        **config: object,
    ) -> None:
        self.now = 0.0
        settings: dict[str, object] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 40_000}
        self.cache = CacheManager(
            [num_blocks],
            key_seed=b"scenario",
            num_ram_slots=[num_ram_slots],
            block_bytes=[BLOCK_BYTES],
            clock=lambda: self.now,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(**(settings | config)), self.cache, lambda: self.now, Rates(fixed=rates)
        )
        self.truths: dict[str, Truth] = {}
        self.runner = FakeRunner(self.cache, self.truths, 0, speed)
        self.events: list[tuple[float, TokenEvent]] = []
        self.plans: list[StepPlan] = []

    def add(self, request_id: str, prompt: range | list[int], *, max_tokens: int, client: str = "", priority: int = 0):
        request = Request(
            request_id,
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens),
            self.now,
            client=client,
            priority=priority,
        )
        limit = min(self.scheduler.config.max_model_len, self.cache.capacity_tokens + 1)
        self.truths[request_id] = Truth.of(request, limit, budget_tokens=0)
        self.scheduler.add(request)

    def step(self) -> list[TokenEvent]:
        plan = self.scheduler.plan()
        assert plan is not None
        self.plans.append(plan)
        result = self.runner.run(plan)
        self.now += result.seconds
        events = self.scheduler.commit(plan, result)
        self.events += [(self.now, event) for event in events]
        return events

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        check_everything(self.scheduler)

    def times(self, request_id: str) -> list[float]:
        return [time for time, event in self.events if event.request_id == request_id]

    def longest_gap(self, request_id: str) -> float:
        times = self.times(request_id)
        return max(after - before for before, after in itertools.pairwise(times))

    def output(self, request_id: str) -> list[int | None]:
        return [event.token_id for _, event in self.events if event.request_id == request_id]

    def last_event(self, request_id: str) -> TokenEvent:
        return [event for _, event in self.events if event.request_id == request_id][-1]

    @property
    def counters(self) -> Counters:
        return self.scheduler.counters()


# --------------------------------------------------------------------------- streams beside prompts


@pytest.mark.parametrize("num_prompts", [1, 8])
@pytest.mark.parametrize("learns", [True, False])
def test_long_prompts_do_not_hold_up_a_stream_for_longer_than_twice_the_target(num_prompts: int, learns: bool) -> None:
    target = 0.1
    fixed = {"prefill_tokens_per_second": 2000.0, "decode_base_seconds": 0.005, "decode_seconds_per_request": 1e-9}
    machine = Machine(target_gap_seconds=target, rates=None if learns else fixed)
    machine.add("stream", range(20), max_tokens=num_prompts * 400)
    for _ in range(20):
        machine.step()
    for number in range(num_prompts):
        machine.add(f"prompt {number}", range(1000 * number, 1000 * number + 30_000), max_tokens=1)
    while not all(machine.times(f"prompt {number}") for number in range(num_prompts)):
        machine.step()
        assert machine.scheduler.num_running + machine.scheduler.num_waiting
    assert machine.last_event("stream").finish_reason is None, "the stream ended before the prompts: nothing is shown"
    assert machine.longest_gap("stream") < 2 * target
    # Nor is the machine left idle beside the stream: a prompt gets most of the time that the target leaves.
    seconds = machine.now - 20 * 0.005
    assert seconds < 1.5 * num_prompts * 30_000 / 2000


def test_without_a_target_a_prompt_takes_the_whole_budget() -> None:
    machine = Machine()
    machine.add("stream", range(20), max_tokens=100)
    machine.step()
    machine.add("prompt", range(100, 8100), max_tokens=1)
    machine.step()
    assert machine.plans[-1].num_tokens == 2048
    assert machine.longest_gap("stream") > 1.0


def test_restores_beside_a_stream_are_limited_by_the_target_as_well() -> None:
    target = 0.02
    rates = {
        "prefill_tokens_per_second": 2000.0,
        "decode_base_seconds": 0.005,
        "decode_seconds_per_request": 1e-9,
        "restore_bytes_per_second": BLOCK_BYTES / 0.0002,
    }
    machine = Machine(num_blocks=700, num_ram_slots=3000, target_gap_seconds=target, rates=rates, max_model_len=10_000)
    machine.add("first", range(8000), max_tokens=1)
    machine.finish()
    machine.add("other", range(20_000, 28_000), max_tokens=1)
    machine.finish()
    machine.add("stream", range(50_000, 50_020), max_tokens=200)
    machine.step()
    machine.add("again", range(8000), max_tokens=1)
    while not machine.times("again"):
        machine.step()
    assert machine.counters.num_restored_blocks > 256, "nothing came back from RAM: the test shows nothing"
    assert machine.last_event("again").num_cached_tokens >= 7900
    assert machine.longest_gap("stream") < 2 * target
    assert len({plan.step_id for plan in machine.plans if plan.restores}) > 2


# --------------------------------------------------------------------------- throughput


def throughput(num_clients: int, **config: object) -> float:
    """Output tokens per second of clients that each send the next request when the one before has ended."""
    speed = Speed(decode_seconds=0.02, decode_seconds_per_request=0.0005, prefill_seconds_per_token=1 / 2000)
    machine = Machine(speed=speed, num_blocks=4 * 10, max_num_seqs=32, max_model_len=400, **config)
    sent = 0

    def send() -> None:
        nonlocal sent
        sent += 1
        machine.add(f"r{sent}", range(1000 * sent, 1000 * sent + 100), max_tokens=60, client=f"c{sent % num_clients}")

    for _ in range(num_clients):
        send()
    start = 0.0
    num_tokens = num_ended = 0
    while num_ended < 130:
        for event in machine.step():
            if event.finish_reason is not None:
                num_ended += 1
                send()
                if num_ended == 40:
                    start, num_tokens = machine.now, 0
            num_tokens += 1
    return num_tokens / (machine.now - start)


@pytest.mark.parametrize("is_auto", [True, False])
def test_throughput_rises_with_concurrency_and_then_stays(is_auto: bool) -> None:
    """The pool holds four requests; more than that wait instead of pushing each other out."""
    rates = [throughput(number, is_auto_num_seqs=is_auto) for number in (1, 2, 4, 8, 16, 32)]
    assert rates[1] > 1.4 * rates[0]
    assert rates[2] > 1.4 * rates[1]
    assert min(rates[2:]) >= 0.9 * max(rates), rates


# --------------------------------------------------------------------------- swap or recompute


def preempted(rates: dict[str, float], num_ram_slots: int = 100) -> Machine:
    """Two requests of 30 tokens grow in five blocks until the younger has to give way."""
    machine = Machine(
        num_blocks=5,
        num_ram_slots=num_ram_slots,
        rates=rates,
        expected_growth_factor=0.0,
        min_expected_growth_tokens=0,
    )
    machine.add("old", range(30), max_tokens=40)
    machine.add("young", range(100, 130), max_tokens=20)
    machine.finish()
    assert machine.counters.num_preemptions == 1
    for request_id in ("old", "young"):
        assert machine.output(request_id) == machine.truths[request_id].output
    return machine


CHEAP_COPIES = {
    "prefill_tokens_per_second": 100.0,
    "save_bytes_per_second": 1e6,
    "restore_bytes_per_second": 1e6,
}
DEAR_COPIES = CHEAP_COPIES | {"save_bytes_per_second": 1e3, "restore_bytes_per_second": 1e3}


def test_swapping_is_chosen_where_it_is_cheaper_and_computes_nothing_again() -> None:
    machine = preempted(CHEAP_COPIES)
    assert machine.counters.num_swaps == 1
    assert machine.counters.recomputed_tokens == 0
    assert machine.counters.num_restored_blocks > 0


def test_recomputing_is_chosen_where_it_is_cheaper() -> None:
    machine = preempted(DEAR_COPIES)
    assert machine.counters.num_swaps == 0
    assert machine.counters.recomputed_tokens > 0


def test_without_ram_nothing_is_swapped() -> None:
    machine = preempted(CHEAP_COPIES, num_ram_slots=0)
    assert machine.counters.num_swaps == 0
    assert machine.counters.recomputed_tokens > 0


def test_a_swap_that_finds_no_slots_recomputes() -> None:
    machine = preempted(CHEAP_COPIES, num_ram_slots=1)
    assert machine.counters.num_swaps == 0
    assert machine.counters.recomputed_tokens > 0


# --------------------------------------------------------------------------- what is stored below


def test_with_ram_a_working_set_of_three_times_the_pool_is_computed_once() -> None:
    rates = CHEAP_COPIES | {"prefill_tokens_per_second": 10.0}
    machine = Machine(num_blocks=40, num_ram_slots=200, rates=rates)
    documents = [range(1000 * number, 1000 * number + 30 * BLOCK_SIZE) for number in range(4)]
    for turn in range(3):
        for number, document in enumerate(documents):
            machine.add(f"{turn} {number}", [*document, 7 + turn], max_tokens=1)
            machine.finish()
            expected = 30 * BLOCK_SIZE if turn else 0
            assert machine.last_event(f"{turn} {number}").num_cached_tokens == expected
    assert max(machine.runner.times_computed.values()) == 1
    assert machine.counters.ram_hit_tokens == machine.counters.prompt_tokens_cached


def test_case_7_a_small_ram_tier_never_holds_more_than_its_slots() -> None:
    machine = Machine(num_blocks=100, num_ram_slots=8, rates=CHEAP_COPIES, max_model_len=2000)
    for number in range(6):
        machine.add(f"r{number}", range(3000 * number, 3000 * number + 1200), max_tokens=3)
        machine.finish()
        (gauges,) = machine.cache.gauges()
        assert gauges.num_ram_used <= gauges.num_ram_slots == 8
    assert machine.counters.num_unsaved_blocks > 0
    assert machine.counters.num_saved_blocks > 0


def test_case_8_an_idle_server_plans_nothing_also_after_a_refusal() -> None:
    machine = Machine(num_blocks=4, num_ram_slots=4, rates=CHEAP_COPIES)
    with pytest.raises(Exception, match="4 blocks of 16 tokens"):
        machine.add("large", range(100), max_tokens=1)
    assert machine.scheduler.plan() is None
    machine.add("small", range(40), max_tokens=2)
    machine.finish()
    while machine.scheduler.has_moves:
        machine.step()
    assert not machine.scheduler.has_work
    assert [machine.scheduler.plan() for _ in range(5)] == [None] * 5


# --------------------------------------------------------------------------- fairness


def test_case_20_endless_urgent_arrivals_do_not_starve_a_humble_request() -> None:
    machine = Machine(max_num_seqs=1, max_num_batched_tokens=64, max_overtaken=8, max_waiting=64)
    machine.add("first", range(20), max_tokens=3)
    machine.add("humble", range(100, 120), max_tokens=3, priority=5)
    admitted: list[str] = []
    number = 0
    while "humble" not in admitted:
        while machine.scheduler.num_waiting < 4:
            number += 1
            machine.add(f"urgent {number}", range(200 * number, 200 * number + 20), max_tokens=3, priority=-1)
        machine.step()
        admitted += [request.request_id for request in machine.plans[-1].new_requests]
        assert len(admitted) <= 12, "the humble request starves"
    assert len(admitted) == 1 + 8 + 1


def test_case_21_one_request_of_another_client_is_not_behind_fifty() -> None:
    machine = Machine(max_num_seqs=2, max_num_batched_tokens=64)
    for number in range(50):
        machine.add(f"flood {number}", range(100 * number, 100 * number + 20), max_tokens=10, client="flood")
    for _ in range(5):
        machine.step()
    machine.add("other", range(9000, 9020), max_tokens=10, client="other")
    for _ in range(12):
        machine.step()
    assert machine.times("other"), "served with the first slot that comes free"


def test_a_lone_request_that_outgrows_pool_and_slots_ends_with_length_and_the_server_goes_on() -> None:
    machine = Machine(num_blocks=3, num_ram_slots=2, rates=CHEAP_COPIES)
    machine.add("long", range(20), max_tokens=1000)
    machine.finish()
    assert machine.last_event("long").finish_reason == "length"
    assert machine.last_event("long").num_output_tokens == 3 * BLOCK_SIZE + 1 - 20
    machine.add("next", range(500, 520), max_tokens=2)
    machine.finish()
    assert machine.output("next") == machine.truths["next"].output
