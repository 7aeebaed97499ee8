"""The concurrency limit against machines whose throughput is a known function of the number of running requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from kvd.scheduler.concurrency import (
    DRIFT,
    FIRST_CALM,
    FIRST_HOLD,
    GAIN,
    MAX_CALM,
    MAX_HOLD,
    MIXED_WINDOW,
    START,
    WINDOW,
    ConcurrencyLimit,
)

Curve = Callable[[float], float]
"""Number of running requests → tokens per second of a decode step."""

CURVES: dict[str, Curve] = {
    "linear": lambda n: 10 * n,
    "plateau at 3": lambda n: 10 * min(n, 3),
    "plateau at 10": lambda n: 10 * min(n, 10),
    "plateau at 40": lambda n: 10 * min(n, 40),
    "saturating": lambda n: 1000 * n / (n + 4),
    "saturating late": lambda n: 1000 * n / (n + 20),
    "peak at 2": lambda n: 100 * min(n, 2) - 8 * max(0, n - 2),
    "peak at 13": lambda n: 10 * n if n <= 13 else 130 * (13 / n) ** 0.7,
    "peak at 30": lambda n: 10 * n if n <= 30 else max(50, 300 - 12 * (n - 30)),
    "rise, stay, fall": lambda n: 10 * min(n, 12) if n < 28 else 60,
    "only worse": lambda n: 100 / n,
}


class Server:
    """Requests fill up to the limit at once and leave one by one; some steps compute prompts as well."""

    def __init__(
        self,
        limit: ConcurrencyLimit,
        curve: Curve,
        *,
        noise: float = 0.0,
        prefill_every: int = 0,
        memory: int = 10**9,
        seed: int = 0,
    ) -> None:
        self.limit = limit
        self.curve = curve
        self.noise = noise
        self.prefill_every = prefill_every
        self.memory = memory
        self.rng = random.Random(seed)
        self.num_running = 0
        self.num_preempting_steps = 0
        self.num_steps = 0

    def run(self, num_steps: int, num_waiting: int = 1000) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            self.num_running = max(self.limit.limit, self.num_running - 1)
            num_preempted = max(0, self.num_running - self.memory)
            self.num_running -= num_preempted
            self.num_preempting_steps += bool(num_preempted)
            seconds = self.num_running / self.curve(self.num_running)
            num_tokens = self.num_running
            if self.prefill_every and self.num_steps % self.prefill_every == 0:
                num_tokens += 500
                seconds += 0.5
            seconds *= 1 + self.noise * self.rng.uniform(-1, 1)
            self.limit.observe_step(self.num_running, num_waiting, num_tokens, seconds, num_preempted)


def share_of_best(limit: ConcurrencyLimit, curve: Curve, maximum: int) -> float:
    return curve(limit.limit) / max(map(curve, range(1, maximum + 1)))


def settling_steps(maximum: int) -> int:
    """The stated bound, and a step for each request that has to leave before a lower limit is reached."""
    return int((math.log2(maximum) + 8) * (WINDOW + maximum))


def settle(server: Server, maximum: int) -> None:
    """Run until the limit stays, which it has to do within the bound."""
    since, before = 0, server.limit.limit
    while since < 3 * (WINDOW + maximum):
        server.run(1)
        since = since + 1 if server.limit.limit == before else 0
        before = server.limit.limit
        assert server.num_steps - since <= settling_steps(maximum), "it does not settle"


@pytest.mark.parametrize("maximum", [1, 2, 7, 8, 32, 100])
@pytest.mark.parametrize("name", CURVES)
def test_it_settles_within_a_tenth_of_the_best(name: str, maximum: int) -> None:
    limit = ConcurrencyLimit(maximum, is_auto=True)
    server = Server(limit, CURVES[name])
    settle(server, maximum)
    assert limit.limit <= maximum
    assert share_of_best(limit, CURVES[name], maximum) >= 0.9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CURVES)
def test_noise_and_prompts_in_between_do_not_mislead_it(name: str, seed: int) -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    server = Server(limit, CURVES[name], noise=0.05, prefill_every=3, seed=seed)
    server.run(2 * settling_steps(64))
    shares = []
    for _ in range(FIRST_HOLD):
        server.run(1)
        shares.append(share_of_best(limit, CURVES[name], 64))
    assert sum(shares) / len(shares) >= 0.85


@pytest.mark.parametrize("name", ["plateau at 10", "peak at 13", "saturating"])
def test_it_stays_near_the_best_for_good(name: str) -> None:
    """Averaged over a long time, reviews included."""
    limit = ConcurrencyLimit(64, is_auto=True)
    server = Server(limit, CURVES[name], noise=0.03)
    settle(server, 64)
    shares = []
    for _ in range(10_000):
        server.run(1)
        shares.append(CURVES[name](server.num_running))
    assert sum(shares) / len(shares) >= 0.9 * max(map(CURVES[name], range(1, 65)))


def test_steps_that_all_compute_prompts_are_compared_as_a_whole() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    for _ in range(20 * MIXED_WINDOW):
        num_running = limit.limit
        num_tokens = num_running + 10 * min(num_running, 24)
        limit.observe_step(num_running, 100, num_tokens, 0.1, 0)
    assert 24 <= limit.limit <= 64


def test_decode_steps_are_not_compared_with_steps_of_any_kind() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    for _ in range(MIXED_WINDOW):
        limit.observe_step(START, 10, START + 10, 100.0, 0)
    assert limit.limit == 2 * START
    for _ in range(WINDOW):
        limit.observe_step(2 * START, 10, 2 * START, 0.1, 0)
    assert limit.limit == START // 2, "twice as many were not taken for better"


# --------------------------------------------------------------------------- nothing to learn


def test_a_fixed_limit_stays() -> None:
    limit = ConcurrencyLimit(20, is_auto=False)
    server = Server(limit, CURVES["peak at 2"], memory=5)
    server.run(2000)
    assert limit.limit == 20


def test_nothing_is_tried_while_nobody_waits() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    server = Server(limit, CURVES["linear"])
    server.run(2000, num_waiting=0)
    assert limit.limit == START


def test_steps_below_the_limit_say_nothing_about_it() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    for _ in range(2000):
        limit.observe_step(START - 1, 10, START - 1, 0.1, 0)
    assert limit.limit == START


def test_steps_without_tokens_or_duration_are_left_out() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    for _ in range(2000):
        limit.observe_step(START, 10, 0, 0.1, 0)
        limit.observe_step(START, 10, START, 0.0, 0)
    assert limit.limit == START


# --------------------------------------------------------------------------- preemptions


def test_a_preemption_lowers_the_limit_at_once() -> None:
    limit = ConcurrencyLimit(8, is_auto=True)
    limit.observe_step(6, 10, 6, 0.1, 2)
    assert limit.limit == 6
    limit.observe_step(6, 10, 6, 0.1, 1)
    assert limit.limit == 5
    limit.observe_step(1, 10, 1, 0.1, 9)
    limit.observe_step(1, 10, 1, 0.1, 9)
    assert limit.limit == 1


@pytest.mark.parametrize("memory", [1, 4, 6, 20])
def test_in_a_small_memory_preemptions_become_rare(memory: int) -> None:
    """As good as the memory allows, within a tenth and one request, with a preemption in few steps."""
    limit = ConcurrencyLimit(32, is_auto=True)
    server = Server(limit, CURVES["linear"], memory=memory)
    server.run(2000)
    server.num_preempting_steps = 0
    running = []
    for _ in range(8000):
        server.run(1)
        running.append(server.num_running)
    assert sum(running) / len(running) >= 0.9 * memory - 1
    assert server.num_preempting_steps <= 8000 / FIRST_CALM


def test_after_a_storm_the_limit_rises_slowly_and_comes_back() -> None:
    limit = ConcurrencyLimit(32, is_auto=True)
    server = Server(limit, CURVES["plateau at 10"])
    settle(server, 32)
    settled = limit.limit
    server.memory = 2
    server.run(3)
    assert limit.limit == 2
    server.memory = 10**9
    server.run(FIRST_CALM - 1)
    assert limit.limit <= 3
    server.run(settled * FIRST_CALM)
    assert share_of_best(limit, CURVES["plateau at 10"], 32) >= 0.9


def test_relapses_make_it_wait_longer() -> None:
    limit = ConcurrencyLimit(8, is_auto=True)
    server = Server(limit, CURVES["linear"], memory=4)
    waits, before = [], 0
    for _ in range(6000):
        risen = limit.limit
        server.run(1)
        if limit.limit < risen and risen > 4:
            waits.append(server.num_steps - before)
            before = server.num_steps
    assert waits[1:4] == sorted(waits[1:4])
    assert waits[-1] > 4 * FIRST_CALM
    assert max(waits) <= MAX_CALM + WINDOW


def test_a_trial_that_ends_in_preemptions_goes_back_to_what_was_known() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    server = Server(limit, CURVES["linear"])
    while limit.limit == START:
        server.run(1)
    assert limit.limit == 2 * START
    limit.observe_step(2 * START - 1, 10, 2 * START - 1, 0.1, 1)
    assert limit.limit == START


# --------------------------------------------------------------------------- drift


@pytest.mark.parametrize(("first", "second"), [("plateau at 10", "plateau at 40"), ("linear", "peak at 13")])
def test_it_follows_a_machine_that_changes(first: str, second: str) -> None:
    """Longer contexts, other models on the same card: noticed at a review at the latest."""
    limit = ConcurrencyLimit(64, is_auto=True)
    server = Server(limit, CURVES[first])
    settle(server, 64)
    server.run(5 * MAX_HOLD)
    server.curve = CURVES[second]
    server.run(MAX_HOLD + 8 * (WINDOW + 64))
    assert share_of_best(limit, CURVES[second], 64) >= 0.9


def test_a_large_change_is_noticed_at_once() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    server = Server(limit, CURVES["peak at 30"])
    settle(server, 64)
    server.curve = lambda n: CURVES["peak at 13"](n) * (1 - DRIFT)
    server.run(8 * (WINDOW + 16))
    assert share_of_best(limit, server.curve, 64) >= 0.9


def test_fewer_requests_are_preferred_where_it_makes_no_difference() -> None:
    limit = ConcurrencyLimit(64, is_auto=True)
    server = Server(limit, CURVES["plateau at 3"])
    settle(server, 64)
    assert limit.limit <= 4
    assert CURVES["plateau at 3"](limit.limit) * (1 + GAIN) >= 30
