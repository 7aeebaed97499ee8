"""What must hold between any two calls of the scheduler. Looks inside on purpose: nobody else needs to."""

from __future__ import annotations

import itertools
from collections import Counter

from kvd.cache.manager import CacheManager
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.scheduler import Scheduler


def check_everything(scheduler: Scheduler) -> None:
    flights = scheduler._in_flight
    in_flight = {id(state): state for flight in flights for state in flight.states}
    alive = {id(state): state for state in scheduler._states.values()}
    holders = list((alive | in_flight).values())
    check_queues(scheduler, holders)
    check_slots(scheduler, holders)
    check_flights(scheduler)
    replaced = [block for flight in flights for block in flight.replaced_blocks]
    check_cache(scheduler.cache, holders, replaced)


def check_queues(scheduler: Scheduler, holders: list[RequestState]) -> None:
    waiting, running = scheduler._waiting, scheduler._running
    for queue in (waiting, running):
        assert all(a.key < b.key for a, b in itertools.pairwise(queue)), "queue out of order"
    assert Counter(map(id, waiting + running)) == Counter(map(id, scheduler._states.values())), "a request is lost"
    assert len(running) <= scheduler.config.max_num_seqs
    assert all(state.is_running and not state.has_ended for state in running)
    assert not any(state.is_running for state in waiting)
    assert scheduler._num_releasing == sum(state.must_release for state in holders)
    for state in holders:
        assert state.num_computed <= state.num_planned <= len(state.token_ids) + state.num_pending
        assert state.has_ended or len(state.token_ids) + state.num_pending <= state.max_total
        assert (state.slot is None) == (not state.blocks.num_blocks)
        assert state.num_planned <= state.blocks.num_blocks * 16
        in_plans = sum(flight.states.count(state) for flight in scheduler._in_flight)
        assert state.num_in_flight == in_plans, "steps in flight miscounted"
        assert state.must_release <= (in_plans > 0), "held although no step names it"
        if not state.has_ended:
            assert state.num_preemptions <= 1 + state.num_output, "preempted twice without progress"


def check_slots(scheduler: Scheduler, holders: list[RequestState]) -> None:
    slots = [state.slot for state in holders if state.slot is not None] + scheduler._free_slots
    assert sorted(slots) == list(range(scheduler.config.max_num_seqs)), f"slots leaked or doubled: {sorted(slots)}"


def check_flights(scheduler: Scheduler) -> None:
    """What a plan in flight names is still held for it."""
    groups = scheduler.cache._groups
    for flight in scheduler._in_flight:
        for state, item in zip(flight.states, flight.plan.items, strict=True):
            assert state.slot == item.slot, "a slot changed hands in flight"
            for group, table in zip(groups, item.block_tables, strict=True):
                for block_id in table:
                    assert group.pool.references(block_id), f"block {block_id} was released in flight"


def check_cache(cache: CacheManager, holders: list[RequestState], replaced: list[tuple[int, int]]) -> None:
    for group_id, group in enumerate(cache._groups):
        pool, index = group.pool, group.index
        expected = [0] * pool.num_blocks
        for state in holders:
            for block_id in state.blocks.tables[group_id]:
                expected[block_id] += 1
        for replaced_group, block_id in replaced:
            if replaced_group == group_id:
                expected[block_id] += 1
        assert pool._references == expected, "references do not add up to the tables"
        free = set(pool.free_block_ids())
        cached = {block_id for block_id in range(pool.num_blocks) if pool._is_cached[block_id]}
        active = {block_id for block_id in range(pool.num_blocks) if expected[block_id]}
        assert len(free) == len(pool.free_block_ids()), "a block is free twice"
        assert (len(free), len(active), len(cached)) == (pool.num_free, pool.num_active, pool.num_cached)
        assert pool.num_free + pool.num_active + pool.num_cached == pool.num_blocks
        assert free | active | cached == set(range(pool.num_blocks)), "a block is lost"
        assert set(group.policy._blocks) == cached, "the policy does not know what is cached"
        check_index(index, expected, free, cached)
        if cached:
            assert not group.policy.choose().num_children, "the next victim has children"


def check_index(index: object, references: list[int], free: set[int], cached: set[int]) -> None:
    by_key, by_block = index._by_key, index._by_block
    assert {block.block_id: block for block in by_key.values()} == by_block
    assert all(key == block.key for key, block in by_key.items())
    assert cached <= by_block.keys(), "a cached block that nobody can find"
    assert not free & by_block.keys(), "a free block is indexed"
    num_children: Counter[bytes] = Counter()
    child_references: Counter[bytes] = Counter()
    for block in by_key.values():
        if block.parent is not None:
            assert by_key.get(block.parent.key) is block.parent, "the block before it is not indexed"
            assert block.depth == block.parent.depth + 1
            num_children[block.parent.key] += 1
            child_references[block.parent.key] += references[block.block_id]
    for block in by_key.values():
        assert block.num_children == num_children[block.key]
        assert references[block.block_id] >= child_references[block.key], "a block is held without the ones before"
