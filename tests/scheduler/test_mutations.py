"""The simulator can see: every planted fault makes it fail."""

from __future__ import annotations

import pytest

from kvd.cache.block_pool import BlockPool
from kvd.cache.finder import Finder
from kvd.cache.layer_group import LayerGroup
from kvd.cache.manager import CacheManager, Refusal
from kvd.cache.prefix_index import KeyChain, PrefixIndex
from kvd.core import StepPlan
from kvd.scheduler import planning, preemption, request_state
from kvd.scheduler.budget import Budget
from kvd.scheduler.planning import Planner
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.roster import Roster
from kvd.scheduler.scheduler import Scheduler
from kvd.scheduler.waiting import WaitingQueue

from .planting import Planted, planting

MUTATIONS: dict[str, Planted] = {}
mutation = planting(MUTATIONS)


@mutation()
def publish_before_the_step_has_run(patch: pytest.MonkeyPatch) -> None:
    allocate = CacheManager.allocate

    def eager(self: CacheManager, sequence, token_ids, **options):
        num_cached = allocate(self, sequence, token_ids, **options)
        if not isinstance(num_cached, Refusal):
            self.publish(sequence, token_ids, len(token_ids))
        return num_cached

    patch.setattr(CacheManager, "allocate", eager)


@mutation()
def publish_what_is_planned(patch: pytest.MonkeyPatch) -> None:
    def publish(self: Scheduler, state: RequestState) -> None:
        known = min(state.num_planned + 16, len(state.token_ids), state.blocks.num_blocks * 16)
        self.cache.release(self.cache.publish(state.blocks, state.token_ids, known))

    patch.setattr(Scheduler, "_publish", publish)


@mutation()
def share_without_a_reference(patch: pytest.MonkeyPatch) -> None:
    retain = BlockPool.retain

    def forgetful(self: BlockPool, block_id: int) -> bool:
        was_cached = retain(self, block_id)
        if not was_cached:
            self._references[block_id] -= 1
        return was_cached

    patch.setattr(BlockPool, "retain", forgetful)


@mutation()
def free_twice(patch: pytest.MonkeyPatch) -> None:
    free = CacheManager.free

    def twice(self: CacheManager, sequence) -> None:
        tables = [list(table) for table in sequence.tables]
        free(self, sequence)
        for table, blocks in zip(sequence.tables, tables, strict=True):
            table.extend(blocks)
        free(self, sequence)

    patch.setattr(CacheManager, "free", twice)


@mutation()
def free_without_returning(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def leak(self: BlockPool, block_id: int, *, is_indexed: bool) -> bool:
        is_last = release(self, block_id, is_indexed=is_indexed)
        if is_last and not is_indexed and len(self._free) > 1:
            self._free.pop()
        return is_last

    patch.setattr(BlockPool, "release", leak)


@mutation()
def evict_a_block_in_use(patch: pytest.MonkeyPatch) -> None:
    take = LayerGroup.take

    def steal(self: LayerGroup) -> int:
        if not self.pool.num_free and self.pool.num_cached:
            for block_id in range(self.pool.num_blocks):
                if self.pool.references(block_id):
                    self.pool._references[block_id] += 1
                    return block_id
        return take(self)

    patch.setattr(LayerGroup, "take", steal)


@mutation()
def evict_and_leave_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "remove", lambda self, block: None)


@mutation()
def release_tables_from_the_front(patch: pytest.MonkeyPatch) -> None:
    free = CacheManager.free

    def forward(self: CacheManager, sequence) -> None:
        for table in sequence.tables:
            table.reverse()
        free(self, sequence)

    patch.setattr(CacheManager, "free", forward)


@mutation()
def keep_duplicates(patch: pytest.MonkeyPatch) -> None:
    """A second block of the same tokens stays in the table, so nobody holds the first one's chain."""

    publish = CacheManager.publish

    def forgetful(self: CacheManager, sequence, token_ids, num_tokens: int) -> list:
        tables = [list(table) for table in sequence.tables]
        replaced = publish(self, sequence, token_ids, num_tokens)
        for (group_id, block_id), _ in zip(replaced, range(1), strict=False):
            entry = tables[group_id].index(block_id)
            self._groups[group_id].release(sequence.tables[group_id][entry])
            sequence.tables[group_id][entry] = block_id
        return replaced[1:]

    patch.setattr(CacheManager, "publish", forgetful)


@mutation()
def forget_a_slot(patch: pytest.MonkeyPatch) -> None:
    release = Roster._release

    def forgetful(self: Roster, state: RequestState) -> None:
        release(self, state)
        if len(self.free_slots) > 1:
            self.free_slots.pop()

    patch.setattr(Roster, "_release", forgetful)


@mutation()
def release_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def at_once(self: Roster, state: RequestState) -> None:
        self._cache.free(state.blocks)

    patch.setattr(Roster, "_release_when_landed", at_once)


@mutation(12)
def release_duplicates_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def publish(self: Scheduler, state: RequestState) -> None:
        self.cache.release(self.cache.publish(state.blocks, state.token_ids, state.num_computed))

    patch.setattr(Scheduler, "_publish", publish)


@mutation()
def share_across_salts(patch: pytest.MonkeyPatch) -> None:
    create = KeyChain.__init__
    patch.setattr(KeyChain, "__init__", lambda self, key_seed, salt: create(self, key_seed, ""))


@mutation()
def hash_blocks_without_what_is_before(patch: pytest.MonkeyPatch) -> None:
    def extend(self: KeyChain, token_ids, num_tokens: int) -> None:
        for first in range(len(self.keys) * 16, num_tokens - 15, 16):
            self.keys.append(self.root + repr(list(token_ids[first : first + 16])).encode())

    patch.setattr(KeyChain, "extend", extend)


@mutation()
def match_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    match = Finder.match
    patch.setattr(Finder, "match", lambda self, sequence, token_ids: match(self, sequence, [*token_ids, 0]))
    allocate = CacheManager.allocate

    def whole(self: CacheManager, sequence, token_ids, **options):
        return allocate(self, sequence, [*token_ids, 0], **options)

    patch.setattr(CacheManager, "allocate", whole)


@mutation(3)
def match_one_group_only(patch: pytest.MonkeyPatch) -> None:
    def match(self: Finder, sequence, token_ids) -> int:
        limit = (len(token_ids) - 1) // 16
        sequence.chain.extend(token_ids, limit * 16)
        return self._groups[0].index.match_length(sequence.chain.keys, limit)

    patch.setattr(Finder, "match", match)


@mutation()
def preempt_the_oldest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planning, "choose_victim_by_cost", lambda running, asking, oldest, cost: oldest)


@mutation(12)
def preempt_without_progress(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "may_be_preempted", property(lambda self: True))


@mutation(3)
def count_recomputation_as_hits(patch: pytest.MonkeyPatch) -> None:
    start = Roster.start

    def generous(self: Roster, state: RequestState, num_cached: int) -> None:
        start(self, state, num_cached)
        state.num_cached_tokens = num_cached

    patch.setattr(Roster, "start", generous)


@mutation()
def deliver_the_token_after_a_late_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "finish_reason_after", lambda self, token_id: _only_length(self))


def _only_length(state: RequestState) -> str | None:
    return "length" if len(state.token_ids) >= state.max_total else None


@mutation()
def run_past_max_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RequestState,
        "num_to_plan",
        property(lambda self: len(self.token_ids) + self.num_pending - self.num_planned),
    )


@mutation()
def overtake_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        WaitingQueue, "in_order", lambda self, num_cached: iter(sorted(self, key=lambda state: -state.arrival_number))
    )


# --------------------------------------------------------------------------- numbers and bounds


@mutation()
def count_a_join_as_computed(patch: pytest.MonkeyPatch) -> None:
    proceed = Planner._proceed

    def uncounted(self: Planner, state: RequestState, budget: Budget) -> None:
        before = state.num_cached_tokens
        proceed(self, state, budget)
        state.num_cached_tokens = before

    patch.setattr(Planner, "_proceed", uncounted)


@mutation(4)
def report_fewer_dropped_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "num_dropped_tokens", property(lambda self: 0))


@mutation(5)
def let_newcomers_pass_for_ever(patch: pytest.MonkeyPatch) -> None:
    create = WaitingQueue.__init__
    patch.setattr(WaitingQueue, "__init__", lambda self, max_overtaken=64: create(self, 1 << 20))


@mutation(3)
def a_constant_quantum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_state, "quantum", lambda num_preemptions: min(preemption.quantum(num_preemptions), 1))


@mutation(3)
def promise_nothing_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "num_promised", property(lambda self: 0))


@mutation(2)
def lose_the_introduction_of_a_request_that_waits_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    plan = Planner.plan

    def forgetful(self: Planner) -> StepPlan | None:
        made = plan(self)
        if made is None:
            self._roster.new_requests.clear()
        return made

    patch.setattr(Planner, "plan", forgetful)


@mutation()
def cache_more_than_the_cap(patch: pytest.MonkeyPatch) -> None:
    create = LayerGroup.__init__

    def uncapped(self: LayerGroup, num_blocks: int, window: int, policy, max_cached) -> None:
        create(self, num_blocks, window, policy, None)
        self.max_cached = max_cached if max_cached is None else max_cached + 5
        self.max_cached = num_blocks if self.max_cached is None else self.max_cached

    patch.setattr(LayerGroup, "__init__", uncapped)


@mutation()
def plan_empty_steps_when_idle(patch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def busy(self: Scheduler) -> StepPlan | None:
        made = plan(self)
        return made if made is not None or self.has_work else StepPlan(0, ())

    patch.setattr(Scheduler, "plan", busy)


@mutation(1)
def take_from_the_cache_what_is_to_be_scored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "max_reused_tokens", property(lambda self: None))


@mutation(201)
def count_scores_again_that_are_computed_again(patch: pytest.MonkeyPatch) -> None:
    def growing(self: RequestState, start: int, scores: tuple) -> bool:
        assert self.scores is not None
        self.scores += scores
        return True

    patch.setattr(RequestState, "add_scores", growing)


@mutation(1)
def score_one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    num_to_score = RequestState.num_to_score
    patch.setattr(RequestState, "num_to_score", lambda self, start, end: max(0, num_to_score(self, start, end) - 1))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name].must_be_found(monkeypatch)
