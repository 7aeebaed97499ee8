"""Decides what every step computes, and what came of it.

Owner: the engine thread; `check` alone may be called from any thread.

A step is planned (`plan`), run by somebody else, and committed (`commit`), in this order for each step. One step may be
planned before the previous one is committed. Who may run and who holds what is in `roster`; how a step is made up in
`planning`; the order of those that wait in `waiting`; who gives way in `preemption`; what is forgotten in `dropping`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kvd.cache.manager import CacheManager
from kvd.core import BLOCK_SIZE, FinishReason, PlanItem, Request, Sample, StepPlan, StepResult, TokenEvent
from kvd.errors import RequestError, ServerOverloaded
from kvd.scheduler.admission import check_length
from kvd.scheduler.admission_feed import AdmissionFeed
from kvd.scheduler.alarms import Alarms
from kvd.scheduler.concurrency import ConcurrencyLimit
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.dropping import MIN_BUDGET_BLOCKS, DropSchedule
from kvd.scheduler.operations import Operations
from kvd.scheduler.planning import Planner
from kvd.scheduler.rates import Rates
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.roster import Flight, Roster
from kvd.scheduler.tally import Tally
from kvd.scheduler.timeline import Timelines
from kvd.views import Counters, RequestView, StepMix

__all__ = ["Rates", "Scheduler", "SchedulerConfig"]

MAX_IN_FLIGHT = 2
"""A step that runs, and one planned behind it."""

NOT_FINITE = "the model computed logits that are not finite"


class Scheduler(Operations):
    """See the module's docstring. `clock` gives `time.monotonic()` seconds; `rates` are learned while running."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, clock: Callable[[], float], rates: Rates | None = None
    ) -> None:
        self._tally = Tally()
        self.timelines = Timelines(clock)
        super().__init__(config, cache, Roster(config, cache, self._tally, self.timelines), clock)
        self.rates = Rates() if rates is None else rates
        self.admissions = AdmissionFeed(cache, clock)
        self._concurrency = ConcurrencyLimit(config.max_num_seqs, is_auto=config.is_auto_num_seqs)
        self._planner = Planner(
            config, cache, self._roster, self.rates, self._concurrency, self._tally, clock, self.timelines,
            self.admissions,
        )  # fmt: skip
        self._alarms = Alarms()
        self._num_added = 0
        self._disk_rate: float | None = None  # as it was learnt last

    # ------------------------------------------------------------------ requests come and go

    def check(self, request: Request, *, num_present: int | None = None) -> None:
        """Refuse what can never run, and what is too much now.

        `num_present`: requests that have not ended, those on their way to `add` included; None: those added.
        Raises RequestError (no prompt), ContextLengthExceeded or ServerOverloaded. Any thread.
        """
        check_length(request, self.config.max_model_len, self.cache.capacity_tokens)
        if request.kv_eviction != "none" and self.cache.has_only_windows:
            raise RequestError(
                "kv_eviction does nothing for this model: every layer has a sliding window and forgets by itself",
                param="kv_eviction",
            )
        if request.kv_eviction != "none" and self._budget_blocks(request) < MIN_BUDGET_BLOCKS:
            raise RequestError(
                f"kv_eviction needs room for {MIN_BUDGET_BLOCKS * BLOCK_SIZE} tokens at least; the request may hold "
                f"{self._budget_blocks(request) * BLOCK_SIZE}",
                param="kv_budget_tokens",
            )
        limit = self.config.max_num_seqs + self.config.max_waiting
        if num_present is None:
            num_present = len(self._roster.states)
        if num_present >= limit:
            raise ServerOverloaded(
                f"The server is busy with {num_present} requests, of which {self.config.max_num_seqs} may run at "
                f"the same time and {self.config.max_waiting} may wait; try again later."
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises like `check`; the id must be new among the requests that have not ended."""
        self.check(request)
        assert request.request_id not in self._roster.states, f"request {request.request_id} is already here"
        assert request.sampling.max_tokens > 0, "max_tokens is validated before"
        self._num_added += 1
        state = self._open(request)
        self.timelines.queued(state, self.num_waiting, self.num_running)
        self._roster.add(state)
        if request.deadline is not None:
            self._alarms.set(request.deadline, self._num_added, request.request_id, only_in_queue=False)
        if self.config.queue_timeout_seconds is not None:
            time = request.arrival_time + self.config.queue_timeout_seconds
            self._alarms.set(time, self._num_added, request.request_id, only_in_queue=True)

    def _open(self, request: Request) -> RequestState:
        blocks = self.cache.open(request.cache_salt, request.client)
        capacity = self.cache.capacity_tokens
        if request.kv_eviction == "none":
            # The last token of a request is sampled but never stored, hence one more than the cache holds.
            return RequestState(request, self._num_added, blocks, min(self.config.max_model_len, capacity + 1))
        forgetting = DropSchedule(request.kv_eviction, self._budget_blocks(request))
        return RequestState(request, self._num_added, blocks, self.config.max_model_len, forgetting)

    def _budget_blocks(self, request: Request) -> int:
        """Blocks that a request with `kv_eviction` may hold."""
        capacity = self.cache.capacity_tokens
        budget = request.kv_budget_tokens or self.config.default_budget_tokens or capacity
        return min(budget, capacity) // BLOCK_SIZE

    def abort(self, request_id: str, reason: FinishReason) -> TokenEvent | None:
        """End a request at whatever stage; None if there is none of that id (any more).

        What it holds is free at once, or as soon as the steps in flight that name it are committed; their
        samples for it are discarded.
        """
        state = self._roster.states.get(request_id)
        return None if state is None else self._roster.end(state, None, reason)

    def expire(self) -> list[TokenEvent]:
        """End the requests whose deadline or queue timeout has passed. To be called before every `plan`."""
        events: list[TokenEvent] = []
        if not self._alarms:
            return events
        now = self._clock()
        for arrival_number, request_id, only_in_queue in self._alarms.due(now):
            state = self._roster.states.get(request_id)
            if state is None or state.arrival_number != arrival_number:
                continue
            if only_in_queue and state.first_scheduled is not None:
                continue
            where = "in the queue" if state.first_scheduled is None else "in all"
            error = f"timed out after {now - state.request.arrival_time:.1f} s {where}"
            events.append(self._roster.end(state, None, "timeout", error=error))
        return events

    def fail_all(self, message: str) -> list[TokenEvent]:
        """End every request with an error; plans in flight are void and must not be committed."""
        roster = self._roster
        events = [roster.end(state, None, "error", error=message) for state in list(roster.states.values())]
        while roster.in_flight:
            flight = roster.in_flight.popleft()
            self.cache.tiers.void(flight.plan)
            for state in (*flight.states, *[state for state, _ in flight.restored]):
                roster.land(state)
                roster.release_if_due(state)
            self.cache.release(flight.replaced_blocks)
        return events

    # ------------------------------------------------------------------ planning and committing

    def plan(self, unready: Collection[str] = ()) -> StepPlan | None:
        """The next step; None if nothing can be done before the step in flight is committed, or at all.

        unready: ids of requests to leave out of it.
        """
        assert len(self._roster.in_flight) < MAX_IN_FLIGHT, "plan() runs too far ahead of commit()"
        plan = self._planner.plan(unready)
        self.admissions.flush()
        # With nothing in flight or under way, nobody would ever wake those who wait.
        is_awaited = self.cache.tiers.is_busy or self.cache.chains.is_holding or unready
        assert plan or self._roster.in_flight or not self._roster.states or is_awaited, "nothing can run"
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed. Plans are committed in the order in which they were made."""
        flight = self._roster.in_flight.popleft()
        assert flight.plan is plan, f"step {plan.step_id} is not the one to commit"
        assert result.step_id == plan.step_id, f"result of step {result.step_id} for step {plan.step_id}"
        now = self._clock()
        self.cache.ledger.tick()
        events: list[TokenEvent] = []
        self.cache.tiers.land(plan)
        for state, end in flight.restored:
            self._land_restored(state, end)
        samples, masses, scores = iter(result.samples), iter(result.masses), iter(result.prompt_logprobs)
        num_prefill = 0
        for state, item in zip(flight.states, plan.items, strict=True):
            sample = next(samples) if item.samples else None
            if item.wants_mass:
                self._accumulate(state, item, next(masses))
            is_finite = sample is None or sample.token_id is not None
            if item.num_scored:
                is_finite &= state.add_scores(item.start, next(scores))
            num_prefill += self._land(state, item)
            if not state.has_ended and not is_finite:
                # What it computed may be as broken as its logits: nothing of this step is published.
                refusal = None if sample is None else sample.refusal
                reason: FinishReason = "error" if refusal is None else "refused"
                events.append(self._roster.end(state, None, reason, error=refusal or NOT_FINITE))
            elif not state.has_ended:
                if state.num_computed >= BLOCK_SIZE * (state.blocks.num_published + 1):
                    self._publish(state)
                if sample is not None:
                    events.append(self._accept(state, sample, now))
            self._roster.release_if_due(state)
        assert next(scores, None) is None, f"step {plan.step_id} scores more than it was asked to"
        assert next(samples, None) is None, f"step {plan.step_id} has more samples than it was asked for"
        if flight.replaced_blocks:
            self.cache.release(flight.replaced_blocks)
        self._learn(flight, num_prefill, result)
        return events

    def _land_restored(self, state: RequestState, end: int) -> None:
        self._roster.land(state)
        state.num_computed = end
        if not state.has_ended and end >= BLOCK_SIZE * (state.blocks.num_published + 1):
            self._publish(state)
        self._roster.release_if_due(state)

    def _land(self, state: RequestState, item: PlanItem) -> int:
        """Note that an item was computed; returns how many of its tokens were prefill."""
        end = item.start + len(item.token_ids)
        self._roster.land(state)
        state.num_pending -= item.samples
        if item.start < state.num_cached_tokens and state.first_token is None:
            state.num_cached_tokens = item.start  # it had them, gave way before its first token, and they are gone
        state.num_computed = end
        num_new = end - item.start
        if item.start < state.num_seen:
            again = min(end, state.num_seen) - item.start
            self._tally.recomputed_tokens += again
            num_new -= again
        if end > state.num_seen:
            state.num_seen = end
        if num_new:
            self._roster.waiting.charge(state.request.client, num_new)
        if item.start >= state.prefill_target:
            return 0
        num_prefill = min(end, state.prefill_target) - item.start
        self.timelines.add(state, "chunk", num_prefill)
        return num_prefill

    def _accumulate(self, state: RequestState, item: PlanItem, masses: Iterable[float]) -> None:
        assert state.forgetting is not None
        numbers = [position // BLOCK_SIZE for position in item.first_positions[0]]
        state.forgetting.accumulate(numbers, tuple(masses), item.start + len(item.token_ids))

    def _publish(self, state: RequestState) -> None:
        """Make the blocks shareable that are complete by now."""
        self._roster.retire(state, self.cache.publish(state.blocks, state.token_ids, state.num_computed))

    def _accept(self, state: RequestState, sample: Sample, now: float) -> TokenEvent:
        assert sample.request_id == state.request.request_id, f"{sample.request_id} is not next in the plan"
        assert sample.token_id is not None
        state.token_ids.append(sample.token_id)
        state.last_token = now
        if state.first_token is None:
            state.first_token = now
            self.timelines.add(state, "first_token", 1)
        self._tally.generation_tokens += 1
        reason = "stop" if sample.is_last else state.finish_reason_after(sample.token_id)
        if reason is not None:
            return self._roster.end(state, sample, reason)
        return state.event(sample.token_id, None, logprobs=sample.logprobs)

    def _learn(self, flight: Flight, num_prefill: int, result: StepResult) -> None:
        """Feed the measured rates, the limit of concurrency and the counters."""
        plan, rates = flight.plan, self.rates
        num_decode = plan.num_tokens - num_prefill
        moving = result.save_seconds + result.restore_seconds
        if plan.items:
            rates.observe_step(num_prefill, num_decode, result.seconds - moving)
        block_bytes = self.cache.tiers.block_bytes
        if plan.saves or plan.restores:
            num_saved = sum([block_bytes[each.group_id] for each in plan.saves])
            num_restored = sum([block_bytes[each.group_id] for each in plan.restores])
            self._tally.count_moves(num_saved, num_restored, result)
            rates.observe_save(num_saved, result.save_seconds)
            rates.observe_restore(num_restored, result.restore_seconds)
        disk_rate = self.cache.tiers.slow.read_bytes_per_second
        if disk_rate is not None and disk_rate != self._disk_rate:
            rates.observe_disk(int(disk_rate), 1.0)  # the tier measures its own reads
            self._disk_rate = disk_rate
        self._concurrency.observe_step(
            len(self._roster.running), len(self._roster.waiting), plan.num_tokens, result.seconds, flight.num_preempted
        )
        self._tally.count_step(num_prefill, num_decode, len(plan.items), result.seconds)

    # ------------------------------------------------------------------ what others see

    @property
    def has_work(self) -> bool:
        """A plan or a commit is to come."""
        return bool(self._roster.states or self._roster.in_flight)

    @property
    def has_moves(self) -> bool:
        """Blocks wait to be written through, though no request does."""
        return self.cache.tiers.has_moves

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_preemptions(self) -> int:
        return self._tally.num_preemptions

    @property
    def latest_preemption(self) -> tuple[str, str]:
        """The id of the request that gave way last, and for whom, how and at what cost."""
        return self._planner.latest_preemption

    @property
    def num_waste_tokens(self) -> int:
        """Room in the blocks of running requests that holds no token."""
        return sum(
            [
                max(0, state.blocks.num_blocks * BLOCK_SIZE - state.num_computed + state.num_dropped_tokens)
                for state in self._roster.running
            ]
        )

    @property
    def oldest_waiting_seconds(self) -> float:
        """Since the arrival of the request that waits longest for its first step; 0: there is none."""
        state = self._roster.waiting.oldest_new
        return 0.0 if state is None else max(0.0, self._clock() - state.request.arrival_time)

    @property
    def running_limit(self) -> int:
        return self._concurrency.limit

    @property
    def step_budget(self) -> int:
        return self._planner.latest_budget

    @property
    def last_step(self) -> StepMix:
        return self._tally.last_step

    def counters(self) -> Counters:
        return self._tally.freeze(self.cache)

    def request_views(self) -> tuple[RequestView, ...]:
        """Running requests in the order in which they are asked, then waiting ones by priority and arrival."""
        now = self._clock()
        return tuple(state.view(now) for state in (*self._roster.running, *self._roster.waiting))
