"""Eviction policies against a brute-force reference of the order that they state."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.cache import eviction
from kvd.cache.eviction import POLICIES, EvictionPolicy, LeafOrder, LeastRecentlyUsed, ReuseValue
from kvd.cache.prefix_index import IndexedBlock


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Tree:
    """What manager and index do with blocks: references, cached children, calls of the policy in the right order."""

    policy: EvictionPolicy
    cached: dict[int, IndexedBlock] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    num_made: int = 0

    def request(self, prefix: IndexedBlock | None, num_new: int) -> list[IndexedBlock]:
        """The table of a request that shares the chain up to `prefix` and computes `num_new` blocks behind it."""
        table: list[IndexedBlock] = []
        block = prefix
        while block is not None:
            table.insert(0, block)
            block = block.parent
        for block in table:
            if block.block_id in self.cached:
                self.uncache(block)
            self.references[block.block_id] += 1
            block.num_hits += 1
        for _ in range(num_new):
            parent = table[-1] if table else None
            block = IndexedBlock(self.num_made, self.num_made.to_bytes(16, "big"), parent, len(table))
            self.num_made += 1
            self.references[block.block_id] = 1
            table.append(block)
        return table

    def finish(self, table: list[IndexedBlock], kept_until: float = 0.0) -> None:
        for block in reversed(table):
            block.kept_until = max(block.kept_until, kept_until)
            self.references[block.block_id] -= 1
            if not self.references[block.block_id]:
                if block.parent is not None:
                    block.parent.num_children += 1
                self.cached[block.block_id] = block
                self.policy.add(block)

    def uncache(self, block: IndexedBlock) -> None:
        del self.cached[block.block_id]
        self.policy.discard(block)
        if block.parent is not None:
            block.parent.num_children -= 1

    def evict(self) -> IndexedBlock:
        victim = self.policy.choose()
        assert victim is self.cached[victim.block_id]
        assert not victim.num_children
        self.uncache(victim)
        return victim

    def leaves(self) -> list[IndexedBlock]:
        return [block for block in self.cached.values() if not block.num_children]


class Reference:
    """The stated order, by looking at every leaf. Subclasses give segments and ranks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.blocks: dict[int, tuple[int, float, int, IndexedBlock]] = {}
        self.num_added = 0
        self.victim: IndexedBlock | None = None

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        return 0, 0.0

    def segments(self) -> list[int]:
        return [0]

    def add(self, block: IndexedBlock) -> None:
        self.num_added += 1
        self.blocks[block.block_id] = (*self.place(block), self.num_added, block)

    def discard(self, block: IndexedBlock) -> None:
        del self.blocks[block.block_id]

    def choose(self) -> IndexedBlock:
        leaves = [entry for entry in self.blocks.values() if not entry[3].num_children]
        loose = [entry for entry in leaves if entry[3].kept_until <= self.clock.now]
        for segment in self.segments():
            if candidates := [entry for entry in loose if entry[0] == segment]:
                return min(candidates, key=lambda entry: entry[1:3])[3]
        return min(leaves, key=lambda entry: (entry[3].kept_until, entry[1:3]))[3]


class ValueReference(Reference):
    num_new = 0

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        self.num_new += not block.num_hits
        return int(block.num_hits > 0), self.num_new + len(self.blocks) * (block.depth / 2048)

    def segments(self) -> list[int]:
        num_protected = sum(entry[0] for entry in self.blocks.values())
        return [1, 0] if num_protected > 0.4 * len(self.blocks) else [0, 1]


class Both:
    """A policy beside its reference: they have to agree."""

    def __init__(self, policy: LeafOrder, reference: Reference) -> None:
        self.policy, self.reference = policy, reference

    def add(self, block: IndexedBlock) -> None:
        self.policy.add(block)
        self.reference.add(block)

    def discard(self, block: IndexedBlock) -> None:
        self.policy.discard(block)
        self.reference.discard(block)

    def choose(self) -> IndexedBlock:
        victim = self.policy.choose()
        assert victim is self.policy.choose(), "choose() changed something"
        assert victim is self.reference.choose()
        return victim


class OrderMachine(RuleBasedStateMachine):
    """Requests that share chains, finish in any order and are evicted and dropped in between."""

    make_both: staticmethod

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.both: Both = self.make_both(self.clock)
        self.tree = Tree(self.both)
        self.running: list[list[IndexedBlock]] = []

    @rule(data=st.data(), num_new=st.integers(0, 3))
    def start(self, data: st.DataObject, num_new: int) -> None:
        known = [*self.tree.cached.values(), *(block for table in self.running for block in table)]
        prefix = data.draw(st.sampled_from([None, *known]))
        if prefix is not None or num_new:
            self.running.append(self.tree.request(prefix, num_new))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kept=st.sampled_from([0, 0, 0, 1, 3]))
    def finish(self, data: st.DataObject, kept: int) -> None:
        table = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.tree.finish(table, self.clock.now + kept if kept else 0.0)

    @precondition(lambda self: self.tree.cached)
    @rule()
    def evict(self) -> None:
        self.tree.evict()

    @precondition(lambda self: self.tree.cached)
    @rule()
    def choose_in_vain(self) -> None:
        self.both.choose()

    @precondition(lambda self: self.tree.cached)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.tree.uncache(data.draw(st.sampled_from(self.tree.leaves())))

    @rule()
    def wait(self) -> None:
        self.clock.now += 1

    @invariant()
    def the_policy_knows_the_cached_blocks(self) -> None:
        assert set(self.both.policy._blocks) == set(self.tree.cached)
        assert len(self.both.policy) == len(self.tree.cached)


class TestLeastRecentlyUsed(
    type(
        "Machine", (OrderMachine,), {"make_both": lambda _, clock: Both(LeastRecentlyUsed(clock), Reference(clock))}
    ).TestCase
):
    settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


class TestReuseValue(
    type(
        "Machine", (OrderMachine,), {"make_both": lambda _, clock: Both(ReuseValue(clock), ValueReference(clock))}
    ).TestCase
):
    settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.fixture(params=list(POLICIES))
def tree(request: pytest.FixtureRequest) -> Tree:
    return Tree(POLICIES[request.param](Clock()))


def test_the_default_comes_first() -> None:
    assert next(iter(POLICIES)) == "value"


def test_a_chain_leaves_from_its_end(tree: Tree) -> None:
    table = tree.request(None, 5)
    tree.finish(table)
    assert [tree.evict() for _ in range(5)] == table[::-1]


def test_flat_blocks_leave_in_the_order_of_their_release(tree: Tree) -> None:
    """A windowed group: no parents, no children."""
    blocks = [tree.request(None, 1) for _ in range(4)]
    for number in (2, 0, 3, 1):
        tree.finish(blocks[number])
    assert [tree.evict().block_id for _ in range(4)] == [2, 0, 3, 1]


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_kept_block_goes_last_and_only_for_its_time(name: str) -> None:
    clock = Clock()
    tree = Tree(POLICIES[name](clock))
    blocks = [tree.request(None, 1) for _ in range(4)]
    for block, kept_until in zip(blocks, (10.0, 0.0, 10.0, 0.0), strict=True):
        tree.finish(block, kept_until)
    assert tree.evict() is blocks[1][0]
    assert tree.evict() is blocks[3][0]
    tree.finish(tree.request(None, 1))
    clock.now = 10.0
    assert [tree.evict().block_id for _ in range(3)] == [0, 2, 4]


def test_kept_blocks_go_when_nothing_else_is_left(tree: Tree) -> None:
    later, sooner, loose = tree.request(None, 1), tree.request(None, 1), tree.request(None, 1)
    tree.finish(later, kept_until=20.0)
    tree.finish(sooner, kept_until=10.0)
    tree.finish(loose)
    assert [tree.evict() for _ in range(3)] == [*loose, *sooner, *later]


def hit(tree: Tree, block: IndexedBlock, times: int) -> None:
    for _ in range(times):
        tree.finish(tree.request(block, 0))


def scan(tree: Tree, num_requests: int, capacity: int, num_blocks: int = 10) -> None:
    for _ in range(num_requests):
        while len(tree.cached) > capacity - num_blocks:
            tree.evict()
        tree.finish(tree.request(None, num_blocks))


def test_a_scan_does_not_flush_what_was_hit() -> None:
    tree = Tree(ReuseValue(Clock()))
    hot, cold = tree.request(None, 20), tree.request(None, 20)
    tree.finish(hot)
    tree.finish(cold)
    hit(tree, hot[-1], 1)
    scan(tree, 500, capacity=100)
    assert all(block.block_id in tree.cached for block in hot)
    assert not any(block.block_id in tree.cached for block in cold)


def test_stale_hot_blocks_do_not_hold_more_than_their_share() -> None:
    tree = Tree(ReuseValue(Clock()))
    hot = tree.request(None, 90)
    tree.finish(hot)
    hit(tree, hot[-1], 50)
    scan(tree, 100, capacity=100)
    assert sum(block.block_id in tree.cached for block in hot) <= eviction.PROTECTED_SHARE * 100 + 1


def test_newer_hot_blocks_replace_stale_ones() -> None:
    tree = Tree(ReuseValue(Clock()))
    stale = tree.request(None, 25)
    tree.finish(stale)
    hit(tree, stale[-1], 50)
    for _ in range(20):
        while len(tree.cached) > 75:
            tree.evict()
        table = tree.request(None, 25)
        tree.finish(table)
        hit(tree, table[-1], 2)
    assert not any(block.block_id in tree.cached for block in stale)


@pytest.mark.parametrize(("depth", "place"), [(0, 100), (1024, 139)])
def test_a_block_that_costs_more_stays_longer(depth: int, place: int) -> None:
    """Half as much again for half a turnover: 100 blocks were cached when it came, so 50 later ones go before it."""
    policy = ReuseValue(Clock())
    for block_id in range(140):
        policy.add(IndexedBlock(block_id, b"", None, depth if block_id == 100 else 0))
    order = []
    for _ in range(140):
        victim = policy.choose()
        policy.discard(victim)
        order.append(victim.block_id)
    assert order.index(100) == place


class CountingHeapq:
    """Counts pushes and pops, which are what costs O(log n), and what a heapify looks at."""

    def __init__(self, real: object) -> None:
        self.real, self.count = real, 0

    def heappush(self, heap: list, item: object) -> None:
        self.count += 1
        self.real.heappush(heap, item)

    def heappop(self, heap: list) -> object:
        self.count += 1
        return self.real.heappop(heap)

    def heapify(self, heap: list) -> None:
        self.count += len(heap)
        self.real.heapify(heap)


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("num_kept", [0, 2000])
def test_the_work_per_call_does_not_grow(name: str, num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 cached blocks in chains of 20 with a shared root; reuse without eviction, then eviction of everything."""
    counting = CountingHeapq(eviction.heapq)
    monkeypatch.setattr(eviction, "heapq", counting)
    tree = Tree(POLICIES[name](Clock()))
    root = tree.request(None, 1)
    tables = [tree.request(root[0], 20) for _ in range(5000)]
    for number, table in enumerate(tables):
        tree.finish(table, kept_until=10.0 if number < num_kept else 0.0)
    tree.finish(root)
    for _ in range(2):
        for table in tables:
            tree.finish(tree.request(table[-1], 0))
    assert len(tree.cached) == 100_001
    entries = sum(map(len, tree.policy._leaves)) + len(tree.policy._kept)
    assert entries <= 2 * len(tree.cached) + eviction.MIN_STALE_ENTRIES + 1
    assert counting.count <= 40_000, "a chain costs more than a few entries"
    counting.count = 0
    while tree.cached:
        tree.evict()
    assert counting.count <= 500_000, "an eviction costs more than a few entries"


def test_entries_without_eviction_stay_bounded() -> None:
    tree = Tree(ReuseValue(Clock()))
    table = tree.request(None, 3)
    tree.finish(table)
    hit(tree, table[-1], 1000)
    assert sum(map(len, tree.policy._leaves)) <= 2 * 3 + eviction.MIN_STALE_ENTRIES + 1
    assert [tree.evict() for _ in range(3)] == table[::-1]
