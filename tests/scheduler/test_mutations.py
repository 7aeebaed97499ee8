"""The simulator can see: every planted fault makes it fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.cache.block_pool import BlockPool
from kvd.cache.manager import CacheManager, _Group
from kvd.cache.prefix_index import KeyChain, PrefixIndex
from kvd.scheduler import preemption, scheduler
from kvd.scheduler.budget import Budget
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.scheduler import Scheduler

from .simulator import simulate

Plant = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Plant] = {}


def mutation(plant: Plant) -> Plant:
    MUTATIONS[plant.__name__] = plant
    return plant


@mutation
def publish_before_the_step_has_run(patch: pytest.MonkeyPatch) -> None:
    allocate = CacheManager.allocate

    def eager(self: CacheManager, sequence, token_ids, **options):
        num_cached = allocate(self, sequence, token_ids, **options)
        if num_cached is not None:
            self.publish(sequence, token_ids, len(token_ids))
        return num_cached

    patch.setattr(CacheManager, "allocate", eager)


@mutation
def publish_what_is_planned(patch: pytest.MonkeyPatch) -> None:
    def publish(self: Scheduler, state: RequestState) -> None:
        known = min(state.num_planned + 16, len(state.token_ids), state.blocks.num_blocks * 16)
        self.cache.release(self.cache.publish(state.blocks, state.token_ids, known))

    patch.setattr(Scheduler, "_publish", publish)


@mutation
def share_without_a_reference(patch: pytest.MonkeyPatch) -> None:
    retain = BlockPool.retain

    def forgetful(self: BlockPool, block_id: int) -> bool:
        was_cached = retain(self, block_id)
        if not was_cached:
            self._references[block_id] -= 1
        return was_cached

    patch.setattr(BlockPool, "retain", forgetful)


@mutation
def free_twice(patch: pytest.MonkeyPatch) -> None:
    free = CacheManager.free

    def twice(self: CacheManager, sequence) -> None:
        tables = [list(table) for table in sequence.tables]
        free(self, sequence)
        for table, blocks in zip(sequence.tables, tables, strict=True):
            table.extend(blocks)
        free(self, sequence)

    patch.setattr(CacheManager, "free", twice)


@mutation
def free_without_returning(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def leak(self: BlockPool, block_id: int, *, is_indexed: bool) -> bool:
        is_last = release(self, block_id, is_indexed=is_indexed)
        if is_last and not is_indexed and len(self._free) > 1:
            self._free.pop()
        return is_last

    patch.setattr(BlockPool, "release", leak)


@mutation
def evict_a_block_in_use(patch: pytest.MonkeyPatch) -> None:
    take = _Group.take

    def steal(self: _Group) -> int:
        if not self.pool.num_free and self.pool.num_cached:
            for block_id in range(self.pool.num_blocks):
                if self.pool.references(block_id):
                    self.pool._references[block_id] += 1
                    return block_id
        return take(self)

    patch.setattr(_Group, "take", steal)


@mutation
def evict_and_leave_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "remove", lambda self, block: None)


@mutation
def release_tables_from_the_front(patch: pytest.MonkeyPatch) -> None:
    free = CacheManager.free

    def forward(self: CacheManager, sequence) -> None:
        for table in sequence.tables:
            table.reverse()
        free(self, sequence)

    patch.setattr(CacheManager, "free", forward)


@mutation
def keep_duplicates(patch: pytest.MonkeyPatch) -> None:
    """A second block of the same tokens stays in the table, so nobody holds the first one's chain."""

    def publish(self: CacheManager, sequence, token_ids, num_tokens: int) -> list:
        sequence.chain.extend(token_ids, num_tokens)
        keys = sequence.chain.keys
        for group, table in zip(self._groups, sequence.tables, strict=True):
            for number in range(sequence.num_published, num_tokens // 16):
                if group.index.find(keys[number]) is None:
                    group.index.insert(table[number], keys[number], keys[number - 1] if number else None)
        sequence.num_published = num_tokens // 16
        return []

    patch.setattr(CacheManager, "publish", publish)


@mutation
def forget_a_slot(patch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release

    def forgetful(self: Scheduler, state: RequestState) -> None:
        release(self, state)
        if len(self._free_slots) > 1:
            self._free_slots.pop()

    patch.setattr(Scheduler, "_release", forgetful)


@mutation
def release_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def at_once(self: Scheduler, state: RequestState) -> None:
        self.cache.free(state.blocks)

    patch.setattr(Scheduler, "_release_when_landed", at_once)


@mutation
def release_duplicates_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def publish(self: Scheduler, state: RequestState) -> None:
        self.cache.release(self.cache.publish(state.blocks, state.token_ids, state.num_computed))

    patch.setattr(Scheduler, "_publish", publish)


@mutation
def share_across_salts(patch: pytest.MonkeyPatch) -> None:
    create = KeyChain.__init__
    patch.setattr(KeyChain, "__init__", lambda self, key_seed, salt: create(self, key_seed, ""))


@mutation
def hash_blocks_without_what_is_before(patch: pytest.MonkeyPatch) -> None:
    def extend(self: KeyChain, token_ids, num_tokens: int) -> None:
        for first in range(len(self.keys) * 16, num_tokens - 15, 16):
            self.keys.append(self.root + repr(token_ids[first : first + 16]).encode())

    patch.setattr(KeyChain, "extend", extend)


@mutation
def match_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    match = CacheManager.match
    patch.setattr(CacheManager, "match", lambda self, sequence, token_ids: match(self, sequence, [*token_ids, 0]))


@mutation
def match_one_group_only(patch: pytest.MonkeyPatch) -> None:
    def match(self: CacheManager, sequence, token_ids) -> int:
        limit = (len(token_ids) - 1) // 16
        sequence.chain.extend(token_ids, limit * 16)
        return self._groups[0].index.match_length(sequence.chain.keys, limit) * self.enable_prefix_caching

    patch.setattr(CacheManager, "match", match)


@mutation
def preempt_the_oldest(patch: pytest.MonkeyPatch) -> None:
    def choose(running, asking, oldest):
        return oldest

    patch.setattr(scheduler, "choose_victim", choose)


@mutation
def preempt_without_progress(patch: pytest.MonkeyPatch) -> None:
    def choose(running, asking, oldest):
        for state in running:
            state.has_progressed = True
        return preemption.choose_victim(running, asking, oldest)

    patch.setattr(scheduler, "choose_victim", choose)


@mutation
def count_recomputation_as_hits(patch: pytest.MonkeyPatch) -> None:
    start = Scheduler._start

    def generous(self: Scheduler, state: RequestState, num_cached: int, budget: Budget) -> None:
        start(self, state, num_cached, budget)
        state.num_cached_tokens = num_cached

    patch.setattr(Scheduler, "_start", generous)


@mutation
def deliver_the_token_after_a_late_stop(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "finish_reason_after", lambda self, token_id: _only_length(self))


def _only_length(state: RequestState) -> str | None:
    return "length" if len(state.token_ids) >= state.max_total else None


@mutation
def run_past_max_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RequestState,
        "num_to_plan",
        property(lambda self: len(self.token_ids) + self.num_pending - self.num_planned),
    )


@mutation
def overtake_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def backwards(self: Scheduler, budget: Budget) -> None:
        self._waiting.reverse()
        admit(self, budget)
        self._waiting.sort(key=lambda state: state.key)

    patch.setattr(Scheduler, "_admit", backwards)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whichever check sees it first
        simulate(0, 20_000)
