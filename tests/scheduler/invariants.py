"""What must hold between any two calls of the scheduler. Looks inside on purpose: nobody else needs to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from kvd.cache.block_pool import ACTIVE, CACHED, FREE, SHARED
from kvd.cache.eviction import LeafOrder
from kvd.cache.layer_group import LayerGroup
from kvd.cache.ledger import OTHERS
from kvd.cache.manager import CacheManager, SequenceBlocks, blocks_for
from kvd.cache.ram_tier import RamTier
from kvd.core import BLOCK_SIZE, StepPlan
from kvd.scheduler.preemption import max_preemptions
from kvd.scheduler.request_state import RequestState
from kvd.scheduler.scheduler import Scheduler

Job = tuple[int, int]
"""(group id, slot) of a store or load that the slow tier has not answered."""


def check_everything(scheduler: Scheduler, jobs: Iterable[Job] = ()) -> None:
    roster = scheduler._roster
    flights = roster.in_flight
    in_flight = {id(state): state for flight in flights for state in flight.states}
    in_flight |= {id(state): state for flight in flights for state, _ in flight.restored}
    alive = {id(state): state for state in roster.states.values()}
    holders = list((alive | in_flight).values())
    check_queues(scheduler, holders)
    check_slots(scheduler, holders)
    check_flights(scheduler)
    check_computing(scheduler.cache, holders)
    replaced = [block for flight in flights for block in flight.replaced_blocks]
    sequences = [state.blocks for state in holders]
    check_cache(scheduler.cache, sequences, replaced)
    check_ram(scheduler.cache, sequences, [flight.plan for flight in flights], jobs)


def check_queues(scheduler: Scheduler, holders: list[RequestState]) -> None:
    roster = scheduler._roster
    waiting, running = list(roster.waiting), roster.running
    assert all(a.key < b.key for a, b in itertools.pairwise(running)), "running requests out of order"
    assert Counter(map(id, waiting + running)) == Counter(map(id, roster.states.values())), "a request is lost"
    assert len(running) <= scheduler.config.max_num_seqs
    assert all(state.is_running and not state.has_ended for state in running)
    assert not any(state.is_running for state in waiting)
    assert roster.num_releasing == sum(state.must_release for state in holders)
    for state in waiting:
        assert state.must_release or not any(state.blocks.tables), "a waiting request holds blocks"
        assert state.must_release or state.blocks.restore is None, "a waiting request holds slots for a restore"
    for state in holders:
        blocks = state.blocks
        assert state.num_computed <= state.num_planned <= len(state.token_ids) + state.num_pending
        assert state.has_ended or len(state.token_ids) + state.num_pending <= state.max_total
        assert (state.slot is None) == (not blocks.num_blocks)
        assert blocks.restore is None or blocks.swapped is None
        assert all(len(a) == len(b) for a, b in zip(blocks.tables, blocks.numbers, strict=True))
        assert all(a < b for numbers in blocks.numbers for a, b in itertools.pairwise(numbers))
        if state.slot is not None and state.num_planned:
            last = (state.num_planned - 1) // BLOCK_SIZE
            assert all(numbers[-1] >= last for numbers in blocks.numbers), "tokens without a block"
        in_plans = sum(
            flight.states.count(state) + sum(state is restored for restored, _ in flight.restored)
            for flight in roster.in_flight
        )
        assert state.num_in_flight == in_plans, "steps in flight miscounted"
        assert state.must_release <= (in_plans > 0), "held although no step names it"
        if not state.has_ended:
            num_ordinary = state.num_preemptions - state.num_forced
            assert num_ordinary <= max_preemptions(state.num_output), "preempted too often"
            may_lack_promised = state.forgetting is not None or any(group.window for group in scheduler.cache._groups)
            assert not state.num_forced or may_lack_promised, "preempted although it had all blocks it was promised"
            check_spans(scheduler, state)
            check_published(scheduler.cache, blocks)


def check_spans(scheduler: Scheduler, state: RequestState) -> None:
    """Behind its next token a windowed group holds the window, two chunks, and (window + 15) // 16 + 3 blocks."""
    if not state.is_running or state.blocks.restore is not None:
        return
    if not any(state in flight.states for flight in scheduler._roster.in_flight):
        return  # what was restored is given up when its first tokens are computed
    for group, numbers in zip(scheduler.cache._groups, state.blocks.numbers, strict=True):
        if group.window:
            start = max(0, state.num_planned - 2 * scheduler.config.max_num_batched_tokens)
            most = blocks_for(state.num_planned) - group.first_seen(start) + blocks_for(group.window) + 3
            behind = sum(number < blocks_for(state.num_planned) for number in numbers)
            assert behind <= most, f"{behind} blocks are held for a window of {group.window}"


def check_published(cache: CacheManager, blocks: SequenceBlocks) -> None:
    """The first `num_published` blocks of a sequence are those that others find under its keys.

    One that has dropped tokens may come back from RAM in blocks of its own, which it does not publish again.
    """
    if blocks.has_dropped:
        return
    for group, table, numbers in zip(cache._groups, blocks.tables, blocks.numbers, strict=True):
        for number, block_id in zip(numbers, table, strict=True):
            if number >= blocks.num_published:
                break
            known = group.index.find(blocks.chain.keys[number])
            assert known is not None, f"block {number} of a sequence is published and unknown"
            assert known.block_id == block_id, f"block {number} of a sequence is kept twice"


def check_order(cache: CacheManager) -> None:
    """A cached block is released after its children. Where tokens are forgotten a block can outlive its children."""
    for group in cache._groups:
        if not isinstance(group.policy, LeafOrder):
            continue
        places = group.policy._blocks
        for place in places.values():
            parent = place.block.parent
            if parent is not None and parent.block_id in places and places[parent.block_id].block is parent:
                assert place.number < places[parent.block_id].number, "a block is cached after the one before it"


def check_slots(scheduler: Scheduler, holders: list[RequestState]) -> None:
    slots = [state.slot for state in holders if state.slot is not None] + scheduler._roster.free_slots
    assert sorted(slots) == list(range(scheduler.config.max_num_seqs)), f"slots leaked or doubled: {sorted(slots)}"


def check_flights(scheduler: Scheduler) -> None:
    """What a plan in flight names is still held for it."""
    groups = scheduler.cache._groups
    for flight in scheduler._roster.in_flight:
        for state, item in zip(flight.states, flight.plan.items, strict=True):
            assert state.slot == item.slot, "a slot changed hands in flight"
            for group, table in zip(groups, item.block_tables, strict=True):
                for block_id in table:
                    assert group.pool.references(block_id), f"block {block_id} was released in flight"


def check_computing(cache: CacheManager, holders: list[RequestState]) -> None:
    """Whoever is said to be about to compute a block runs, and has it before it."""
    owners = {id(state.blocks): state for state in holders}
    for key, sequence in cache._computing.items():
        state = owners.get(id(sequence))
        assert state is not None, "a block is awaited from a sequence that is gone"
        assert state.is_running or state.must_release, "a block is awaited from a request that does not run"
        number = sequence.chain.keys.index(key)
        assert number in sequence.registered
        assert number >= sequence.num_published, "a block is awaited that is there"
        assert (number + 1) * BLOCK_SIZE <= len(state.token_ids)
        assert not sequence.has_dropped


def check_cache(
    cache: CacheManager, sequences: list[SequenceBlocks], replaced: list[tuple[int, int]] | None = None
) -> None:
    """References are tables, pins and blocks that wait for a step; pool, index and policy agree."""
    pinned = [(group_id, block.block_id) for hold in cache.chains.pinned for group_id, block in hold.blocks]
    for group_id, group in enumerate(cache._groups):
        pool = group.pool
        expected = [0] * pool.num_blocks
        for sequence in sequences:
            for block_id in sequence.tables[group_id]:
                expected[block_id] += 1
        for of_group, block_id in (*(replaced or ()), *pinned):
            if of_group == group_id:
                expected[block_id] += 1
        assert pool._references == expected, "references do not add up to tables, pins and replaced blocks"
        free = set(pool.free_block_ids())
        shown = [
            ACTIVE if count == 1 else SHARED if count else state
            for count, state in zip(expected, pool.states, strict=True)
        ]
        assert list(pool.states) == shown, "states and references disagree"
        assert all(pool.states[block_id] == FREE for block_id in free)
        check_owners(group)
        cached = {block_id for block_id in range(pool.num_blocks) if pool.states[block_id] == CACHED}
        active = {block_id for block_id in range(pool.num_blocks) if expected[block_id]}
        assert len(free) == len(pool.free_block_ids()), "a block is free twice"
        assert (len(free), len(active), len(cached)) == (pool.num_free, pool.num_active, pool.num_cached)
        assert pool.num_free + pool.num_active + pool.num_cached == pool.num_blocks
        assert free | active | cached == set(range(pool.num_blocks)), "a block is lost"
        assert pool.num_cached <= group.max_cached, "more is cached than may be"
        if isinstance(group.policy, LeafOrder):
            assert set(group.policy._blocks) == cached, "the policy does not know what is cached"
        check_index(group, free, cached)
        if cached:
            victim = group.policy.choose()
            assert victim.block_id in cached
            assert not victim.num_children, "the next victim has children"


def check_owners(group: LayerGroup) -> None:
    """A free block is nobody's."""
    numbers = range(len(group.ledger.owners.names))
    for state, owner in zip(group.pool.states, group.records.owner, strict=True):
        assert owner in numbers
        assert state != FREE or owner == OTHERS, "a free block has an owner"


def check_index(group: LayerGroup, free: set[int], cached: set[int]) -> None:
    index = group.index
    by_key, by_block = index._by_key, index._by_block
    assert {block.block_id: block for block in by_key.values()} == by_block
    assert all(key == block.key for key, block in by_key.items())
    assert cached <= by_block.keys(), "a cached block that nobody can find"
    assert not free & by_block.keys(), "a free block is indexed"
    num_cached_children: Counter[int] = Counter()
    known = 0
    for block in by_key.values():
        if block.parent is not None:
            assert not index.is_flat
            assert block.parent.key == block.parent_key
            assert block.depth == block.parent.depth + 1
            num_cached_children[id(block.parent)] += block.block_id in cached
        assert block in index.continuations(block.parent_key, block.token_ids[0]) or len(by_key) > 32
    for block in by_key.values():
        assert block.num_children == num_cached_children[id(block)], "cached children miscounted"
    for behind in index._continuations.values():
        for alike in behind.values():
            assert alike, "an empty list of continuations"
            known += len(alike)
    assert known == len(by_key), "continuations and keys disagree"


def check_ram(cache: CacheManager, sequences: list[SequenceBlocks], plans: list[StepPlan], jobs: Iterable[Job]) -> None:
    """A slot's holds are the plans, restores, swapped-out sequences, stores and loads that depend on it."""
    ram = cache.tiers.ram
    holds: Counter[Job] = Counter(jobs)
    for plan in plans:
        holds.update((each.group_id, each.slot) for each in (*plan.saves, *plan.restores))
    for sequence in sequences:
        if sequence.restore is not None:
            steps = sequence.restore.steps[sequence.restore.num_done :]
            holds.update((block.group_id, block.slot) for step in steps for block in step.slots.values())
        if sequence.swapped is not None:
            holds.update((block.group_id, block.slot) for _, _, block in sequence.swapped.entries)
    assert not cache.tiers._saves
    assert not cache.tiers._copies
    assert not cache.tiers._restores
    for group_id, num_slots in enumerate(ram.num_slots):
        blocks, free, idle = ram._blocks[group_id], ram._free[group_id], ram._idle[group_id]
        assert sorted([*blocks, *free]) == list(range(num_slots)), "a slot is lost or twice there"
        assert {slot: block.holds for slot, block in blocks.items()} == {
            slot: holds[group_id, slot] for slot in blocks
        }, "holds do not add up to what depends on a slot"
        assert {slot for slot, block in blocks.items() if not block.holds} == set(idle), "idle slots miscounted"
        assert all(blocks[slot] is block for slot, block in idle.items())
        assert all(block.group_id == group_id and block.slot == slot for slot, block in blocks.items())
        assert not any(block.key is None or block.has_failed for block in idle.values())
    assert all(slot in ram._blocks[group_id] for group_id, slot in holds), "a free slot is depended on"
    check_ram_index(ram)


def check_ram_index(ram: RamTier) -> None:
    num_known = 0
    for group_id, by_key in enumerate(ram._by_key):
        for key, block in by_key.items():
            assert block.key == key
            assert not block.has_failed, "a block that failed is found"
            assert not block.is_withdrawn, "a block that was dropped is found"
            assert ram._blocks[group_id].get(block.slot) is block, "a key of a slot that holds something else"
            assert ram._continuations[group_id, block.parent_key, block.token_ids[0]][key] is block
            num_known += 1
        unknown = [block for block in ram._blocks[group_id].values() if block.key not in by_key]
        assert all(block.key is None or block.has_failed or block.is_withdrawn for block in unknown), (
            "a block that nobody finds"
        )
    assert num_known == sum(map(len, ram._continuations.values())), "continuations and keys disagree"
    assert all(ram._continuations.values())
