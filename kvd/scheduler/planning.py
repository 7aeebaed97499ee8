"""Plans one step: who computes how many tokens, who gives way, who starts, and which blocks move.

Owner: the engine thread, through `Scheduler`. A `Planner` keeps nothing about a request; that is in the roster.

The order of a pass: restores first, since blocks that come back cost a step little; then one token for every request
that has caught up; then running prefills; then admissions. The token budget follows from the gap that a stream should
not exceed, so a prefill takes what decoding leaves of it and no more, however many prefill.

Why a pass always gets somewhere: the oldest running request may take blocks from everybody who has got somewhere since
it was admitted, and everybody else has blocks enough to get there (`num_promised`). A request that waits for a
neighbour's prefix waits for one that runs, and nobody who runs waits for one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from kvd.cache.manager import CacheManager, PhysicalBlock, Refusal
from kvd.core import BLOCK_SIZE, StepPlan
from kvd.scheduler.admission import spare_blocks
from kvd.scheduler.admission_feed import AdmissionFeed
from kvd.scheduler.budget import Budget
from kvd.scheduler.concurrency import ConcurrencyLimit
from kvd.scheduler.config import SchedulerConfig
from kvd.scheduler.preemption import PreemptionCost, choose_victim_by_cost, oldest_of, preemption_cost
from kvd.scheduler.rates import Rates, restore_beats_recompute, step_budget
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.roster import Flight, Roster, order_of_running
from kvd.scheduler.tally import Tally
from kvd.scheduler.timeline import Timelines, origin_words, preemption_words

MAX_AWAITING = 16
"""Waiting requests that are looked at in one pass although they wait for a neighbour's prefix."""
MAX_RESTORED_BLOCKS = 256
"""Blocks that one request's restore moves in one step where no stream is to be spared."""
MIN_RESTORED_BLOCKS = 4


class Planner:
    """See the module's docstring. `clock` gives `time.monotonic()` seconds."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        roster: Roster,
        rates: Rates,
        concurrency: ConcurrencyLimit,
        tally: Tally,
        clock: Callable[[], float],
        timelines: Timelines,
        admissions: AdmissionFeed,
    ) -> None:
        self.latest_preemption = ("", "")  # whose, and why
        self.latest_budget = 0
        self._config = config
        self._cache = cache
        self._roster = roster
        self._rates = rates
        self._concurrency = concurrency
        self._tally = tally
        self._clock = clock
        self._timelines = timelines
        self._admissions = admissions
        # With less the decodes of the others might never leave it a whole chunk: then it is cut as it comes.
        self._can_wait_for_chunks = config.max_num_batched_tokens >= config.max_num_seqs + BLOCK_SIZE - 1
        self._num_plans = 0
        self._num_preempted = 0  # for want of blocks, since the latest plan
        self._refused: tuple[RequestState, int] | None = None  # and how many changes the cache had seen then

    def plan(self, unready: Collection[str]) -> StepPlan | None:
        """The next step, put in flight; None if nothing can be done before another is committed, or at all.

        unready: ids of requests of which nothing can be computed now; they keep what they hold unless others need it.
        """
        self._cache.ledger.tick()
        self._cache.tiers.begin_plan()
        order = self._oldest_first()
        able = [state for state in order if state.request.request_id not in unready] if unready else order
        decodes = [state for state in able if state.num_planned >= state.prefill_target and state.num_to_plan]
        prefills = [state for state in able if state.num_planned < state.prefill_target]
        budget = self._open_budget(len(decodes))
        self._bring_back(prefills, budget)
        self._grant_decodes(decodes, order, budget)
        self._grant_prefills(prefills, order, budget)
        self._admit(budget, unready)
        saves, copies, restores = self._cache.tiers.take_transfers()
        if not (budget.items or saves or copies or restores or budget.restored):
            return self.plan(unready) if not unready and self._break_deadlock(budget) else None
        self._num_plans += 1
        new, ended = self._roster.new_requests, self._roster.ended_request_ids
        plan = StepPlan(
            self._num_plans, tuple(budget.items), tuple(new.values()), tuple(ended), copies, saves, restores
        )
        new.clear()
        ended.clear()
        self._roster.in_flight.append(Flight(plan, budget.states, budget.restored, self._num_preempted, budget.retired))
        self._num_preempted = 0
        return plan

    def _open_budget(self, num_decodes: int) -> Budget:
        target = self._config.target_gap_seconds
        tokens = step_budget(
            self._rates, target_seconds=target, max_tokens=self._config.max_num_batched_tokens, num_decodes=num_decodes
        )
        self.latest_budget = tokens
        blocks = MAX_RESTORED_BLOCKS
        rate, block_bytes = self._rates.restore_bytes_per_second, self._cache.block_bytes
        if num_decodes and target is not None and rate is not None and block_bytes:
            left = target - (self._rates.decode_seconds(num_decodes) or 0.0)
            blocks = max(MIN_RESTORED_BLOCKS, min(blocks, int(left * rate / block_bytes)))
        return Budget(tokens, blocks)

    def _oldest_first(self) -> list[RequestState]:
        """The running requests in order of service, but for the oldest."""
        running = self._roster.running
        if not running:
            return []
        oldest = oldest_of(running)
        return [oldest, *[state for state in running if state is not oldest]]

    # ------------------------------------------------------------------ those that run

    def _bring_back(self, prefills: Iterable[RequestState], budget: Budget) -> None:
        """Blocks from RAM and disk for those that wait for some."""
        for state in prefills:
            if state.blocks.restore is not None:
                self._proceed(state, budget)
                if state.blocks.restore is None:
                    self._admissions.tell(state)

    def _proceed(self, state: RequestState, budget: Budget) -> None:
        restore = state.blocks.restore
        assert restore is not None
        reached = self._cache.tiers.proceed(state.blocks, budget.restores_left)
        if state.blocks.restore is None and restore.brought:
            num_brought = sum(restore.brought.values())
            self._timelines.add(state, "restored", num_brought, origin_words(restore.brought))
        if reached <= state.num_planned:
            return
        budget.restores_left -= (reached - state.num_planned) // BLOCK_SIZE
        if not state.num_preemptions:
            state.num_cached_tokens += reached - state.num_planned
            self._tally.count_restored(reached - state.num_planned)
        state.num_planned = reached
        state.num_in_flight += 1
        budget.restored.append((state, reached))

    def _grant_decodes(self, decodes: list[RequestState], order: list[RequestState], budget: Budget) -> None:
        """One token for every request that has caught up. The oldest asks first: it may take anybody's blocks."""
        for state in decodes:
            if not state.is_running:
                continue  # it has given way to one before it
            # Whoever still has room in its last block has nothing to ask for, and to ask costs more than to decode.
            if state.num_planned < state.blocks.num_covered or self._find_room(
                state, order[0], budget, state.num_planned + 1
            ):
                budget.grant_newest(state)

    def _grant_prefills(self, prefills: list[RequestState], order: list[RequestState], budget: Budget) -> None:
        """What is left for those that are catching up; the decodes may have preempted some of them."""
        for state in prefills:
            if not budget.tokens_left:
                return
            if state.is_prefilling and state.is_running and state.blocks.restore is None:
                self._grant_prefill(state, order[0], budget)

    def _grant_prefill(self, state: RequestState, oldest: RequestState, budget: Budget) -> None:
        num_tokens = min(state.num_to_plan, budget.tokens_left)
        if state.forgetting is not None:
            whole = min(state.num_to_plan, state.forgetting.limit(state.num_planned) - state.num_planned)
            if (
                num_tokens < whole
                and self._can_wait_for_chunks
                and state.forgetting.wants_whole_chunk(state.num_planned)
            ):
                return
            num_tokens = min(num_tokens, whole)
        num_covered = state.blocks.num_covered - state.num_planned
        if 0 < num_covered < num_tokens and not self._cover(state, budget, state.num_planned + num_tokens):
            num_tokens = num_covered  # a group with a window is short: rather a small chunk than others' blocks
        if num_tokens > 0 and self._find_room(state, oldest, budget, state.num_planned + num_tokens):
            budget.grant(state, num_tokens)

    def _cover(self, state: RequestState, budget: Budget, end: int) -> bool:
        is_covered, retired = self._cache.cover(state.blocks, state.num_planned, end)
        self._retire(state, retired, budget)
        return is_covered

    def _find_room(self, state: RequestState, oldest: RequestState, budget: Budget, end: int) -> bool:
        """Make the tables of `state` cover its tokens up to `end`, at the cost of others if need be."""
        if state.forgetting is not None and not self._forget(state, budget):
            return False
        while True:
            if self._cover(state, budget, end):
                return True
            budget.close_admissions()
            if self._roster.awaits_blocks:
                return False
            victim = choose_victim_by_cost(self._roster.running, state, oldest, self._cost)
            if victim is None:
                return False
            self._num_preempted += 1
            self._preempt(victim, budget, state)
            if victim is state:
                return False

    def _forget(self, state: RequestState, budget: Budget) -> bool:
        """Drop what a request has to forget before its next token; False: not before its steps in flight landed."""
        assert state.forgetting is not None
        position, numbers = state.num_planned, state.blocks.numbers[0]
        if not state.forgetting.is_due(position, numbers):
            return True
        if state.num_in_flight:
            return False  # the attention mass of those steps counts
        before = state.forgetting.num_dropped_tokens
        dropped = state.forgetting.due(position, numbers)
        num_forgotten = state.forgetting.num_dropped_tokens - before
        self._tally.num_dropped_tokens += num_forgotten
        if num_forgotten:
            self._timelines.add(state, "forgot", num_forgotten, f"kv_eviction: {state.forgetting.mode}")
        if dropped:
            self._retire(state, self._cache.drop(state.blocks, dropped), budget)
        return True

    def _retire(self, state: RequestState, blocks: list[PhysicalBlock], budget: Budget) -> None:
        """Give up blocks: with this plan where it moves something into them, else with the steps in flight, or now."""
        if blocks and any(state is restored for restored, _ in budget.restored):
            budget.retired += blocks
        else:
            self._roster.retire(state, blocks)

    # ------------------------------------------------------------------ giving way

    def _cost(self, state: RequestState) -> float:
        return self._weigh(state).seconds

    def _weigh(self, state: RequestState) -> PreemptionCost:
        can_swap = bool(self._cache.tiers.ram.num_slots[0]) and state.blocks.restore is None
        return preemption_cost(
            state,
            self._rates,
            block_bytes=self._cache.block_bytes,
            can_swap=can_swap,
            num_saved_blocks=self._cache.swapper.num_saved(state.blocks) if can_swap else 0,
        )

    def _preempt(self, state: RequestState, budget: Budget, asking: RequestState) -> None:
        """Back to the queue for the sake of another; its place in the order of service is kept."""
        cost, num_tokens = self._weigh(state), state.num_computed
        is_swap = cost.way == "swap"
        is_swapped = self._roster.preempt(state, num_kept_tokens=budget.num_savable(state) if is_swap else 0)
        words = preemption_words(state, asking, cost, is_swapped=is_swapped)
        self._timelines.add(state, "preempted", num_tokens, words)
        self.latest_preemption = state.request.request_id, words

    def _break_deadlock(self, budget: Budget) -> bool:
        """Let the last in the order of service give way though it has not got anywhere, if nobody can go on.

        Blocks that were promised to a request can be missing where they come and go: with a window, and where tokens
        are forgotten, what it gives up may be shared by others, and what it needs instead is not there. Then the
        oldest goes on, as it always can alone.
        """
        running = self._roster.running
        if self._roster.in_flight or self._cache.tiers.is_busy or len(running) < 2:
            return False
        oldest = oldest_of(running)
        victim = max([state for state in running if state is not oldest], key=order_of_running)
        victim.num_forced += 1
        self._num_preempted += 1
        self._preempt(victim, budget, oldest)
        return True

    # ------------------------------------------------------------------ those that wait

    def _admit(self, budget: Budget, unready: Collection[str]) -> None:
        """Start waiting requests in order of service, until one does not fit."""
        roster = self._roster
        num_awaiting = 0
        if not roster.waiting or not budget.admissions_open:
            return
        for state in roster.waiting.in_order(self._guess_cached):
            if not budget.tokens_left or not budget.admissions_open:
                return
            if len(roster.running) >= self._concurrency.limit or not roster.free_slots:
                self._timelines.waits(state, "limit", lambda: f"{len(roster.running)} run, as many as may now")
                self._make_way(state, budget)
                return
            if state.must_release or state.request.request_id in unready:
                if not state.must_release:
                    self._timelines.waits(state, "grammar", lambda: "its grammar is not ready")
                continue  # it was preempted, and a step in flight or a worker still has to do with it
            if roster.running and self._refused == (state, self._cache.num_changes):
                outcome: int | Refusal = Refusal.NO_ROOM  # still; but those that run have got somewhere meanwhile
            else:
                outcome = self._try_start(state, budget)
            if outcome is Refusal.NO_ROOM:
                self._timelines.waits(state, "room", self._shortage_words)
                self._refused = (state, self._cache.num_changes)
                self._make_way(state, budget)
                return
            if outcome is Refusal.AWAITED:
                self._timelines.waits(state, "neighbour", lambda: "another request computes the same beginning")
                num_awaiting += 1
                if num_awaiting == MAX_AWAITING:
                    return

    def _try_start(self, state: RequestState, budget: Budget) -> int | Refusal:
        forgetting = state.forgetting
        outcome = self._cache.allocate(
            state.blocks,
            state.token_ids,
            num_spare_blocks=spare_blocks(self._roster.running, state, self._config),
            num_extra_tokens=state.num_promised,
            max_blocks=None if forgetting is None else forgetting.budget_blocks,
            max_matched_tokens=None if forgetting is None else forgetting.max_matched_tokens,
            max_reused_tokens=state.max_reused_tokens,
            worth=self._is_worth_restoring,
        )
        if isinstance(outcome, Refusal):
            return outcome
        self._roster.start(state, outcome)
        self._note_start(state, outcome)
        if state.first_scheduled is None:
            state.first_scheduled = self._clock()
            state.num_cached_tokens = outcome
            self._roster.new_requests[state.request.request_id] = state.request
            was_looked_up = self._cache.enable_prefix_caching and state.scores is None
            self._tally.count_admission(state.num_prompt, outcome, was_looked_up=was_looked_up)
        if state.blocks.restore is not None:
            self._proceed(state, budget)
        if state.blocks.restore is None:
            self._admissions.tell(state)
            self._grant_prefill(state, oldest_of(self._roster.running), budget)
        return outcome

    def _note_start(self, state: RequestState, num_in_place: int) -> None:
        """For its timeline: a request was admitted, for the first time or again."""
        restore = state.blocks.restore
        words = "" if restore is None else _fetched_words(len(restore.steps))
        if state.first_scheduled is not None:
            self._timelines.add(state, "resumed", num_in_place, words)
        else:
            self._timelines.add(state, "admitted", state.num_prompt, words)
            if num_in_place:
                self._timelines.add(state, "hit", num_in_place, "in the KV pool")
        state.waits_for = ""

    def _shortage_words(self) -> str:
        needed, spare, available = self._cache.latest_shortage
        words = f"needs {needed:,} blocks, and {available:,} can be had"
        return f"{words}; {spare:,} are kept for those that run" if spare else words

    def _make_way(self, state: RequestState, budget: Budget) -> None:
        """Let a running request of lower priority that has got somewhere give way to one that waits."""
        running = self._roster.running
        if not running or running[-1].request.priority <= state.request.priority or self._roster.awaits_blocks:
            return
        oldest = oldest_of(running)
        lower = [each for each in running if each.request.priority > state.request.priority]
        victim = choose_victim_by_cost(lower, state, oldest, self._cost)
        if victim is not None:
            self._preempt(victim, budget, state)

    def _guess_cached(self, state: RequestState) -> int:
        return self._cache.guess_cached(state.blocks, state.token_ids) if state.max_reused_tokens is None else 0

    def _is_worth_restoring(self, num_bytes: int, num_tokens: int, from_disk: bool) -> bool:
        return restore_beats_recompute(self._rates, num_bytes, num_tokens, from_disk=from_disk)


def _fetched_words(num_blocks: int) -> str:
    return f"{num_blocks:,} more {'block is' if num_blocks == 1 else 'blocks are'} being fetched"
