"""The order of the waiting queue, against a model that counts everything by hand, and its bounds."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core import Request, SamplingParams
from kvd.scheduler import waiting
from kvd.scheduler.waiting import WINDOW, WaitingQueue


def make_state(number: int, client: str = "a", priority: int = 0, cached: int = 0) -> Any:
    """What the queue reads of a request; `cached` is what `cached_of` tells it."""
    request = Request(f"r{number}", (1, 2), SamplingParams(max_tokens=4), 0.0, client=client, priority=priority)
    return SimpleNamespace(request=request, arrival_number=number, cached=cached)


def cached_of(state: Any) -> int:
    return int(state.cached)


def numbers(queue: WaitingQueue, limit: int | None = None) -> list[int]:
    return [state.arrival_number for state in islice(queue.in_order(cached_of), limit)]


def first(queue: WaitingQueue) -> Any:
    return next(queue.in_order(cached_of))


def filled(*states: Any, max_overtaken: int = 64) -> WaitingQueue:
    queue = WaitingQueue(max_overtaken)
    for state in states:
        queue.add(state)
    return queue


# --------------------------------------------------------------------------- order


def test_priority_comes_before_the_counter_and_the_cached_prefix() -> None:
    queue = filled(make_state(1, "a", 1, cached=99), make_state(2, "b", 0), make_state(3, "c", -1))
    queue.charge("c", 1000)
    assert numbers(queue) == [3, 2, 1]


def test_the_longest_cached_prefix_is_first_among_those_of_the_chosen_client_alone() -> None:
    queue = filled(make_state(1, "a"), make_state(2, "a", cached=32), make_state(3, "a", cached=32), make_state(4, "b"))
    assert numbers(queue, 1) == [2]
    queue.charge("a", 1)
    assert numbers(queue) == [4, 2, 3, 1]


def test_the_prefix_is_looked_up_for_a_bounded_number_of_requests() -> None:
    queue = filled(*(make_state(number, cached=number) for number in range(1, 101)))
    asked: Counter[int] = Counter()

    def num_cached(state: Any) -> int:
        asked[state.arrival_number] += 1
        return cached_of(state)

    walk = queue.in_order(num_cached)
    assert next(walk).arrival_number == WINDOW
    assert asked.total() == WINDOW
    assert next(walk).arrival_number == WINDOW + 1
    assert asked.total() == WINDOW + 1
    list(walk)
    assert asked == Counter(range(1, 101))


def test_equal_counters_take_turns() -> None:
    queue = filled(*(make_state(number, "a") for number in range(1, 5)), make_state(5, "b"), make_state(6, "b"))
    order = []
    for state in queue.in_order(cached_of):
        order.append(state.arrival_number)
        queue.admitted(state)
    assert order == [1, 5, 2, 6, 3, 4]
    assert not len(queue)


def test_a_charge_during_a_walk_counts_for_the_next_candidate() -> None:
    queue = filled(make_state(1, "a"), make_state(2, "a"), make_state(3, "b"))
    walk = queue.in_order(cached_of)
    assert next(walk).arrival_number == 1
    queue.charge("a", 1)
    assert [state.arrival_number for state in walk] == [3, 2]


def test_a_preempted_request_is_tried_before_the_new_ones_of_its_priority_alone() -> None:
    states = [make_state(number, "a") for number in (1, 2)]
    queue = filled(*states)
    for state in states:
        queue.admitted(state)
    queue.charge("a", 10_000)
    queue.add(make_state(3, "b"))
    queue.add(make_state(4, "b", -1))
    queue.requeue(states[1])
    queue.requeue(states[0])
    assert numbers(queue) == [4, 1, 2, 3]
    assert [state.arrival_number for state in queue] == [4, 1, 2, 3]


def test_membership_and_removal() -> None:
    states = [make_state(number, f"client{number % 2}", number % 3) for number in range(1, 9)]
    queue = filled(*states)
    assert len(queue) == 8
    queue.remove(states[3])
    queue.admitted(states[0])
    queue.requeue(states[0])
    assert states[3] not in queue
    assert make_state(5) not in queue, "another request of the same number"
    assert [state.arrival_number for state in queue] == [3, 6, 1, 7, 2, 5, 8]
    queue.remove(states[0])
    for state in [*queue]:
        queue.remove(state)
    assert numbers(queue) == []


def test_misuse_is_caught() -> None:
    state = make_state(2)
    queue = filled(state)
    with pytest.raises(AssertionError, match="in order of arrival"):
        queue.add(state)
    with pytest.raises(AssertionError, match="waits already"):
        queue.requeue(state)
    with pytest.raises(AssertionError):
        WaitingQueue(0)


# --------------------------------------------------------------------------- fairness


def test_one_request_is_not_behind_fifty_of_another_client() -> None:
    queue = filled(*(make_state(number, "many") for number in range(1, 51)))
    for _ in range(10):
        state = first(queue)
        queue.admitted(state)
        queue.charge("many", 500)
    queue.add(make_state(51, "one"))
    admitted = []
    while "one" not in admitted:
        state = first(queue)
        queue.admitted(state)
        queue.charge(state.request.client, 500)
        admitted.append(state.request.client)
    assert len(admitted) <= 2


def test_clients_with_requests_waiting_get_equal_service_however_large_their_requests_are() -> None:
    """Sheng et al., theorem 4.4: while both wait, they differ by no more than what one admission is worth, twice."""
    costs = {"small": 10, "large": 500}
    queue = filled(*(make_state(number, "small" if number % 8 else "large") for number in range(1, 801)))
    service = dict.fromkeys(costs, 0)
    for _ in range(600):
        state = first(queue)
        client = state.request.client
        queue.admitted(state)
        queue.charge(client, costs[client])
        service[client] += costs[client]
        assert abs(service["small"] - service["large"]) <= 2 * max(costs.values())


@pytest.mark.parametrize("others_wait", [True, False])
def test_idling_earns_no_credit(others_wait: bool) -> None:
    """Whether the queue was empty or not when it came back, a client cannot spend what it did not use."""
    queue = filled(make_state(1, "idle"), max_overtaken=1000)
    queue.admitted(first(queue))
    number = 1
    for _ in range(100):
        number += 1
        queue.add(make_state(number, "busy"))
        queue.admitted(first(queue))
        queue.charge("busy", 100)
    for _ in range(others_wait * 20):
        number += 1
        queue.add(make_state(number, "busy"))
    for _ in range(20):
        number += 1
        queue.add(make_state(number, "idle"))
    for _ in range(0 if others_wait else 20):
        number += 1
        queue.add(make_state(number, "busy"))
    admitted: Counter[str] = Counter()
    for _ in range(20):
        state = first(queue)
        queue.admitted(state)
        queue.charge(state.request.client, 100)
        admitted[state.request.client] += 1
    assert admitted == {"idle": 10, "busy": 10}


def test_a_client_starved_at_one_priority_does_not_give_credit_at_another() -> None:
    queue = filled(make_state(1, "starved", 5), make_state(2, "busy", 0), max_overtaken=1000)
    queue.admitted(first(queue))
    queue.charge("busy", 5000)
    for number in range(3, 8):
        queue.add(make_state(number, "busy", 0))
    for number in range(8, 13):
        queue.add(make_state(number, "newcomer", 0))
    admitted = []
    for _ in range(6):
        state = first(queue)
        queue.admitted(state)
        queue.charge(state.request.client, 100)
        admitted.append(state.request.client)
    assert Counter(admitted) == {"busy": 3, "newcomer": 3}


def test_a_client_is_charged_for_all_its_priorities() -> None:
    queue = filled(make_state(1, "a", 0), make_state(2, "b", 0), make_state(3, "a", 1), make_state(4, "b", 1))
    queue.charge("a", 1)
    assert numbers(queue) == [2, 1, 4, 3]


def test_ever_new_clients_and_priorities_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_MAX_IDLE_SHARES", 8)
    queue = WaitingQueue()
    queue._share_limit = 8
    waits = make_state(1, "waits", 7)
    queue.add(waits)
    for number in range(2, 500):
        state = make_state(number, f"client{number}", priority=number % 50)
        queue.add(state)
        queue.remove(state)
        queue.charge(state.request.client, number)
        assert queue._num_shares == sum(len(level.shares) for level in queue._levels.values())
        assert queue._num_shares == sum(map(len, queue._shares_of.values())) <= 64
    assert len(queue._levels) <= 64
    assert numbers(queue) == [1]


def test_who_is_forgotten_comes_back_where_it_would_have_been_lifted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_MAX_IDLE_SHARES", 2)
    queue = WaitingQueue()
    queue._share_limit = 3
    busy, early, debtor = make_state(1, "busy"), make_state(2, "early"), make_state(3, "debtor")
    for state in (busy, early, debtor):
        queue.add(state)
    queue.remove(early)
    queue.remove(debtor)
    queue.charge("debtor", 900)
    queue.charge("busy", 100)
    queue.add(make_state(4, "other"))
    assert "early" not in queue._shares_of
    assert "debtor" in queue._shares_of
    queue.charge("busy", 50)
    queue.charge("other", 60)
    queue.add(make_state(5, "early"))
    queue.add(make_state(6, "debtor"))
    assert numbers(queue) == [1, 5, 4, 6]


# --------------------------------------------------------------------------- ageing


@pytest.mark.parametrize("max_overtaken", [1, 3, 64])
def test_endless_higher_priorities_pass_a_request_a_bounded_number_of_times(max_overtaken: int) -> None:
    low = make_state(1, "low", priority=9)
    queue = filled(low, max_overtaken=max_overtaken)
    for number in range(2, 200):
        queue.add(make_state(number, "high", priority=-number))
        state = first(queue)
        queue.admitted(state)
        if state is low:
            break
    assert number - 2 == max_overtaken


def test_longer_prefixes_of_the_same_client_pass_a_request_a_bounded_number_of_times() -> None:
    queue = filled(make_state(1), max_overtaken=5)
    order = []
    for number in range(2, 20):
        queue.add(make_state(number, cached=100))
        state = first(queue)
        queue.admitted(state)
        order.append(state.arrival_number)
    assert order[:7] == [2, 3, 4, 5, 6, 1, 7]


def test_admissions_of_earlier_arrivals_age_nobody() -> None:
    queue = filled(*(make_state(number) for number in range(1, 101)), max_overtaken=5)
    for number in range(1, 51):
        state = first(queue)
        assert state.arrival_number == number
        queue.admitted(state)
    queue.add(make_state(101, "b", priority=-1))
    assert first(queue).arrival_number == 101


def test_nobody_is_offered_past_an_aged_request() -> None:
    queue = filled(*(make_state(number) for number in range(1, 4)), max_overtaken=2)
    for number in (4, 5):
        urgent = make_state(number, priority=-1)
        queue.add(urgent)
        queue.admitted(urgent)
    queue.add(make_state(6, priority=-1))
    assert numbers(queue) == [1]
    order = []
    for state in queue.in_order(cached_of):
        order.append(state.arrival_number)
        queue.admitted(state)
    assert order == [1, 6, 2, 3], "the next one of the client is owed nothing yet"


def test_a_request_that_ages_after_it_was_offered_ends_the_walk() -> None:
    queue = filled(make_state(1, cached=9), *(make_state(number) for number in range(2, 9)), max_overtaken=3)
    order = []
    for state in queue.in_order(cached_of):
        order.append(state.arrival_number)
        if state.arrival_number != 1:
            queue.admitted(state)
    assert order == [1, 2, 3, 4]


def test_overtaking_of_a_preempted_request_counts_from_its_preemption() -> None:
    low = make_state(1, "a", priority=5)
    queue = filled(low, max_overtaken=2)
    queue.admitted(low)
    for number in range(2, 10):
        state = make_state(number)
        queue.add(state)
        queue.admitted(state)
    queue.requeue(low)
    for number in range(10, 14):
        queue.add(make_state(number))
    order = []
    for state in queue.in_order(cached_of):
        order.append(state.arrival_number)
        queue.admitted(state)
    assert order == [10, 11, 1, 12, 13]


def test_a_flood_that_has_aged_does_not_lock_out_other_clients() -> None:
    """Every request of the flood arrived first, and only its oldest is owed anything: others still get turns."""
    queue = filled(*(make_state(number, "flood") for number in range(1, 501)), max_overtaken=4)
    admitted: Counter[str] = Counter()
    for number in range(501, 601):
        queue.add(make_state(number, "other", priority=-(number % 2)))
        state = first(queue)
        queue.admitted(state)
        queue.charge(state.request.client, 10)
        admitted[state.request.client] += 1
    assert admitted["flood"] >= 100 // 5
    assert admitted["other"] >= 50


def test_waiting_is_bounded_in_a_flood_of_everything() -> None:
    """Nobody is passed by more than (k + 1) · max_overtaken later arrivals, with k of its own client before it."""
    states = [make_state(number, f"c{number % 3}", number % 4, number % 5) for number in range(1, 30)]
    queue = filled(max_overtaken=7)
    num_passed: Counter[int] = Counter()
    bounds: dict[int, int] = {}
    for number in range(1, 1500):
        state = states[number - 1] if number < 30 else make_state(number, f"c{number % 7}", number % 4, number % 11)
        share = (state.request.client, state.request.priority)
        bounds[number] = 7 * (1 + sum((other.request.client, other.request.priority) == share for other in queue))
        queue.add(state)
        if number < 30:
            continue
        state = first(queue)
        queue.admitted(state)
        queue.charge(state.request.client, 1 + state.arrival_number % 13)
        num_passed.update(other.arrival_number for other in queue if other.arrival_number < state.arrival_number)
    assert all(num_passed[number] <= bounds[number] for number in bounds)
    assert max(num_passed.values()) >= 7, "the bound was never reached: the test shows nothing"


# --------------------------------------------------------------------------- the model


class Model:
    """The rules of the module's docstring, everything counted one by one."""

    def __init__(self, max_overtaken: int) -> None:
        self.max_overtaken = max_overtaken
        self.waiting: dict[int, Any] = {}
        self.preempted: set[int] = set()
        self.overtaken: dict[int, int] = {}
        self.counters: dict[tuple[int, str], int] = {}
        self.turns: dict[tuple[int, str], int] = {}
        self.left: dict[int, tuple[int, str]] = {}
        self.time = 0

    def new_of(self, priority: int, client: str | None = None) -> list[Any]:
        return [
            state
            for number, state in sorted(self.waiting.items())
            if number not in self.preempted
            and state.request.priority == priority
            and client in (None, state.request.client)
        ]

    def add(self, state: Any) -> None:
        key = (state.request.priority, state.request.client)
        if not self.new_of(*key):
            active = {(key[0], other.request.client) for other in self.new_of(key[0])}
            if not active and key[0] in self.left:
                active = {self.left[key[0]]}
            floor = min((self.counters[other] for other in active), default=0)
            self.counters[key] = max(self.counters.get(key, 0), floor)
            self._take_turn(key)
        self.waiting[state.arrival_number] = state

    def _take_turn(self, key: tuple[int, str]) -> None:
        self.time += 1
        self.turns[key] = self.time

    def requeue(self, state: Any) -> None:
        self.waiting[state.arrival_number] = state
        self.overtaken[state.arrival_number] = 0
        self.preempted.add(state.arrival_number)

    def remove(self, state: Any) -> None:
        key = (state.request.priority, state.request.client)
        del self.waiting[state.arrival_number]
        if state.arrival_number not in self.preempted and not self.new_of(*key):
            self.left[key[0]] = key
        self.preempted.discard(state.arrival_number)
        self.overtaken.pop(state.arrival_number, None)

    def owed(self) -> set[int]:
        """Those for whom overtaking counts: the preempted ones, and the oldest of each client and priority."""
        shares = {(state.request.priority, state.request.client) for state in self.waiting.values()}
        heads = {states[0].arrival_number for share in shares if (states := self.new_of(*share))}
        return heads | self.preempted

    def admitted(self, state: Any) -> None:
        if state.arrival_number not in self.preempted:
            self._take_turn((state.request.priority, state.request.client))
        owed = self.owed() - {state.arrival_number}
        self.remove(state)
        for number in owed:
            self.overtaken[number] = self.overtaken.get(number, 0) + (number < state.arrival_number)

    def charge(self, client: str, num_tokens: int) -> None:
        for key in self.counters:
            if key[1] == client:
                self.counters[key] += num_tokens

    def in_order(self) -> list[int]:
        aged = [number for number in sorted(self.waiting) if self.overtaken.get(number, 0) >= self.max_overtaken]
        if aged:
            return aged[:1]
        order: list[int] = []
        for priority in sorted({state.request.priority for state in self.waiting.values()}):
            order += sorted(n for n in self.preempted if self.waiting[n].request.priority == priority)
            clients = {state.request.client for state in self.new_of(priority)}
            for client in sorted(clients, key=lambda c: (self.counters[priority, c], self.turns[priority, c])):
                rest = self.new_of(priority, client)
                while rest:
                    best = max(rest[:WINDOW], key=cached_of)
                    rest.remove(best)
                    order.append(best.arrival_number)
        return order


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("admit"), st.integers(0, 4)),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("requeue"), st.integers(0, 20)),
    st.tuples(st.just("charge"), st.sampled_from("abcd"), st.integers(1, 50)),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.lists(ACTIONS, max_size=60))
def test_the_queue_agrees_with_the_model(max_overtaken: int, actions: list[tuple[Any, ...]]) -> None:
    queue, model = WaitingQueue(max_overtaken), Model(max_overtaken)
    running: list[Any] = []
    number = 0
    for name, *arguments in actions:
        if name == "add":
            number += 1
            state = make_state(number, *arguments)
            queue.add(state)
            model.add(state)
        elif name == "charge":
            queue.charge(*arguments)
            model.charge(*arguments)
        elif name == "requeue" and running:
            state = running.pop(arguments[0] % len(running))
            queue.requeue(state)
            model.requeue(state)
        elif name == "remove" and len(queue):
            state = [*queue][arguments[0] % len(queue)]
            queue.remove(state)
            model.remove(state)
        elif name == "admit" and len(queue):
            offered = [*islice(queue.in_order(cached_of), arguments[0] + 1)]
            queue.admitted(offered[-1])
            model.admitted(offered[-1])
            running.append(offered[-1])
        order = model.in_order()
        assert numbers(queue) == order
        assert {n for n, state in model.waiting.items() if queue.is_aged(state)} == {
            n for n in model.waiting if model.overtaken.get(n, 0) >= max_overtaken
        }
        assert {state.arrival_number for state in queue} == set(model.waiting)
        assert all(count <= max_overtaken for count in model.overtaken.values())
