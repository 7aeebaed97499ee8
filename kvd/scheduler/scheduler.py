"""Decides what every step computes, and what came of it.

Owner: the engine thread; `check` alone may be called from any thread.

A step is planned (`plan`), run by somebody else, and committed (`commit`), in this order for each step. One step may be
planned before the previous one is committed. While a plan is in flight, everything that it names stays as
it was: a request that ends or is preempted meanwhile keeps its blocks and its slot until the last plan that names
it is committed. So whoever runs plans never sees a block or a slot change hands under it.

Every running request asks one token budget per step for the tokens it lacks: first those that lack just
the newest token, then those that are still catching up, then the waiting ones. Within each, and in the queue, the
order is priority, then arrival; nobody is overtaken from behind by a request that happens to be smaller, so waiting is
bounded by the work of those ahead. How requests are admitted and preempted: `admission`, `preemption`.

Invariant: every request that was added and has not ended is either in `_waiting` or in `_running`, both in order
of service; a slot belongs to each running request and to each that still has to be released.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvd.cache.manager import CacheManager, PhysicalBlock
from kvd.core import (
    BLOCK_SIZE,
    Counters,
    FinishReason,
    PlanItem,
    Request,
    RequestView,
    Sample,
    StepMix,
    StepPlan,
    StepResult,
    TokenEvent,
)
from kvd.errors import ServerOverloaded
from kvd.scheduler.admission import check_length, spare_blocks
from kvd.scheduler.alarms import Alarms
from kvd.scheduler.budget import Budget
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.preemption import choose_victim, oldest_of
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.tally import Tally

__all__ = ["Scheduler", "SchedulerConfig"]

MAX_IN_FLIGHT = 2
"""A step that runs, and one planned behind it."""


@dataclass(slots=True)
class _Flight:
    """A plan that is not committed yet. `states` are parallel to its items."""

    plan: StepPlan
    states: list[RequestState]
    replaced_blocks: list[PhysicalBlock] = field(default_factory=list)  # read by this plan, released after it


NOT_FINITE = "the model computed logits that are not finite"


def _order_of_service(state: RequestState) -> tuple[int, int]:
    return state.key


class Scheduler:
    """See the module's docstring. `clock` gives `time.monotonic()` seconds."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager, clock: Callable[[], float]) -> None:
        self.config = config
        self.cache = cache
        self._clock = clock
        # The last token of a request is sampled but never stored, hence one more than the cache holds.
        self._max_total = min(config.max_model_len, cache.capacity_tokens + 1)
        self._states: dict[str, RequestState] = {}
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._free_slots = list(range(config.max_num_seqs))  # a heap
        self._in_flight: deque[_Flight] = deque()
        self._ended_request_ids: list[str] = []  # not yet told to the runner
        self._alarms = Alarms()
        self._num_added = 0
        self._num_planned_steps = 0
        self._num_releasing = 0  # requests with `must_release`
        self._refused: tuple[RequestState, int] | None = None  # see `_admit`
        self._tally = Tally()

    # ------------------------------------------------------------------ requests come and go

    def check(self, request: Request, *, num_present: int | None = None) -> None:
        """Refuse what can never run, and what is too much now.

        `num_present`: requests that have not ended, those on their way to `add` included; None: those added.
        Raises RequestError (no prompt), ContextLengthExceeded or ServerOverloaded. Any thread.
        """
        check_length(request, self.config.max_model_len, self.cache.capacity_tokens)
        limit = self.config.max_num_seqs + self.config.max_waiting
        if num_present is None:
            num_present = len(self._states)
        if num_present >= limit:
            raise ServerOverloaded(
                f"The server is busy with {num_present} requests, of which {self.config.max_num_seqs} may run at "
                f"the same time and {self.config.max_waiting} may wait; try again later."
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises like `check`; the id must be new among the requests that have not ended."""
        self.check(request)
        assert request.request_id not in self._states, f"request {request.request_id} is already here"
        assert request.sampling.max_tokens > 0, "max_tokens is validated before"
        self._num_added += 1
        state = RequestState(request, self._num_added, self.cache.open(request.cache_salt), self._max_total)
        self._states[request.request_id] = state
        insort(self._waiting, state, key=_order_of_service)
        if request.deadline is not None:
            self._alarms.set(request.deadline, self._num_added, request.request_id, only_in_queue=False)
        if self.config.queue_timeout_seconds is not None:
            time = request.arrival_time + self.config.queue_timeout_seconds
            self._alarms.set(time, self._num_added, request.request_id, only_in_queue=True)

    def abort(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a request at whatever stage; None if there is none of that id (any more).

        What it holds is free at once, or as soon as the steps in flight that name it are committed; their
        samples for it are discarded.
        """
        state = self._states.get(request_id)
        return None if state is None else self._end(state, None, reason)

    def expire(self) -> list[TokenEvent]:
        """End the requests whose deadline or queue timeout has passed. To be called before every `plan`."""
        events: list[TokenEvent] = []
        if not self._alarms:
            return events
        now = self._clock()
        for arrival_number, request_id, only_in_queue in self._alarms.due(now):
            state = self._states.get(request_id)
            if state is None or state.arrival_number != arrival_number:
                continue
            if only_in_queue and state.first_scheduled is not None:
                continue
            where = "in the queue" if state.first_scheduled is None else "in all"
            error = f"timed out after {now - state.request.arrival_time:.1f} s {where}"
            events.append(self._end(state, None, "timeout", error=error))
        return events

    def fail_all(self, message: str) -> list[TokenEvent]:
        """End every request with an error; plans in flight are void and must not be committed."""
        events = [self._end(state, None, "error", error=message) for state in list(self._states.values())]
        while self._in_flight:
            flight = self._in_flight.popleft()
            for state in flight.states:
                state.num_in_flight -= 1
                if state.must_release and not state.num_in_flight:
                    self._release(state)
            self.cache.release(flight.replaced_blocks)
        return events

    def reset_cache(self) -> int:
        """Drop all cached blocks that nobody uses; returns how many."""
        return self.cache.reset()

    # ------------------------------------------------------------------ planning

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing can be computed before the step in flight is committed, or at all."""
        assert len(self._in_flight) < MAX_IN_FLIGHT, "plan() runs too far ahead of commit()"
        budget = Budget(self.config.max_num_batched_tokens)
        order = self._oldest_first()
        self._grant_decodes(order, budget)
        self._grant_prefills(order, budget)
        self._admit(budget)
        if not budget.items:
            # With nothing in flight, nobody would ever wake those who wait.
            assert self._in_flight or not self._states, "requests wait, and nothing can run"
            return None
        self._num_planned_steps += 1
        plan = StepPlan(
            self._num_planned_steps,
            tuple(budget.items),
            tuple(budget.new_requests),
            tuple(self._ended_request_ids),
        )
        self._ended_request_ids.clear()
        self._in_flight.append(_Flight(plan, budget.states))
        return plan

    def _oldest_first(self) -> list[RequestState]:
        """The running requests in order of service, but for the oldest."""
        if not self._running:
            return []
        oldest = oldest_of(self._running)
        return [oldest, *[state for state in self._running if state is not oldest]]

    def _grant_decodes(self, order: list[RequestState], budget: Budget) -> None:
        """One token for every request that has caught up. The oldest asks first: it may take anybody's blocks."""
        for state in order:
            if state.can_decode and self._find_room(state, order[0], budget):
                budget.grant(state)

    def _grant_prefills(self, order: list[RequestState], budget: Budget) -> None:
        """What is left for those that are catching up; the decodes may have preempted some of them."""
        for state in order:
            if not budget.tokens_left:
                return
            if state.is_prefilling and state.is_running:
                budget.grant(state)

    def _find_room(self, state: RequestState, oldest: RequestState, budget: Budget) -> bool:
        """Make the table of `state` cover its next token, at the cost of others if need be."""
        while not self.cache.append(state.blocks, state.num_planned + 1):
            budget.close_admissions()
            if self._num_releasing or any(flight.replaced_blocks for flight in self._in_flight):
                return False  # blocks are on their way: they are here when the step in flight is committed
            victim = choose_victim(self._running, state, oldest)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def _preempt(self, state: RequestState) -> None:
        """Back to the queue, to be recomputed; the place in the order of service is kept."""
        self._running.remove(state)
        insort(self._waiting, state, key=_order_of_service)
        state.num_preemptions += 1
        state.has_progressed = False
        self._tally.num_preemptions += 1
        self._release_when_landed(state)

    def _admit(self, budget: Budget) -> None:
        """Start waiting requests in order of service, until one does not fit."""
        while self._waiting and self._free_slots and budget.tokens_left and budget.admissions_open:
            state = self._waiting[0]
            # Whoever was preempted in this pass closed admissions, and the others' steps have been committed.
            assert not state.must_release
            if self._running and self._refused == (state, self.cache.num_releases):
                return  # no block was given back since it was refused
            spare = spare_blocks(self._running, state, self.config)
            num_cached = self.cache.allocate(state.blocks, state.token_ids, num_spare_blocks=spare)
            if num_cached is None:
                self._refused = (state, self.cache.num_releases)
                return
            self._waiting.pop(0)
            insort(self._running, state, key=_order_of_service)
            self._start(state, num_cached, budget)
            budget.grant(state)

    def _start(self, state: RequestState, num_cached: int, budget: Budget) -> None:
        state.slot = heappop(self._free_slots)
        state.num_planned = state.num_computed = num_cached
        state.prefill_target = len(state.token_ids)
        if state.first_scheduled is None:
            state.first_scheduled = self._clock()
            state.num_cached_tokens = num_cached
            budget.new_requests.append(state.request)
            self._tally.count_admission(state.num_prompt, num_cached, was_looked_up=self.cache.enable_prefix_caching)

    # ------------------------------------------------------------------ committing

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed. Plans are committed in the order in which they were made."""
        flight = self._in_flight.popleft()
        assert flight.plan is plan, f"step {plan.step_id} is not the one to commit"
        assert result.step_id == plan.step_id, f"result of step {result.step_id} for step {plan.step_id}"
        now = self._clock()
        events: list[TokenEvent] = []
        samples = iter(result.samples)
        num_prefill = 0
        for state, item in zip(flight.states, plan.items, strict=True):
            sample = next(samples) if item.samples else None
            num_prefill += self._land(state, item)
            if not state.has_ended and sample is not None and sample.token_id is None:
                # What it computed may be as broken as its logits: nothing of this step is published.
                events.append(self._end(state, None, "error", error=NOT_FINITE))
            elif not state.has_ended:
                if state.num_computed >= BLOCK_SIZE * (state.blocks.num_published + 1):
                    self._publish(state)
                if sample is not None:
                    events.append(self._accept(state, sample, now))
            if state.must_release and not state.num_in_flight:
                self._release(state)
        assert next(samples, None) is None, f"step {plan.step_id} has more samples than it was asked for"
        if flight.replaced_blocks:
            self.cache.release(flight.replaced_blocks)
        self._tally.count_step(num_prefill, plan.num_tokens - num_prefill, len(plan.items), result.seconds)
        return events

    def _land(self, state: RequestState, item: PlanItem) -> int:
        """Note that an item was computed; returns how many of its tokens were prefill."""
        end = item.start + len(item.token_ids)
        state.num_in_flight -= 1
        state.num_pending -= item.samples
        state.num_computed = end
        if item.start < state.num_seen:
            self._tally.recomputed_tokens += min(end, state.num_seen) - item.start
        if end > state.num_seen:
            state.num_seen = end
        return min(end, state.prefill_target) - item.start if item.start < state.prefill_target else 0

    def _publish(self, state: RequestState) -> None:
        """Make the blocks shareable that are complete by now."""
        replaced = self.cache.publish(state.blocks, state.token_ids, state.num_computed)
        if replaced and state.num_in_flight:
            self._in_flight[-1].replaced_blocks.extend(replaced)
        elif replaced:
            self.cache.release(replaced)

    def _accept(self, state: RequestState, sample: Sample, now: float) -> TokenEvent:
        assert sample.request_id == state.request.request_id, f"{sample.request_id} is not next in the plan"
        assert sample.token_id is not None
        state.token_ids.append(sample.token_id)
        state.has_progressed = True
        state.last_token = now
        if state.first_token is None:
            state.first_token = now
        self._tally.generation_tokens += 1
        reason = state.finish_reason_after(sample.token_id)
        if reason is not None:
            return self._end(state, sample, reason)
        return state.event(sample.token_id, None, logprobs=sample.logprobs)

    # ------------------------------------------------------------------ ending

    def _end(
        self, state: RequestState, sample: Sample | None, reason: FinishReason, *, error: str | None = None
    ) -> TokenEvent:
        request_id = state.request.request_id
        del self._states[request_id]
        (self._running if state in self._running else self._waiting).remove(state)
        state.has_ended = True
        if state.first_scheduled is not None:
            self._ended_request_ids.append(request_id)
        if not state.must_release and state.slot is not None:
            self._release_when_landed(state)
        self._tally.count_finish(reason)
        if sample is None:
            return state.event(None, reason, error=error)
        return state.event(sample.token_id, reason, logprobs=sample.logprobs)

    def _release_when_landed(self, state: RequestState) -> None:
        state.must_release = True
        self._num_releasing += 1
        if not state.num_in_flight:
            self._release(state)

    def _release(self, state: RequestState) -> None:
        """Give back blocks and slot; no plan in flight names the request."""
        assert state.slot is not None
        assert not state.num_in_flight
        self.cache.free(state.blocks)
        heappush(self._free_slots, state.slot)
        state.slot = None
        state.num_planned = state.num_computed = state.prefill_target = 0
        state.must_release = False
        self._num_releasing -= 1

    # ------------------------------------------------------------------ what others see

    @property
    def has_work(self) -> bool:
        """A plan or a commit is to come."""
        return bool(self._states or self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def last_step(self) -> StepMix:
        return self._tally.last_step

    def counters(self) -> Counters:
        return self._tally.freeze(self.cache.num_evicted_blocks)

    def request_views(self) -> tuple[RequestView, ...]:
        """Running requests, then waiting ones, each in order of service."""
        now = self._clock()
        return tuple(state.view(now) for state in (*self._running, *self._waiting))
