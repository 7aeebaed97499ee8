"""Random steps of the scheduler against a fake clock and a fake runner, with everything checked after each.

One `Simulation` is one seed: a random configuration (pools from too small to ample, one to three layer groups, planning
depth 0 or 1), random arrivals, aborts, deadlines and resets, then a drain. Checked besides `invariants`:

  - every output is the one the chain function gives, as if the request had run alone; an aborted one is a prefix of it
  - nobody is overtaken in the queue; the oldest running request is never preempted; nobody twice without a token
    in between
  - bounded waiting: until a request is scheduled there are at most as many steps as tokens of work (prompt and
    output, again for every preemption) of the requests that ran meanwhile, plus one per step in flight
  - cached tokens, computed tokens and recomputed tokens are reported exactly
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE, FinishReason, Request, SamplingParams, StepPlan, TokenEvent
from kvd.errors import ContextLengthExceeded, RequestError, ServerOverloaded
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.scheduler import Scheduler

from .fake_runner import STOP_TOKEN, VOCAB_SIZE, FakeRunner, Truth
from .invariants import check_everything


@dataclass(slots=True)
class Lived:
    """What the simulation knows about one accepted request."""

    truth: Truth
    arrival_step: int
    state: RequestState
    received: list[int] = field(default_factory=list)
    last: TokenEvent | None = None
    end_step: int | None = None
    num_received_at_preemption: int = -1


class Simulation:
    """See the module's docstring. `num_steps` counts planning passes."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.time = 1000.0
        self.depth = rng.randrange(2)
        # A crowded world has long outputs, few blocks, and admits whatever fits at the moment: preemption is frequent.
        is_crowded = rng.random() < 0.5
        num_groups = rng.choice((1, 1, 2, 3))
        scale = rng.choice((8, 12, 18)) if is_crowded else rng.choice((2, 5, 10, 20, 40, 100))
        num_blocks = [rng.randint(max(1, scale * 2 // 3), scale) for _ in range(num_groups)]
        max_num_seqs = rng.choice((3, 5, 8)) if is_crowded else rng.choice((1, 3, 6, 12))
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 4) if is_crowded else (0, 5, 16, 40, 200)),
            max_model_len=rng.choice((100, 200, 300) if is_crowded else (20, 100, 200, 300)),
            max_waiting=rng.choice((0, 3, 30)),
            queue_timeout_seconds=rng.choice((None, None, 20.0)),
            expected_growth_factor=0.0 if is_crowded else 1.0,
            min_expected_growth_tokens=0 if is_crowded else rng.choice((0, 16, 64)),
        )
        self.cache = CacheManager(num_blocks, key_seed=b"simulation", enable_prefix_caching=rng.random() < 0.85)
        self.scheduler = Scheduler(self.config, self.cache, lambda: self.time)
        self.truths: dict[str, Truth] = {}
        self.runner = FakeRunner(self.cache, self.truths, self.depth)
        self.lived: dict[str, Lived] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.num_steps = 0
        self.num_commits = 0
        self.num_refused = 0
        self.max_total = min(self.config.max_model_len, self.cache.capacity_tokens + 1)
        # Documents share beginnings, and blocks that mean something else because of what is before them.
        pieces = [[rng.randrange(VOCAB_SIZE) for _ in range(BLOCK_SIZE)] for _ in range(3)]
        self.documents = [[token for _ in range(20) for token in rng.choice(pieces)] for _ in range(4)]
        self.is_crowded = is_crowded
        self.latest_prompt: list[int] = []
        self.arrival_rate = 0.15 if is_crowded else rng.choice((0.1, 0.4, 1.0))
        self.abort_rate = rng.choice((0.0, 0.02) if is_crowded else (0.0, 0.02, 0.2))
        self.priorities = rng.choice(((0,), (0, 0, 1), (-1, 0, 1, 2)))

    # ------------------------------------------------------------------ the world

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._arrive()
            self._disturb()
            self.step()
        self.drain()

    def drain(self) -> None:
        """No more arrivals: everything finishes, and nothing is left behind."""
        limit = (
            self.num_steps + 100 + 3 * sum(self._cost(one.state) for one in self.lived.values() if one.end_step is None)
        )
        while self.scheduler.has_work:
            assert self.num_steps < limit, "does not come to an end"
            self.step()
        for gauges in self.cache.gauges():
            assert gauges.num_active == 0, "blocks are still in use at the end"
        assert all(one.end_step is not None for one in self.lived.values())
        self._check_counters()
        self.cache.reset()
        assert all(gauges.num_free == gauges.num_blocks for gauges in self.cache.gauges())

    def _arrive(self) -> None:
        rng = self.random
        while rng.random() < self.arrival_rate / (1 + self.arrival_rate):
            self.submit(self._random_request())

    def _random_request(self) -> Request:
        rng = self.random
        document = rng.choice(self.documents)
        longest = rng.choice((20, 60, min(self.max_total, 320), 320))
        prompt = document[: rng.randrange(10, 60) if self.is_crowded else rng.randrange(longest)]
        kind = rng.random()
        if kind < 0.5:
            prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(20))]
        elif kind < 0.7:
            prompt = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
        elif kind < 0.85:
            prompt = self.latest_prompt
        self.latest_prompt = prompt
        deadline = self.time + rng.choice((1.0, 10.0, 60.0)) if rng.random() < 0.05 else None
        return Request(
            request_id=f"request-{len(self.truths) + self.num_refused}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                max_tokens=rng.choice((100, 200) if self.is_crowded else (1, 5, 30, 100, 200)),
                stop_token_ids=frozenset({STOP_TOKEN}) if rng.random() < 0.4 else frozenset(),
            ),
            arrival_time=self.time,
            priority=rng.choice(self.priorities),
            cache_salt=rng.choice(("", "", "", "a", "b")),
            deadline=deadline,
        )

    def submit(self, request: Request) -> None:
        num_prompt = len(request.prompt_token_ids)
        is_possible = 0 < num_prompt < min(self.config.max_model_len, self.cache.capacity_tokens)
        num_present = self.scheduler.num_running + self.scheduler.num_waiting
        is_full = num_present >= self.config.max_num_seqs + self.config.max_waiting
        try:
            self.scheduler.add(request)
        except ContextLengthExceeded:
            assert not is_possible
        except ServerOverloaded:
            assert is_full
        except RequestError:
            assert not num_prompt
        else:
            assert is_possible
            assert not is_full
            truth = self.truths[request.request_id] = Truth.of(request, self.max_total)
            state = self.scheduler._states[request.request_id]
            self.lived[request.request_id] = Lived(truth, self.num_steps, state)
            return
        self.num_refused += 1

    def _disturb(self) -> None:
        """Aborts at a random moment, now and then a reset, seldom a failure of the whole."""
        rng = self.random
        if rng.random() < self.abort_rate and self.lived:
            request_id = rng.choice(list(self.lived))
            was_alive = self.lived[request_id].end_step is None
            event = self.scheduler.abort(request_id, "abort")
            assert (event is not None) == was_alive
            if event is not None:
                self._receive([event])
            assert self.scheduler.abort(request_id, "abort") is None
            assert self.scheduler.abort("nobody", "abort") is None
            check_everything(self.scheduler)
        if rng.random() < 0.01:
            num_cached = sum(gauges.num_cached for gauges in self.cache.gauges())
            assert self.scheduler.reset_cache() == num_cached
        if rng.random() < 0.0005:
            self._receive(self.scheduler.fail_all("the step failed"))
            self.in_flight.clear()
            self._forget_unregistered()
            check_everything(self.scheduler)
            assert not self.scheduler.has_work

    def _forget_unregistered(self) -> None:
        """Plans that never ran have introduced nobody, as far as a runner knows: let it know them."""
        known = self.runner.registered
        for request_id in self.scheduler._ended_request_ids:
            known.add(request_id)

    # ------------------------------------------------------------------ one step

    def step(self) -> None:
        self.num_steps += 1
        self.time += self.random.choice((0.01, 0.1, 1.0))
        self._receive(self.scheduler.expire())
        plan = self._plan()
        check_everything(self.scheduler)
        self.runner.check_indexed_blocks()
        self._check_waiting()
        if plan is not None:
            self.in_flight.append(plan)
        if plan is None or len(self.in_flight) > self.depth:
            self._disturb_in_flight()
            if self.in_flight:
                self._commit()
                check_everything(self.scheduler)
                self.runner.check_indexed_blocks()

    def _plan(self) -> StepPlan | None:
        scheduler = self.scheduler
        before = list(scheduler._running)
        oldest = min(before, key=lambda state: state.arrival_number) if before else None
        counts = {id(state): state.num_preemptions for state in before}
        plan = scheduler.plan()
        if plan is None:
            assert self.in_flight or not scheduler.has_work, "waits for nothing"
        else:
            assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens, "over the budget"
        for state in before:
            if state.num_preemptions > counts[id(state)]:
                assert state is not oldest, "the oldest running request was preempted"
                one = self.lived[state.request.request_id]
                assert len(one.received) > one.num_received_at_preemption, "preempted again before it got anywhere"
                one.num_received_at_preemption = len(one.received)
        return plan

    def _disturb_in_flight(self) -> None:
        if self.random.random() < self.abort_rate:
            self._disturb()

    def _commit(self) -> None:
        plan = self.in_flight.popleft()
        result = self.runner.run(plan)
        self.time += 0.01
        ended = {item.request_id for item in plan.items if self.lived[item.request_id].end_step is not None}
        events = self.scheduler.commit(plan, result)
        self.num_commits += 1
        assert not ended & {event.request_id for event in events}, "an event after the last one"
        assert len(events) == sum(item.samples and item.request_id not in ended for item in plan.items)
        self._receive(events)

    # ------------------------------------------------------------------ what is expected

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            one = self.lived[event.request_id]
            assert one.end_step is None, "an event after the last one"
            if event.token_id is not None:
                one.received.append(event.token_id)
            assert event.num_output_tokens == len(one.received)
            assert event.num_prompt_tokens == len(one.truth.request.prompt_token_ids)
            work = self.runner.work.get(event.request_id)
            if work is not None:
                assert event.num_cached_tokens == work.first_start, "cached tokens misreported"
            one.last = event
            if event.finish_reason is not None:
                self._finish(one, event, event.finish_reason)

    def _finish(self, one: Lived, event: TokenEvent, reason: FinishReason) -> None:
        one.end_step = self.num_steps
        timing = event.timing
        assert timing is not None
        assert timing.arrival <= timing.first_scheduled <= timing.first_token <= timing.last_token <= self.time
        if reason in ("stop", "length"):
            assert reason == one.truth.finish_reason
            assert one.received == one.truth.output, f"{event.request_id} differs from running alone"
            assert event.token_id is not None
        else:
            assert one.received == one.truth.output[: len(one.received)]
            assert event.token_id is None
            assert (event.error is None) == (reason == "abort")
        assert one.state.num_preemptions <= 1 + len(one.received)

    def _cost(self, state: RequestState) -> int:
        return (1 + state.num_preemptions) * state.max_total

    def _check_waiting(self) -> None:
        """Nobody is overtaken, and nobody waits longer than the work of those who ran meanwhile."""
        waiting = [state for state in self.scheduler._waiting if not state.must_release]
        for one in self.lived.values():
            state = one.state
            if one.end_step is not None or state.first_scheduled is not None:
                continue
            assert not any(
                other.first_scheduled == self.time and other.key > state.key for other in self.scheduler._running
            ), f"{state.request.request_id} was overtaken"
            waited = self.num_steps - one.arrival_step
            if waited < 50:
                continue  # the bound is of interest for long waits, and costs time
            bound = (
                2
                + self.depth
                + sum(
                    2 * self._cost(other.state)
                    for other in self.lived.values()
                    if other is not one
                    and (other.end_step is None or other.end_step >= one.arrival_step)
                    and other.state.first_scheduled is not None
                )
            )
            assert waited <= bound, f"{state.request.request_id} waits too long"
        assert len(waiting) <= self.config.max_waiting + self.config.max_num_seqs

    def _check_counters(self) -> None:
        counters = self.scheduler.counters()
        work = self.runner.work
        finished = dict(counters.finished)
        assert sum(finished.values()) == len(self.lived)
        assert counters.num_steps == self.num_commits
        if "error" in finished:
            return  # plans that were dropped were never run
        assert counters.prompt_tokens_cached == sum(one.first_start for one in work.values())
        assert counters.prefix_hit_tokens == counters.prompt_tokens_cached
        assert counters.prompt_tokens == sum(
            len(self.truths[request_id].request.prompt_token_ids) for request_id in work
        )
        assert counters.prefix_query_tokens == counters.prompt_tokens * self.cache.enable_prefix_caching
        assert counters.generation_tokens == sum(len(one.received) for one in self.lived.values())
        assert counters.recomputed_tokens == sum(one.num_recomputed for one in work.values())
        assert counters.num_preemptions == sum(one.state.num_preemptions for one in self.lived.values())
        assert sum(one.num_restarts for one in work.values()) <= counters.num_preemptions


def simulate(
    first_seed: int, num_steps: int, *, steps_per_seed: int = 120, watch: Callable[[Simulation], None] | None = None
) -> int:
    """Run seed after seed until `num_steps` steps are done; returns how many that were in the end."""
    done = 0
    seed = first_seed
    while done < num_steps:
        simulation = Simulation(seed)
        try:
            simulation.run(steps_per_seed)
        except Exception as error:
            error.add_note(f"seed {seed}, step {simulation.num_steps}, depth {simulation.depth}")
            raise
        if watch is not None:
            watch(simulation)
        done += simulation.num_steps
        seed += 1
    return done
