"""Random steps of the scheduler against a fake clock and a fake runner, with everything checked after each.

One `Simulation` is one seed: a random world (see `worlds`), random arrivals, aborts, deadlines, pins, resets and
failures, then a drain. Checked besides `invariants`:

  - every output is the one that the request gives alone, forgetting included; an aborted one is a prefix of it
  - the oldest running request is never preempted; nobody oftener than `preemption.max_preemptions`
  - nobody is passed by more than (k + 1) · max_overtaken later arrivals, with k older requests of its client and
    priority before it; a preempted one by max_overtaken
  - bounded waiting: until a request is scheduled there are at most as many plans with items as tokens of work (prompt
    and output, again for every preemption) of the requests that ran meanwhile, twice, plus one per step in flight
  - progress: within `num_idle_plans` calls of `plan` something is computed, or somebody gets an event
  - whoever asks how likely the tokens of its prompt were hears it of each, with its first token
  - cached, computed, recomputed and dropped tokens are reported exactly
  - timelines end with the end, what was found and what was computed add up to the prompt; each admission is told once
  - nothing is computed for a request that is not ready
  - where nothing was evicted or undone, each full block of a prompt is computed once, whoever wants it
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvd.core import BLOCK_SIZE, FinishReason, Request, StepPlan, TokenEvent
from kvd.errors import ContextLengthExceeded, RequestError, ServerOverloaded
from kvd.insight import Admission
from kvd.scheduler.dropping import MIN_BUDGET_BLOCKS
from kvd.scheduler.preemption import max_preemptions, oldest_of
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.scheduler import Scheduler

from .check_timelines import check_admission, check_timeline
from .fake_runner import FakeRunner
from .invariants import check_everything, check_order
from .truth import Truth, score_of
from .worlds import World

PATIENCE = 150
"""Polls after which a slow tier of the simulator has answered: it delays by chance, at most 0.7 each time."""


@dataclass(slots=True)
class Lived:
    """What the simulation knows about one accepted request."""

    truth: Truth
    arrival_step: int
    state: RequestState
    received: list[int] = field(default_factory=list)
    last: TokenEvent | None = None
    end_step: int | None = None
    num_passed: int = 0
    most_passed: int = 0


class Simulation:
    """See the module's docstring. `num_steps` counts planning passes."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        self.random = world.random
        self.time = 1000.0
        self.depth = world.depth
        self.config = world.config
        self.cache = world.make_cache(self.clock)
        self.scheduler = Scheduler(self.config, self.cache, self.clock, world.make_rates())
        self.truths: dict[str, Truth] = {}
        self.runner = FakeRunner(self.cache, self.truths, self.depth, world.speed)
        if world.slow is not None:
            world.slow.runner = self.runner
        self.lived: dict[str, Lived] = {}
        self.alive: dict[str, Lived] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.answers: list[list[int]] = []
        self.seen: Counter[str] = Counter()
        self.num_steps = self.num_productive = self.num_idle = self.num_commits = self.num_refused = 0
        self.was_disturbed = False
        self.admissions: list[Admission] = []
        self.scheduler.admissions.receive = self.admissions.extend
        self._watch_roster()

    def clock(self) -> float:
        return self.time

    # ------------------------------------------------------------------ the world

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._arrive()
            self._disturb()
            self.step()
        self.drain()

    def drain(self) -> None:
        """No more arrivals: everything finishes, and nothing is left behind."""
        work = sum(self._cost(one.state) for one in self.alive.values())
        limit = self.num_steps + 100 + 3 * work + (1 + len(self.alive)) * self.num_idle_plans
        while self.scheduler.has_work or self.scheduler.has_moves:
            assert self.num_steps < limit, "does not come to an end"
            self.step()
        for _ in range(3):
            assert self.scheduler.plan() is None, "an idle server plans steps"
        for key in list(self.cache.chains._pins):
            assert self.scheduler.unpin(key.hex())
        for gauges in self.cache.gauges():
            assert gauges.num_active == 0, "blocks are still in use at the end"
        assert all(one.end_step is not None for one in self.lived.values())
        assert not self.cache._computing
        self._check_counters()
        self._check_computed_once()
        assert not self.scheduler.timelines._live, "a timeline is kept of a request that is gone"
        self.seen["eviction notes"] += sum(each.evicted is not None for each in self.admissions)
        self.cache.reset()
        assert all(gauges.num_free == gauges.num_blocks for gauges in self.cache.gauges())
        assert not any(gauges.num_ram_used for gauges in self.cache.gauges()), "slots are still in use at the end"

    def _arrive(self) -> None:
        rng = self.random
        while rng.random() < self.world.arrival_rate / (1 + self.world.arrival_rate):
            request_id = f"request-{len(self.truths) + self.num_refused}"
            longest = min(self.config.max_model_len, self.cache.capacity_tokens + 1)
            self.submit(self.world.make_request(request_id, self.time, longest, self.answers))

    def submit(self, request: Request) -> None:
        num_prompt, capacity = len(request.prompt_token_ids), self.cache.capacity_tokens
        is_forgetting = request.kv_eviction != "none"
        longest = self.config.max_model_len if is_forgetting else min(self.config.max_model_len, capacity)
        is_possible = 0 < num_prompt < longest
        budget = min(request.kv_budget_tokens or self.config.default_budget_tokens or capacity, capacity)
        is_small = is_forgetting and budget // BLOCK_SIZE < MIN_BUDGET_BLOCKS
        num_present = self.scheduler.num_running + self.scheduler.num_waiting
        is_full = num_present >= self.config.max_num_seqs + self.config.max_waiting
        try:
            self.scheduler.add(request)
        except ContextLengthExceeded:
            assert not is_possible
        except ServerOverloaded:
            assert is_full
        except RequestError:
            assert not num_prompt or is_small
        else:
            assert is_possible
            assert not is_small
            assert not is_full
            limit = self.config.max_model_len if is_forgetting else min(self.config.max_model_len, capacity + 1)
            truth = Truth.of(request, limit, budget_tokens=budget)
            self.truths[request.request_id] = truth
            state = self.scheduler._roster.states[request.request_id]
            alike = [
                other
                for other in self.scheduler._roster.waiting
                if other is not state
                and not other.num_preemptions
                and (other.request.client, other.request.priority) == (request.client, request.priority)
            ]
            one = Lived(truth, self.num_productive, state)
            one.most_passed = (1 + len(alike)) * self.config.max_overtaken
            self.lived[request.request_id] = self.alive[request.request_id] = one
            return
        self.num_refused += 1

    def _disturb(self) -> None:
        """Aborts at a random moment, now and then what operators and clients do, seldom a failure of the whole."""
        rng = self.random
        if rng.random() < self.world.abort_rate and self.lived:
            request_id = rng.choice(list(self.alive if self.alive and rng.random() < 0.8 else self.lived))
            rare = [name for name, one in self.alive.items() if one.state.stage in ("restoring", "swapped")]
            request_id = rare[0] if rare else request_id
            was_alive = request_id in self.alive
            if was_alive:
                self.seen[f"abort {self.alive[request_id].state.stage}"] += 1
                self.was_disturbed = True
            event = self.scheduler.abort(request_id, "abort")
            assert (event is not None) == was_alive
            if event is not None:
                self._receive([event])
            assert self.scheduler.abort(request_id, "abort") is None
            assert self.scheduler.abort("nobody", "abort") is None
            self.check()
        if rng.random() < self.world.operator_rate:
            self._operate()
            self.check()
        if rng.random() < 0.0005 and not self.world.is_ample:
            self._receive(self.scheduler.fail_all("the step failed"))
            self.in_flight.clear()
            # Plans that never ran have introduced nobody, as far as a runner knows: let it know them.
            self.runner.registered.update(self.scheduler._roster.ended_request_ids)
            self.check()
            assert not self.scheduler.has_work

    def _operate(self) -> None:
        rng, scheduler, cache = self.random, self.scheduler, self.cache
        self.was_disturbed = True
        match rng.randrange(4):
            case 0:
                num_cached = sum(gauges.num_cached for gauges in cache.gauges())
                assert scheduler.reset_cache() == num_cached
                assert not any(gauges.num_cached for gauges in cache.gauges())
            case 1:
                names = [*(block.key.hex() for block in cache._groups[0].index), *self.lived]
                before = cache.capacity_tokens
                num_pinned = scheduler.pin(rng.choice(names)) if names else 0
                self.seen["pins"] += num_pinned > 0
                assert num_pinned or cache.capacity_tokens == before
                assert not num_pinned or 2 * cache.chains.num_pinned_blocks <= cache.num_blocks
                assert scheduler.pin("no such chain") == 0
            case 2:
                if cache.chains._pins:
                    assert scheduler.unpin(rng.choice(list(cache.chains._pins)).hex())
                assert not scheduler.unpin("no such chain")
            case _:
                if self.lived:
                    self.seen["kept blocks"] += scheduler.keep_turn(rng.choice(list(self.lived)))
                assert scheduler.keep_turn("nobody") == 0
        if self.world.later.random() < 0.2:
            self._drop_prefix()
        for view in cache.chains.prefixes(5):
            assert cache._groups[0].index.find(bytes.fromhex(view.prefix_id)) is not None

    def _drop_prefix(self) -> None:
        """Some chain is dropped; whoever uses, shares or pinned blocks of it keeps them."""
        cache, rng = self.cache, self.world.later
        names = [*(block.key.hex() for block in cache._groups[0].index), *self.lived]
        if not names:
            return
        name = rng.choice(names)
        key = self.scheduler.find_chain(name)
        before = sum(gauges.num_active for gauges in cache.gauges())
        num_cached = sum(gauges.num_cached for gauges in cache.gauges())
        num_dropped = self.scheduler.drop_prefix(name)
        self.seen["dropped blocks"] += num_dropped
        assert sum(gauges.num_active for gauges in cache.gauges()) == before, "a block was dropped that is in use"
        assert sum(gauges.num_cached for gauges in cache.gauges()) == num_cached - num_dropped
        if key is not None and num_dropped and key not in cache._groups[0].index:
            assert cache.tiers.has(key) is None, "a block that was dropped is found below"
        assert self.scheduler.drop_prefix("no such chain") == 0

    # ------------------------------------------------------------------ one step

    def check(self) -> None:
        jobs: Iterable[tuple[int, int]] = ()
        if self.world.slow is not None:
            jobs = [job[1:3] for job in (*self.world.slow.jobs, *self.world.slow.withdrawn)]
        check_everything(self.scheduler, jobs)
        if self.world.max_cached is not None:
            assert all(gauges.num_cached <= self.world.max_cached for gauges in self.cache.gauges()), "over the cap"
        if not self.world.forgetting_rate:
            check_order(self.cache)

    def step(self) -> None:
        self.num_steps += 1
        self.time += self.random.choice((0.01, 0.1, 1.0))
        self._receive(self.scheduler.expire())
        plan = self._plan()
        self.check()
        self.runner.check_indexed_blocks()
        self._check_waiting()
        if plan is not None:
            self.in_flight.append(plan)
        if plan is None or len(self.in_flight) > self.depth:
            if self.random.random() < self.world.abort_rate:
                self._disturb()
            if self.in_flight:
                self._commit()
                self.check()
                self.runner.check_indexed_blocks()

    def _plan(self) -> StepPlan | None:
        scheduler, world = self.scheduler, self.world
        unready = [name for name in self.alive if world.later.random() < world.unready_rate]
        plan = scheduler.plan(unready)
        self.num_idle += not unready
        is_waiting = self.cache.tiers.is_busy or unready
        if plan is not None and unready:
            assert not {item.request_id for item in plan.items} & {*unready}, "computes what is not ready"
            self.seen["plans without somebody"] += 1
        if plan is None:
            assert self.in_flight or is_waiting or not scheduler.has_work, "waits for nothing"
        else:
            assert plan.num_tokens <= scheduler.step_budget <= self.config.max_num_batched_tokens, "over the budget"
            if plan.items:
                self.num_productive += 1
                self.num_idle = 0
        if not scheduler.has_work:
            self.num_idle = 0
        assert self.num_idle <= self.num_idle_plans, "nothing is computed for too long"
        return plan

    @property
    def num_idle_plans(self) -> int:
        """Plans in a row that compute nothing: one per block that is restored, those that wait for the slow tier, and
        those behind a step in flight."""
        return 4 + self.depth + max(self.world.num_blocks) + PATIENCE * (self.world.slow is not None)

    def _watch_roster(self) -> None:
        roster = self.scheduler._roster
        start = roster.start

        def watched_start(state: RequestState, num_cached: int) -> None:
            start(state, num_cached)
            for other in roster.waiting:
                if other.arrival_number < state.arrival_number:
                    one = self.lived[other.request.request_id]
                    one.num_passed += 1
                    assert one.num_passed <= one.most_passed, f"{other.request.request_id} is passed too often"
                    self.seen["passed"] += 1

        preempt = roster.preempt

        def watched_preempt(state: RequestState, **options: int) -> bool:
            assert state is not oldest_of(roster.running), "the oldest running request was preempted"
            one = self.lived[state.request.request_id]
            one.num_passed, one.most_passed = 0, self.config.max_overtaken
            return preempt(state, **options)

        roster.start = watched_start
        roster.preempt = watched_preempt

    def _commit(self) -> None:
        plan = self.in_flight.popleft()
        result = self.runner.run(plan)
        self.time += 0.01
        ended = {item.request_id for item in plan.items if item.request_id not in self.alive}
        events = self.scheduler.commit(plan, result)
        self.num_commits += 1
        assert not ended & {event.request_id for event in events}, "an event after the last one"
        assert len(events) == sum(item.samples and item.request_id not in ended for item in plan.items)
        self._receive(events)

    # ------------------------------------------------------------------ what is expected

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            one = self.lived[event.request_id]
            self.num_idle = 0
            assert one.end_step is None, "an event after the last one"
            if event.token_id is not None:
                one.received.append(event.token_id)
            assert event.num_output_tokens == len(one.received)
            assert event.num_prompt_tokens == len(one.truth.request.prompt_token_ids)
            self._check_counts(one, event)
            self._check_scores(one, event)
            one.last = event
            if event.finish_reason is not None:
                self._finish(one, event, event.finish_reason)

    def _check_counts(self, one: Lived, event: TokenEvent) -> None:
        """Cached tokens are those of the prompt that were never computed for this request."""
        work = self.runner.work.get(event.request_id)
        num_computed = 0 if work is None else len(work.computed)
        if event.token_id is not None and not one.state.num_preemptions:
            assert event.num_cached_tokens == event.num_prompt_tokens - num_computed, "cached tokens misreported"
        assert event.num_cached_tokens <= event.num_prompt_tokens - num_computed, "what was computed was no hit"
        dropped = {len(numbers) * BLOCK_SIZE for _, numbers in one.truth.forgotten} | {0}
        assert event.num_dropped_tokens in dropped, "dropped tokens misreported"
        if event.token_id is not None and work is not None:
            newest = event.num_prompt_tokens + event.num_output_tokens - 2
            assert event.num_dropped_tokens >= len(one.truth.dropped_at(newest)) * BLOCK_SIZE

    def _check_scores(self, one: Lived, event: TokenEvent) -> None:
        request = one.truth.request
        if request.num_prompt_logprobs is None or event.token_id is None or event.num_output_tokens > 1:
            assert event.prompt_logprobs is None
            return
        prompt = request.prompt_token_ids
        expected = [score_of(one.truth.values[at - 1], prompt[at]) for at in range(1, len(prompt))]
        assert event.prompt_logprobs == (None, *expected), f"{event.request_id}: its prompt is scored wrongly"
        self.seen["scored"] += 1
        self.seen["scored and was preempted"] += one.state.num_preemptions > 0

    def _finish(self, one: Lived, event: TokenEvent, reason: FinishReason) -> None:
        one.end_step = self.num_productive
        del self.alive[event.request_id]
        timing = event.timing
        assert timing is not None
        assert timing.arrival <= timing.first_scheduled <= timing.first_token <= timing.last_token <= self.time
        if reason in ("stop", "length"):
            assert reason == one.truth.finish_reason
            assert one.received == one.truth.output, f"{event.request_id} differs from running alone"
            assert event.token_id is not None
            if event.num_dropped_tokens == 0:
                self.answers = [*self.answers[-3:], one.truth.token_ids]
            self.seen["forgot"] += event.num_dropped_tokens > 0
            self.seen["forgot and was preempted"] += event.num_dropped_tokens > 0 and one.state.num_preemptions > 0
        else:
            self.was_disturbed = True
            assert one.received == one.truth.output[: len(one.received)]
            assert event.token_id is None
            assert (event.error is None) == (reason == "abort")
        assert one.state.num_preemptions - one.state.num_forced <= max_preemptions(len(one.received))
        self.seen["forced"] += one.state.num_forced
        timeline = check_timeline(self.scheduler.timelines, one.state, event)
        self.seen.update(f"timeline: {entry.kind}" for entry in timeline.entries)
        self.seen["merged entries"] += timeline.num_left_out
        check_admission(self.admissions, one.state)

    def _cost(self, state: RequestState) -> int:
        return (1 + state.num_preemptions) * state.max_total

    def _check_waiting(self) -> None:
        """Nobody waits longer than the work of those who ran meanwhile."""
        for one in self.alive.values():
            state = one.state
            waited = self.num_productive - one.arrival_step
            if state.first_scheduled is not None or waited < 50:
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

    def _check_counters(self) -> None:
        counters = self.scheduler.counters()
        work = self.runner.work
        finished = dict(counters.finished)
        assert sum(finished.values()) == len(self.lived)
        assert counters.num_steps == self.num_commits
        if "error" in finished:
            return  # plans that were dropped were never run
        # What a request had found and lost again before its first token has been counted.
        num_cached = sum(one.state.num_cached_tokens for one in self.lived.values())
        assert counters.prompt_tokens_cached >= num_cached
        assert counters.prompt_tokens_cached == num_cached or counters.num_preemptions
        assert counters.prefix_hit_tokens == counters.prompt_tokens_cached
        scored = [one.state for one in self.lived.values() if one.truth.request.num_prompt_logprobs is not None]
        num_not_looked_up = sum(state.num_prompt for state in scored if state.first_scheduled is not None)
        num_queried = (counters.prompt_tokens - num_not_looked_up) * self.cache.enable_prefix_caching
        assert counters.prefix_query_tokens == num_queried
        assert counters.generation_tokens == sum(len(one.received) for one in self.lived.values())
        assert counters.recomputed_tokens == sum(one.num_recomputed for one in work.values())
        assert counters.num_preemptions == sum(one.state.num_preemptions for one in self.lived.values())
        assert counters.num_swaps <= counters.num_preemptions
        assert sum(one.num_restarts for one in work.values()) <= counters.num_preemptions
        tiers = self.cache.tiers
        assert counters.num_restored_blocks == self.runner.restores_seen
        assert counters.num_saved_blocks <= self.runner.saves_seen
        assert counters.partial_hit_tokens + tiers.hit_tokens["ram"] + tiers.hit_tokens["disk"] >= 0
        assert counters.num_dropped_tokens == sum(one.state.num_dropped_tokens for one in self.lived.values())

    def _check_computed_once(self) -> None:
        counters = self.scheduler.counters()
        if self.was_disturbed or counters.num_evicted_blocks or counters.num_preemptions:
            return
        if not self.cache.enable_prefix_caching or any(self.world.windows):
            return  # blocks that have left a window before their step is committed are not kept
        times = self.runner.times_computed
        assert not times or max(times.values()) == 1, "a block of a prompt was computed twice"
        self.seen["worlds that computed once"] += bool(times)


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
            error.add_note(f"step {simulation.num_steps}: {simulation.world}")
            raise
        if watch is not None:
            watch(simulation)
        done += simulation.num_steps
        seed += 1
    return done
