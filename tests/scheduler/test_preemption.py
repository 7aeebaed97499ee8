"""Who is preempted, how, how often, and what it is thought to cost."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core import BLOCK_SIZE
from kvd.scheduler.preemption import (
    ASSUMED_PREFILL_TOKENS_PER_SECOND,
    choose_victim_by_cost,
    max_preemptions,
    preemption_cost,
    quantum,
)
from kvd.scheduler.rates import Rates

PREFILL = {"prefill_tokens_per_second": 1000.0}
COPIES = {"save_bytes_per_second": 1e6, "restore_bytes_per_second": 2e6}


def make_state(
    number: int, *, priority: int = 0, ready: bool = True, cost: float = 1.0, num_computed: int = 0, num_blocks: int = 0
) -> Any:
    """What the rule and the cost model read of a running request."""
    return SimpleNamespace(
        request=SimpleNamespace(priority=priority),
        arrival_number=number,
        may_be_preempted=ready,
        cost=cost,
        num_computed=num_computed,
        blocks=SimpleNamespace(num_blocks=num_blocks),
    )


def cost_of(state: Any) -> float:
    return float(state.cost)


def victim(running: list[Any], asking: Any) -> int | None:
    oldest = min(running, key=lambda state: state.arrival_number)
    state = choose_victim_by_cost(running, asking, oldest, cost_of)
    return None if state is None else state.arrival_number


# --------------------------------------------------------------------------- who


def test_the_oldest_is_never_chosen_and_may_take_from_everybody() -> None:
    states = [make_state(1, priority=5, cost=0), make_state(2, priority=-1), make_state(3, priority=-1, cost=9)]
    assert victim(states, states[0]) == 2
    assert victim(states[:1], states[0]) is None


def test_the_cheapest_of_the_lowest_priority_is_chosen() -> None:
    states = [
        make_state(1),
        make_state(2, priority=0, cost=0.1),
        make_state(3, priority=2, cost=3),
        make_state(4, priority=2, cost=2),
        make_state(5, priority=1, cost=0.1),
    ]
    for order in (states, states[::-1]):
        assert victim(order, states[0]) == 4
        assert victim(order, states[1]) == 4


def test_of_equal_costs_the_latest_arrival_is_chosen() -> None:
    states = [make_state(number) for number in range(1, 5)]
    assert victim(states, states[1]) == 4
    assert victim(states[::-1], states[1]) == 4


def test_who_asks_gives_way_itself_where_the_others_are_better_or_dearer() -> None:
    states = [make_state(1), make_state(2, priority=-1, cost=0), make_state(3, cost=5), make_state(4, cost=9)]
    assert victim(states[:3], states[2]) == 3
    assert victim(states, states[3]) == 3
    states[2].may_be_preempted = False
    assert victim(states, states[3]) == 4
    states[3].may_be_preempted = False
    assert victim(states, states[3]) is None


def test_only_the_lowest_priority_is_asked_for_its_cost() -> None:
    asked = []

    def cost(state: Any) -> float:
        asked.append(state.arrival_number)
        return 1.0

    states = [make_state(1), make_state(2), make_state(3, priority=1), make_state(4), make_state(5, priority=1)]
    choose_victim_by_cost(states, states[0], states[0], cost)
    assert asked == [3, 5]


@given(
    st.lists(st.tuples(st.integers(-1, 1), st.booleans(), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(0, 7),
    st.randoms(),
)
def test_the_choice_is_that_of_the_rule_read_aloud(rows: list[tuple[int, bool, int]], who: int, rng: Any) -> None:
    states = [make_state(n, priority=p, ready=r, cost=c) for n, (p, r, c) in enumerate(rows, 1)]
    asking = states[who % len(states)]
    allowed = [
        state
        for state in states[1:]
        if state.may_be_preempted and (asking is states[0] or state.request.priority >= asking.request.priority)
    ]
    expected = max(allowed, key=lambda s: (s.request.priority, -s.cost, s.arrival_number), default=None)
    rng.shuffle(shuffled := states.copy())
    assert choose_victim_by_cost(shuffled, asking, states[0], cost_of) is expected


# --------------------------------------------------------------------------- how often


def test_the_quantum_doubles() -> None:
    assert [quantum(k) for k in range(6)] == [0, 16, 32, 64, 128, 256]


@given(st.integers(0, 100_000))
def test_the_bound_is_the_formula_that_is_stated(num_output: int) -> None:
    assert max_preemptions(num_output) == 1 + math.floor(math.log2(1 + num_output // 16))
    assert max_preemptions(num_output) <= 1 + math.log2(1 + num_output / 16)


def test_an_adversary_that_preempts_at_every_chance_reaches_the_bound_and_never_passes_it() -> None:
    num_preemptions, at_preemption, reached = 0, 0, set()
    for num_output in range(5000):
        while num_output - at_preemption >= quantum(num_preemptions):
            num_preemptions += 1
            at_preemption = num_output
        assert num_preemptions == max_preemptions(num_output)
        reached.add(num_preemptions)
    assert reached == set(range(1, 10))


@pytest.mark.parametrize("seed", range(20))
def test_random_preemptions_stay_within_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    num_preemptions, at_preemption = 0, 0
    for num_output in range(2000):
        if rng.random() < 0.1 and num_output - at_preemption >= quantum(num_preemptions):
            num_preemptions += 1
            at_preemption = num_output
        assert num_preemptions <= max_preemptions(num_output)


# --------------------------------------------------------------------------- what it costs


def seconds_and_way(rates: Rates, can_swap: bool = True, **options: int) -> tuple[float, str]:
    state = make_state(1, num_computed=100, num_blocks=7)
    cost = preemption_cost(state, rates, block_bytes=1000, can_swap=can_swap, **options)
    return cost.seconds, cost.way


def test_recomputing_costs_the_tokens_that_will_be_gone() -> None:
    rates = Rates(PREFILL)
    assert seconds_and_way(rates, can_swap=False) == (0.1, "recompute")
    assert seconds_and_way(rates, can_swap=False, num_kept_tokens=64) == (0.036, "recompute")
    assert seconds_and_way(rates, can_swap=False, num_kept_tokens=112) == (0.0, "recompute")


def test_swapping_costs_what_must_be_saved_and_what_comes_back() -> None:
    rates = Rates(PREFILL | COPIES)
    assert seconds_and_way(rates) == (pytest.approx(0.007 + 0.0035), "swap")
    assert seconds_and_way(rates, num_saved_blocks=6) == (pytest.approx(0.001 + 0.0035), "swap")
    assert seconds_and_way(rates, num_kept_tokens=3 * BLOCK_SIZE) == (pytest.approx(0.004 + 0.002), "swap")
    assert seconds_and_way(rates, can_swap=False) == (0.1, "recompute")


def test_the_cheaper_way_is_chosen() -> None:
    rates = Rates(PREFILL | {"save_bytes_per_second": 1e9, "restore_bytes_per_second": 7e3 / 0.11})
    assert seconds_and_way(rates) == (0.1, "recompute")
    assert seconds_and_way(Rates(PREFILL | {"save_bytes_per_second": 1e4, "restore_bytes_per_second": 1e9}))[1] == (
        "recompute"
    )


def test_unknown_copies_are_tried_and_unknown_prefill_still_ranks() -> None:
    assert seconds_and_way(Rates(PREFILL)) == (0.0, "swap")
    assert seconds_and_way(Rates(), can_swap=False) == (100 / ASSUMED_PREFILL_TOKENS_PER_SECOND, "recompute")


def test_a_request_that_dropped_tokens_swaps_the_blocks_that_it_holds() -> None:
    rates = Rates(PREFILL | COPIES)
    state = make_state(1, num_computed=1600, num_blocks=10)
    cost = preemption_cost(state, rates, block_bytes=1000, can_swap=True)
    assert (cost.seconds, cost.way) == (pytest.approx(0.015), "swap")
    cost = preemption_cost(state, rates, block_bytes=1000, can_swap=False)
    assert (cost.seconds, cost.way) == (1.6, "recompute")


def test_blocks_held_for_tokens_to_come_are_not_moved() -> None:
    state = make_state(1, num_computed=16, num_blocks=9)
    rates = Rates(PREFILL | COPIES)
    assert preemption_cost(state, rates, block_bytes=1000, can_swap=True).seconds == pytest.approx(0.0015)
