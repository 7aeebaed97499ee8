"""Block pool, prefix index, eviction and the manager that keeps them in step."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.cache.block_pool import BlockPool
from kvd.cache.eviction import LeastRecentlyUsed
from kvd.cache.manager import CacheManager, Refusal, SequenceBlocks, blocks_for
from kvd.cache.prefix_index import IndexedBlock, KeyChain, PrefixIndex, root_key

from .invariants import check_cache


class PoolMachine(RuleBasedStateMachine):
    """The pool against the simplest model of it: a reference count and a flag per block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(5)
        self.references = [0] * 5
        self.cached: set[int] = set()

    def free(self) -> list[int]:
        return [block for block in range(5) if not self.references[block] and block not in self.cached]

    @precondition(lambda self: self.free())
    @rule()
    def take(self) -> None:
        block_id = self.pool.take()
        assert block_id in self.free()
        self.references[block_id] = 1

    @precondition(lambda self: not self.free())
    @rule()
    def take_from_nothing(self) -> None:
        with pytest.raises(AssertionError):
            self.pool.take()

    @rule(block_id=st.integers(0, 4))
    def retain(self, block_id: int) -> None:
        if block_id in self.free():
            with pytest.raises(AssertionError):
                self.pool.retain(block_id)
            return
        assert self.pool.retain(block_id) == (block_id in self.cached)
        self.cached.discard(block_id)
        self.references[block_id] += 1

    @rule(block_id=st.integers(0, 4), is_indexed=st.booleans())
    def release(self, block_id: int, is_indexed: bool) -> None:
        if not self.references[block_id]:
            with pytest.raises(AssertionError):
                self.pool.release(block_id, is_indexed=is_indexed)
            return
        self.references[block_id] -= 1
        is_last = not self.references[block_id]
        assert self.pool.release(block_id, is_indexed=is_indexed) == is_last
        if is_last and is_indexed:
            self.cached.add(block_id)

    @rule(block_id=st.integers(0, 4))
    def drop(self, block_id: int) -> None:
        if block_id not in self.cached:
            with pytest.raises(AssertionError):
                self.pool.drop(block_id)
            return
        self.pool.drop(block_id)
        self.cached.discard(block_id)

    @invariant()
    def counts_agree(self) -> None:
        states = [self.pool.state(block_id) for block_id in range(5)]
        num_active = sum(count > 0 for count in self.references)
        assert [self.pool.references(block_id) for block_id in range(5)] == self.references
        assert (states.count("active"), states.count("cached")) == (num_active, len(self.cached))
        assert (self.pool.num_active, self.pool.num_cached) == (num_active, len(self.cached))
        assert sorted(self.pool.free_block_ids()) == self.free()
        assert self.pool.num_free + self.pool.num_active + self.pool.num_cached == 5
        assert self.pool.num_available == 5 - num_active


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


# --------------------------------------------------------------------------- keys


def test_keys_are_the_same_in_every_process() -> None:
    chain = KeyChain(b"fingerprint|layout|a8", "salt")
    chain.extend(range(40), 40)
    assert root_key(b"fingerprint|layout|a8", "salt") == chain.root
    program = (
        "from kvd.cache.prefix_index import KeyChain; c = KeyChain(b'fingerprint|layout|a8', 'salt');"
        "c.extend(range(40), 40); print([k.hex() for k in c.keys])"
    )
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.strip() == str([key.hex() for key in chain.keys])
    assert [len(key) for key in chain.keys] == [16, 16]


def test_keys_depend_on_everything_that_can_change_a_block() -> None:
    def last_key(seed: bytes, salt: str, token_ids: list[int]) -> bytes:
        chain = KeyChain(seed, salt)
        chain.extend(token_ids, len(token_ids))
        return chain.keys[-1]

    tokens = list(range(32))
    keys = [
        last_key(b"model", "salt", tokens),
        last_key(b"other", "salt", tokens),
        last_key(b"model", "other", tokens),
        last_key(b"models", "alt", tokens),  # the border between seed and salt counts
        last_key(b"model", "\ud800", tokens),
        last_key(b"model", "salt", [99, *tokens[1:]]),
        last_key(b"model", "salt", [*tokens[:31], 99]),
        last_key(b"model", "salt", tokens[:16]),
        last_key(b"model", "salt", tokens[16:]),
        last_key(b"model", "salt", [*tokens[:31], 31 + 2**16]),
    ]
    assert len(set(keys)) == len(keys)


def test_a_chain_is_extended_without_hashing_again() -> None:
    whole, pieces = KeyChain(b"seed", ""), KeyChain(b"seed", "")
    tokens = list(range(100))
    whole.extend(tokens, 100)
    for length in (10, 16, 17, 47, 48, 100):
        pieces.extend(tokens, length)
        assert len(pieces.keys) == length // 16
    assert pieces.keys == whole.keys
    pieces.keys[0] = b"kept"
    pieces.extend(tokens, 100)
    assert pieces.keys[0] == b"kept"


def test_the_index_knows_blocks_by_key_by_number_and_by_what_they_continue() -> None:
    index = PrefixIndex()
    tokens = tuple(range(16))
    index.insert(3, b"k0", b"root", 0, tokens)
    index.insert(7, b"k1", b"k0", 1, tokens)
    root, leaf = index.find(b"k0"), index.find(b"k1")
    assert root is index.of_block(3)
    assert root is not None
    assert leaf is not None
    assert (root.parent, leaf.depth, leaf.parent) == (None, 1, root)
    assert index.continuations(b"k0", 0) == [leaf]
    assert not index.continuations(b"k0", 1)
    assert index.ends.is_continued(b"root")
    assert index.match_length([b"k0", b"k1", b"k2"], 3) == 2
    assert index.match_length([b"k1", b"k0"], 2) == 2
    assert index.match_length([b"??", b"k1"], 2) == 0
    with pytest.raises(AssertionError, match="taken"):
        index.insert(8, b"k1", b"k0", 1, tokens)
    with pytest.raises(AssertionError, match="has a key"):
        index.insert(7, b"k5", b"k0", 1, tokens)
    index.remove(leaf)
    index.remove(root)
    assert len(index) == 0
    assert not index.ends.is_continued(b"root")
    assert not index.continuations(b"k0", 0)


# --------------------------------------------------------------------------- manager


def computed(cache: CacheManager, token_ids: list[int], salt: str = "") -> SequenceBlocks:
    """A sequence whose tokens have all been computed by a committed step."""
    sequence = cache.open(salt)
    assert not isinstance(cache.allocate(sequence, token_ids), Refusal)
    cache.release(cache.publish(sequence, token_ids, len(token_ids)))
    return sequence


def known_blocks(cache: CacheManager, token_ids: list[int]) -> int:
    """Full blocks of these tokens that another request would share."""
    return cache._finder.match(cache.open(""), [*token_ids, 0], len(token_ids) // 16)


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_eviction_takes_the_least_recently_released_chain_from_its_end() -> None:
    cache = CacheManager([6], key_seed=b"")
    first, second = list(range(48)), list(range(100, 148))
    for tokens in (first, second):
        cache.free(computed(cache, tokens))
    assert (cache.num_blocks_cached, cache.num_blocks_free) == (6, 0)
    remaining = []
    for _ in range(6):
        sequence = cache.open("other")
        assert cache.allocate(sequence, [1]) == 0
        remaining.append([known_blocks(cache, tokens) for tokens in (first, second)])
    assert remaining == [[2, 3], [1, 3], [0, 3], [0, 2], [0, 1], [0, 0]]
    assert cache.num_evicted_blocks == 6


def test_a_hit_makes_a_chain_recent_again() -> None:
    cache = CacheManager([4], key_seed=b"")
    first, second = list(range(32)), list(range(100, 132))
    for tokens in (first, second):
        cache.free(computed(cache, tokens))
    again = cache.open("")
    assert cache.allocate(again, [*first[:31], 5]) == 16
    assert sorted(block.num_hits for block in cache._groups[0].index) == [0, 0, 1]
    cache.free(again)
    sequence = cache.open("other")
    cache.allocate(sequence, [1] * 48)
    assert known_blocks(cache, second) == 0
    assert known_blocks(cache, first) == 1


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    cache = CacheManager([4, 6], key_seed=b"")
    cache.free(computed(cache, list(range(32))))
    before = cache.gauges()
    sequence = cache.open("")
    # Two of the five blocks are cached, but taking them leaves only two for the other three.
    assert cache.allocate(sequence, list(range(66))) is Refusal.NO_ROOM
    assert cache.allocate(sequence, list(range(64)), num_spare_blocks=1) is Refusal.NO_ROOM
    assert cache.allocate(sequence, list(range(64)), num_extra_tokens=1) is Refusal.NO_ROOM
    assert cache.gauges() == before
    assert sequence.num_blocks == 0
    assert not cache._computing
    assert cache.allocate(sequence, list(range(64))) == 32
    assert cache.cover(sequence, 64, 65) == (False, [])
    assert [len(table) for table in sequence.tables] == [4, 4]
    check_cache(cache, [sequence])


def test_groups_hit_only_as_far_as_all_of_them_have_it() -> None:
    cache = CacheManager([8, 3], key_seed=b"")
    cache.free(computed(cache, list(range(48))))
    cache.free(computed(cache, list(range(100, 116))))  # evicts one block of the small group only
    assert [gauges.num_cached for gauges in cache.gauges()] == [4, 3]
    again = cache.open("")
    assert cache.allocate(again, list(range(48))) == 32
    # In the first group block two is known already: the sequence goes over to it.
    replaced = cache.publish(again, list(range(48)), 48)
    assert [group_id for group_id, _ in replaced] == [0]
    check_cache(cache, [again], replaced)
    cache.release(replaced)
    check_cache(cache, [again])


def test_reset_drops_what_nobody_uses_and_nothing_else() -> None:
    cache = CacheManager([8], key_seed=b"")
    used = computed(cache, list(range(32)))
    cache.free(computed(cache, [*range(32), *range(200, 232)]))
    assert cache.num_blocks_cached == 2
    assert cache.reset() == 2
    assert (cache.num_blocks_active, cache.num_blocks_cached) == (2, 0)
    assert known_blocks(cache, list(range(32))) == 2
    assert cache.num_evicted_blocks == 0
    cache.free(used)
    assert cache.reset() == 2
    assert cache.reset() == 0


def test_views_are_built_once_per_table() -> None:
    cache = CacheManager([8, 8], key_seed=b"")
    sequence = cache.open("")
    cache.allocate(sequence, list(range(30)))
    views = sequence.views(30)
    assert sequence.views(31) is views
    assert [len(table) for table in sequence.views(16)[0]] == [1, 1]
    assert cache.cover(sequence, 30, 33) == (True, [])
    assert [len(table) for table in sequence.views(33)[0]] == [3, 3]
    with pytest.raises(AssertionError, match="no block for token 48"):
        sequence.views(49)


def test_the_policy_alone_decides_the_order() -> None:
    class MostRecent(LeastRecentlyUsed):
        """Evicts the latest leaf: another order in a few lines, nothing else is touched."""

        def place(self, block: IndexedBlock) -> tuple[int, float]:
            return 0, -float(self._num_additions)

    cache = CacheManager([6], key_seed=b"", make_policy=MostRecent)
    first, second = list(range(48)), list(range(100, 148))
    for tokens in (first, second):
        cache.free(computed(cache, tokens))
    assert cache.allocate(cache.open("other"), [1] * 32) == 0
    assert [known_blocks(cache, tokens) for tokens in (first, second)] == [3, 1]


def test_a_window_keeps_what_it_sees_where_blocks_were_forgotten_before_it() -> None:
    cache = CacheManager([16, 16], key_seed=b"", windows=[0, 24])
    sequence = cache.open("")
    token_ids = list(range(200))
    assert cache.allocate(sequence, token_ids[:96]) == 0
    assert cache.cover(sequence, 0, 96) == (True, [])
    cache.release(cache.drop(sequence, [1]))
    is_covered, retired = cache.cover(sequence, 96, 112)
    assert is_covered
    assert sequence.numbers == ([0, 2, 3, 4, 5, 6], [4, 5, 6])
    check_cache(cache, [sequence], retired)
    assert sequence.views(112)[1] == ((0, 32, 48, 64, 80, 96), range(64, 112, 16))


# --------------------------------------------------------------------------- layers


@pytest.mark.parametrize("module", ["kvd.scheduler.scheduler", "kvd.cache.manager"])
def test_loads_without_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
