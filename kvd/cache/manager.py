"""The KV blocks of all requests: find what is cached, allocate, grow, publish, free.

Owner: the engine thread; nobody else calls anything in here.

One `CacheManager` holds a pool, a prefix index and an eviction policy per layer group and keeps the three in step.
A `SequenceBlocks` is one request's side of it: a block table per group and the chain of its keys. Requests
never touch a pool.

Invariants, checked after every step of the simulator:
  - a block's references are exactly the tables that name it, plus replaced blocks that wait for a step in flight;
  - an indexed block is active or cached, never free; a cached one is always indexed;
  - only blocks whose 16 tokens were computed by committed steps are indexed, and nobody writes to them again;
  - whoever references an indexed block references the indexed blocks before it (`publish` sees to it), so cached
    blocks have cached children only, and every cached block can be evicted, leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvd.cache.block_pool import BlockPool
from kvd.cache.eviction import EvictionPolicy, LeastRecentlyUsed
from kvd.cache.prefix_index import KeyChain, PrefixIndex
from kvd.core import BLOCK_SIZE

PhysicalBlock = tuple[int, int]
"""(group id, block id)"""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class PoolGauges:
    """How the blocks of one layer group are used at this moment."""

    group_id: int
    window: int
    num_blocks: int
    num_active: int
    num_cached: int
    num_free: int


class SequenceBlocks:
    """The block tables of one request, made by `CacheManager.open` and changed by it alone.

    `tables[group_id][j]` is the block of tokens 16·j … 16·j + 15; the first `num_published` of them are indexed.
    The chain of keys survives `free`, so that a request which starts over is not hashed again.
    """

    __slots__ = ("_views", "chain", "num_published", "tables")

    def __init__(self, num_groups: int, chain: KeyChain) -> None:
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.chain = chain
        self.num_published = 0
        self._views: tuple[tuple[tuple[int, ...], ...], tuple[range, ...]] | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in the table of the first group."""
        return len(self.tables[0])

    def views(self, num_tokens: int) -> tuple[tuple[tuple[int, ...], ...], tuple[range, ...]]:
        """Per group the table up to token `num_tokens - 1`, and the position of each entry's first token.

        The whole table, which is what a decode step asks for, is built only when it has changed.
        """
        num_blocks = blocks_for(num_tokens)
        views = self._views
        if views is not None and len(views[0][0]) == num_blocks:
            return views
        assert num_blocks <= len(self.tables[0]), f"{num_tokens} tokens do not fit {len(self.tables[0])} blocks"
        positions = range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE)
        views = tuple(tuple(table[:num_blocks]) for table in self.tables), (positions,) * len(self.tables)
        self._views = views
        return views

    def forget_views(self) -> None:
        self._views = None


class _Group:
    """Pool, index and policy of one layer group."""

    __slots__ = ("index", "num_evicted", "policy", "pool", "window")

    def __init__(self, num_blocks: int, window: int, policy: EvictionPolicy) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.policy = policy
        self.window = window
        self.num_evicted = 0

    def take(self) -> int:
        """A block with one reference; evicts a cached one when none is free."""
        if not self.pool.num_free:
            self.evict()
            self.num_evicted += 1
        return self.pool.take()

    def evict(self) -> None:
        """Turn the cached leaf that the policy names into a free block."""
        victim = self.policy.choose()
        self.policy.discard(victim)
        self.index.remove(victim)
        self.pool.drop(victim.block_id)

    def share(self, key: bytes) -> int:
        """One more reference to the block under a known key."""
        block = self.index.find(key)
        assert block is not None, "share() of a key that is not indexed"
        if self.pool.retain(block.block_id):
            self.policy.discard(block)
        return block.block_id

    def release(self, block_id: int) -> None:
        block = self.index.of_block(block_id)
        if self.pool.release(block_id, is_indexed=block is not None) and block is not None:
            self.policy.add(block)


class CacheManager:
    """All KV blocks.

    num_blocks      blocks per layer group
    windows         tokens that a query sees in each group, 0 for all; blocks that left a window are kept for now
    key_seed        model fingerprint, KV layout id and arithmetic id: what else decides the bytes of a block
    make_policy     called once per group
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        *,
        key_seed: bytes,
        windows: Sequence[int] | None = None,
        enable_prefix_caching: bool = True,
        make_policy: Callable[[], EvictionPolicy] = LeastRecentlyUsed,
    ) -> None:
        windows = (0,) * len(num_blocks) if windows is None else windows
        assert len(windows) == len(num_blocks) > 0, (num_blocks, windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_releases = 0  # rises whenever blocks may have become available
        self._key_seed = key_seed
        self._groups = tuple(
            _Group(number, window, make_policy()) for number, window in zip(num_blocks, windows, strict=True)
        )

    # ------------------------------------------------------------------ requests

    def open(self, salt: str) -> SequenceBlocks:
        """A sequence without blocks. Sequences share blocks only within one salt."""
        return SequenceBlocks(len(self._groups), KeyChain(self._key_seed, salt))

    def match(self, sequence: SequenceBlocks, token_ids: Sequence[int]) -> int:
        """Leading full blocks of `token_ids` that every group has; never all tokens, the last one is computed."""
        if not self.enable_prefix_caching:
            return 0
        limit = (len(token_ids) - 1) // BLOCK_SIZE
        keys = sequence.chain.keys
        if len(keys) < limit:
            sequence.chain.extend(token_ids, limit * BLOCK_SIZE)
        for group in self._groups:
            limit = group.index.match_length(keys, limit)
        return limit

    def allocate(self, sequence: SequenceBlocks, token_ids: Sequence[int], *, num_spare_blocks: int = 0) -> int | None:
        """Give an empty sequence the blocks of all its tokens, shared ones where the index has them.

        Returns how many leading tokens need no computing. None, and nothing has changed, if that would leave less
        than `num_spare_blocks` available in some group.
        """
        assert not sequence.num_blocks, "allocate() for a sequence that has blocks"
        num_blocks = blocks_for(len(token_ids))
        num_shared = self.match(sequence, token_ids)
        keys = sequence.chain.keys[:num_shared]
        num_new = num_blocks - num_shared
        for group in self._groups:
            num_needed = num_new + num_spare_blocks
            if num_needed > group.pool.num_available:
                return None
            # A shared block that nobody else uses is no longer there to be evicted.
            num_needed += self._count_idle(group, keys)
            if num_needed > group.pool.num_available:
                return None
        for group, table in zip(self._groups, sequence.tables, strict=True):
            table.extend([group.share(key) for key in keys])
            table.extend([group.take() for _ in range(num_new)])
        self._count_hits(keys)
        sequence.num_published = num_shared
        sequence.forget_views()
        return num_shared * BLOCK_SIZE

    def append(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Let the tables cover `num_tokens` tokens. False, and nothing has changed, if a group lacks the blocks."""
        if num_tokens <= len(sequence.tables[0]) * BLOCK_SIZE:
            return True
        num_new = blocks_for(num_tokens) - sequence.num_blocks
        if any(num_new > group.pool.num_available for group in self._groups):
            return False
        for group, table in zip(self._groups, sequence.tables, strict=True):
            table.extend([group.take() for _ in range(num_new)])
        sequence.forget_views()
        return True

    def publish(self, sequence: SequenceBlocks, token_ids: Sequence[int], num_tokens: int) -> list[PhysicalBlock]:
        """Make the full blocks among the first `num_tokens` tokens shareable.

        To be called when the step that computed token `num_tokens - 1` is committed. Where another block is known
        under the same key, the sequence goes over to that one. The blocks it had instead are returned and
        still referenced: the caller hands them to `release` as soon as no step in flight reads them.
        """
        num_full = num_tokens // BLOCK_SIZE
        replaced: list[PhysicalBlock] = []
        if not self.enable_prefix_caching or num_full <= sequence.num_published:
            return replaced
        sequence.chain.extend(token_ids, num_tokens)
        keys = sequence.chain.keys
        for group_id, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            for number in range(sequence.num_published, num_full):
                key = keys[number]
                if group.index.find(key) is None:
                    group.index.insert(table[number], key, keys[number - 1] if number else None)
                else:
                    replaced.append((group_id, table[number]))
                    table[number] = group.share(key)
        sequence.num_published = num_full
        if replaced:
            sequence.forget_views()
        return replaced

    def release(self, blocks: Iterable[PhysicalBlock]) -> None:
        """Give up the references that `publish` returned."""
        for group_id, block_id in blocks:
            self._groups[group_id].release(block_id)
        self.num_releases += 1

    def free(self, sequence: SequenceBlocks) -> None:
        """Give up all blocks of a sequence, from the end: what is indexed stays cached, leaves leave first."""
        for group, table in zip(self._groups, sequence.tables, strict=True):
            for block_id in reversed(table):
                group.release(block_id)
            table.clear()
        sequence.num_published = 0
        sequence.forget_views()
        self.num_releases += 1

    def reset(self) -> int:
        """Drop every cached block; blocks in use stay. Returns how many were dropped, over all groups."""
        num_dropped = 0
        for group in self._groups:
            while group.pool.num_cached:
                group.evict()
                num_dropped += 1
        return num_dropped

    @staticmethod
    def _count_idle(group: _Group, keys: Sequence[bytes]) -> int:
        """How many blocks under `keys` nobody references. They are the last ones of the chain."""
        num_idle = 0
        for key in reversed(keys):
            block = group.index.find(key)
            assert block is not None
            if group.pool.references(block.block_id):
                break
            num_idle += 1
        return num_idle

    def _count_hits(self, keys: Sequence[bytes]) -> None:
        for group in self._groups:
            for key in keys:
                block = group.index.find(key)
                assert block is not None
                block.num_hits += 1

    # ------------------------------------------------------------------ numbers

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence can have in the cache when it is alone."""
        return min(group.pool.num_blocks for group in self._groups) * BLOCK_SIZE

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group, as are the next three numbers; `gauges` has all groups."""
        return self._groups[0].pool.num_blocks

    @property
    def num_blocks_active(self) -> int:
        return self._groups[0].pool.num_active

    @property
    def num_blocks_cached(self) -> int:
        return self._groups[0].pool.num_cached

    @property
    def num_blocks_free(self) -> int:
        return self._groups[0].pool.num_free

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that had to give way, over all groups, since the start."""
        return sum(group.num_evicted for group in self._groups)

    def gauges(self) -> tuple[PoolGauges, ...]:
        return tuple(
            PoolGauges(
                group_id,
                group.window,
                group.pool.num_blocks,
                group.pool.num_active,
                group.pool.num_cached,
                group.pool.num_free,
            )
            for group_id, group in enumerate(self._groups)
        )
