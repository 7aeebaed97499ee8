"""What the cache remembers of its blocks: owners, times, why they left; ends of chains; the map of all blocks."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cache.block_map import copy_blocks, draw_map
from kvd.cache.chain_ends import MAX_EQUALS
from kvd.cache.ledger import MAX_OWNERS, OTHERS, OTHERS_NAME, Eviction, EvictionNotes, Owners
from kvd.cache.manager import CacheManager, SequenceBlocks
from kvd.cache.prefix_index import IndexedBlock, PrefixIndex
from kvd.core import BLOCK_SIZE
from kvd.insight import MapCell


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A cache whose sequences are filled at once."""

    def __init__(self, num_blocks: int = 16, **options: object) -> None:
        self.clock = Clock()
        self.cache = CacheManager((num_blocks,), key_seed=b"seed", clock=self.clock, **options)  # type: ignore[arg-type]

    def at(self, now: float) -> None:
        self.clock.now = now
        self.cache.ledger.tick()

    def fill(self, first: int, num_blocks: int, client: str = "") -> SequenceBlocks:
        """A sequence of whole blocks of its own, and one token behind them."""
        tokens = [*range(first, first + num_blocks * BLOCK_SIZE), 7]
        sequence = self.cache.open("", client)
        assert isinstance(self.cache.allocate(sequence, tokens), int)
        self.cache.publish(sequence, tokens, num_blocks * BLOCK_SIZE)
        return sequence


# --------------------------------------------------------------------------- owners and times


def test_a_prefix_has_the_owner_that_computed_it_first_and_ages() -> None:
    bench = Bench()
    first = bench.fill(0, 3, "alice")
    bench.at(110.0)
    second = bench.fill(0, 3, "bob")  # shares all of it
    (view,) = bench.cache.chains.prefixes(5)
    assert (view.client, view.age_seconds, view.idle_seconds, view.is_active) == ("alice", 10.0, 0.0, True)
    bench.cache.free(first)
    bench.cache.free(second)
    bench.at(117.0)
    (view,) = bench.cache.chains.prefixes(5)
    assert (view.client, view.age_seconds, view.idle_seconds, view.is_active) == ("alice", 17.0, 7.0, False)


def test_there_are_only_so_many_owners_and_numbers_of_those_without_blocks_are_used_again() -> None:
    used = {1, 2}
    owners = Owners(lambda: used)
    numbers = [owners.number_of(f"client {number}", 0.0) for number in range(MAX_OWNERS)]
    assert numbers == list(range(1, MAX_OWNERS + 1))
    used.update(numbers)
    assert owners.number_of("one more", 0.0) == OTHERS
    used.discard(5)
    assert owners.number_of("one more", 0.5) == OTHERS, "it looks for a number at most once a second"
    assert owners.number_of("one more", 1.5) == 5
    used.add(5)
    assert (owners.names[0], owners.names[5]) == (OTHERS_NAME, "one more")
    assert owners.number_of("client 4", 9.0) == OTHERS, "its number is another's now"
    assert len(owners.names) == MAX_OWNERS + 1


def test_of_the_notes_the_latest_are_kept() -> None:
    notes = EvictionNotes(3)
    for number, key in enumerate((b"a", b"b", b"c", b"a", b"d")):
        notes.add(key, Eviction(float(number), "", 0.0))
    assert len(notes) == 3
    assert notes.find(b"b") is None
    assert [notes.find(key).time for key in (b"c", b"a", b"d")] == [2.0, 3.0, 4.0]  # type: ignore[union-attr]


def test_lifetime_idle_time_and_reuse_gap() -> None:
    bench = Bench(num_blocks=4)
    bench.cache.free(bench.fill(0, 2, "alice"))
    bench.at(103.0)
    hit = bench.fill(0, 2, "bob")  # both, 3 s after their last use
    bench.cache.free(hit)
    bench.at(108.0)
    bench.cache.free(bench.fill(500, 3, "carol"))  # takes what is free, then both
    frozen = bench.cache.ledger.freeze()
    gaps, lifetimes = frozen["block_reuse_gap_seconds"], frozen["block_lifetime_seconds"]
    idle = frozen["block_idle_before_eviction_seconds"]
    assert (gaps.total, gaps.sum) == (2, 6.0)
    assert (lifetimes.total, lifetimes.sum) == (2, 16.0)
    assert (idle.total, idle.sum) == (2, 10.0)
    note = bench.cache.ledger.notes.find(hit.chain.keys[0])
    assert note == Eviction(108.0, "carol", 5.0)
    assert bench.cache.num_evicted_blocks == 2


def test_a_hit_on_blocks_in_use_has_no_gap() -> None:
    bench = Bench()
    bench.fill(0, 2)
    bench.at(150.0)
    bench.fill(0, 2)
    assert bench.cache.ledger.freeze()["block_reuse_gap_seconds"].sum == 0.0


def test_evictions_are_counted_by_reason() -> None:
    bench = Bench(num_blocks=8, max_cached_blocks=4)
    sequence = bench.fill(0, 5)
    bench.cache.free(sequence)  # five are cached, one too many
    assert bench.cache.drop_chain(sequence.chain.keys[3]) == 4
    bench.cache.free(bench.fill(500, 3))
    bench.cache.free(bench.fill(900, 7))
    bench.cache.reset()
    counts = bench.cache.ledger.num_evicted
    assert counts == {"capacity": 3, "cap": 4, "dropped": 4, "reset": 4}
    assert bench.cache.num_evicted_blocks == 7
    assert bench.cache.ledger.freeze()["block_lifetime_seconds"].total == 7, "what an operator drops lived as long"


# --------------------------------------------------------------------------- dropping a chain


def test_a_chain_is_dropped_down_to_where_another_one_branches_off() -> None:
    bench = Bench(num_blocks=32)
    base = list(range(48))
    one, two = [*base, *range(100, 132), 7], [*base, *range(200, 216), 7]
    chains = []
    for tokens in (one, two):
        sequence = bench.cache.open("")
        bench.cache.allocate(sequence, tokens)
        bench.cache.publish_rest(sequence, tokens, len(tokens))
        bench.cache.free(sequence)
        chains.append(sequence.chain.keys)
    assert bench.cache.drop_chain(chains[0][2]) == 0, "others continue it"
    assert bench.cache.drop_chain(chains[0][4]) == 3, "two blocks, and the token behind them"
    assert bench.cache.num_blocks_cached == 5
    assert bench.cache.chains.pin(chains[1][1]) == 2
    assert bench.cache.drop_chain(chains[1][3]) == 3
    assert bench.cache.num_blocks_active == 2
    assert bench.cache.drop_chain(b"nobody") == 0


def test_a_chain_in_use_is_not_dropped() -> None:
    bench = Bench()
    sequence = bench.fill(0, 3)
    assert bench.cache.drop_chain(sequence.chain.keys[2]) == 0
    bench.cache.free(sequence)
    assert bench.cache.drop_chain(sequence.chain.keys[2]) == 3


def test_what_is_dropped_is_not_found_in_ram_either() -> None:
    bench = Bench(num_ram_slots=[8])
    sequence = bench.fill(0, 3)
    bench.cache.free(sequence)
    bench.cache.tiers.begin_plan()
    saves, _, _ = bench.cache.tiers.take_transfers()
    assert len(saves) == 3
    keys = sequence.chain.keys
    bench.cache.tiers.ram.release(
        bench.cache.tiers.ram.at(0, saves[0].slot)
    )  # one save has been run, two are under way
    assert bench.cache.drop_chain(keys[2]) == 3
    assert all(bench.cache.tiers.has(key) is None for key in keys)
    assert bench.cache.tiers.ram.num_used(0) == 2
    for save in saves[1:]:
        bench.cache.tiers.ram.release(bench.cache.tiers.ram.at(0, save.slot))
    assert bench.cache.tiers.ram.num_used(0) == 0


def test_the_first_tokens_of_a_chain() -> None:
    bench = Bench()
    key = bench.fill(0, 3).chain.keys[2]
    chains = bench.cache.chains
    assert chains.token_ids(key, 20) == tuple(range(20))
    assert chains.token_ids(key, 1000) == tuple(range(48))
    assert chains.token_ids(key, 0) == ()
    assert chains.token_ids(b"nobody", 5) == ()


# --------------------------------------------------------------------------- ends of chains


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.booleans()), max_size=60))
def test_the_ends_are_the_whole_blocks_that_no_whole_block_continues(actions: list[tuple[int, int, bool]]) -> None:
    index = PrefixIndex()
    blocks: list[IndexedBlock] = []
    number = 0
    for action, choice, is_whole in actions:
        if action <= 1:
            number += 1
            parents = [block.key for block in blocks if block.is_whole]
            parent = ([b"root", *parents])[choice % (1 + len(parents))]
            known = index.find(parent)
            tokens = tuple(range(number, number + (BLOCK_SIZE if is_whole else 3)))
            index.insert(number, b"%d" % number, parent, 0 if known is None else known.depth + 1, tokens)
            blocks.append(index.of_key(b"%d" % number))
        elif blocks and action == 2:
            index.remove(blocks.pop(choice % len(blocks)))
        elif blocks:
            block = blocks[choice % len(blocks)]
            block.num_hits += 1
            index.ends.was_hit(block)
        continued = {block.parent_key for block in blocks if block.is_whole}
        ends = [block for block in blocks if block.is_whole and block.key not in continued]
        assert len(index.ends) == len(ends)
        assert all(index.ends.is_continued(block.key) == (block.key in continued) for block in blocks)
        found = index.ends.most_found(5)
        best = sorted(ends, key=lambda block: (-block.num_hits, -block.depth))[:5]
        assert [(block.num_hits, block.depth) for block in found] == [(block.num_hits, block.depth) for block in best]
        assert len(set(map(id, found))) == len(found)


def test_of_many_chains_that_were_found_equally_often_the_latest_are_looked_at() -> None:
    index = PrefixIndex()
    tokens = tuple(range(BLOCK_SIZE))
    for number in range(3 * MAX_EQUALS):
        index.insert(number, b"%d" % number, b"root %d" % number, 9 if number == 1 else number % 3, tokens)
    assert {block.depth for block in index.ends.most_found(5)} == {2}, "the longest one is among the oldest"
    old = index.of_key(b"0")
    old.num_hits = 1
    index.ends.was_hit(old)
    assert index.ends.most_found(1) == [old]


# --------------------------------------------------------------------------- the map


def expected_cell(bench: Bench, block_ids: range, pinned: set[int]) -> MapCell:
    pool, records = bench.cache.groups[0].pool, bench.cache.groups[0].records
    states = [pool.state(block_id) for block_id in block_ids]
    taken = [records.owner[block_id] for block_id, state in zip(block_ids, states, strict=True) if state != "free"]
    used = [records.used[block_id] for block_id, state in zip(block_ids, states, strict=True) if state == "cached"]
    return MapCell(
        states.count("free"), states.count("cached"), states.count("active"),
        sum(pool.references(block_id) > 1 for block_id in block_ids),
        sum(block_id in pinned for block_id in block_ids),
        min(taken, key=lambda owner: (-taken.count(owner), owner)) if taken else -1,
        bench.clock.now - statistics.median_low(used) if used else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_the_map_says_what_the_blocks_are(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(num_blocks=101)
    alive: list[SequenceBlocks] = []
    for _ in range(60):
        bench.at(bench.clock.now + rng.random() * 5)
        if alive and rng.random() < 0.5:
            bench.cache.free(alive.pop(rng.randrange(len(alive))))
        elif sum(len(each.tables[0]) for each in alive) < 80:
            alive.append(bench.fill(1000 * rng.randrange(8), rng.randrange(1, 6), f"client {rng.randrange(4)}"))
    key = rng.choice([block.key for block in bench.cache.groups[0].index])
    assert bench.cache.chains.pin(key)
    pinned = set(bench.cache.chains.pinned_blocks(0))
    assert pinned
    for max_cells in (1, 7, 50, 101, 1000):
        found = draw_map(copy_blocks(bench.cache, 0), max_cells)
        per_cell = found.blocks_per_cell
        assert len(found.cells) <= max_cells
        cells = [range(at, min(101, at + per_cell)) for at in range(0, 101, per_cell)]
        for cell, block_ids in zip(found.cells, cells, strict=True):
            assert cell == pytest.approx(expected_cell(bench, block_ids, pinned))
        assert sum(found.owner_blocks) == 101 - bench.cache.num_blocks_free
        assert sum(cell.num_active for cell in found.cells) == bench.cache.num_blocks_active
        assert (found.num_blocks, found.num_groups, found.owners[0]) == (101, 1, OTHERS_NAME)


def test_the_map_of_an_empty_pool() -> None:
    found = draw_map(copy_blocks(Bench(num_blocks=5).cache, 0), 2)
    assert found.cells == (MapCell(3, 0, 0, 0, 0, -1, 0.0), MapCell(2, 0, 0, 0, 0, -1, 0.0))
