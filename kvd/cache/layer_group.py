"""Pool, index and eviction policy of one layer group, kept in step. Owner: the engine thread, through `CacheManager`.

Invariants: an indexed block is active or cached, never free; a cached one is always indexed and known to the policy;
`num_children` of an indexed block counts its children that are cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.cache.block_pool import BlockPool
from kvd.cache.eviction import EvictionPolicy
from kvd.cache.prefix_index import IndexedBlock, PrefixIndex, is_beginning
from kvd.cache.ram_tier import RamTier
from kvd.core import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class PoolGauges:
    """How the blocks of one layer group are used at this moment."""

    group_id: int
    window: int
    num_blocks: int
    num_active: int
    num_cached: int
    num_free: int
    num_ram_slots: int = 0
    num_ram_used: int = 0


class LayerGroup:
    """Layers of equal span. window: tokens that a query sees, itself included; 0: all."""

    __slots__ = ("index", "max_cached", "num_evicted", "policy", "pool", "window")

    def __init__(self, num_blocks: int, window: int, policy: EvictionPolicy, max_cached: int | None) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(is_flat=window > 0)
        self.policy = policy
        self.window = window
        self.max_cached = num_blocks if max_cached is None else max_cached
        self.num_evicted = 0

    @property
    def lead(self) -> int:
        """Blocks that a windowed group holds ahead of the first token to compute when a sequence starts."""
        return -(-self.window // BLOCK_SIZE) + 1

    def first_seen(self, position: int) -> int:
        """Number of the first block that a query at `position`, or any after it, sees."""
        return max(0, position - self.window + 1) // BLOCK_SIZE if self.window else 0

    def take(self) -> int:
        """A block with one reference; evicts a cached one when none is free."""
        if not self.pool.num_free:
            self.evict()
            self.num_evicted += 1
        return self.pool.take()

    def evict(self) -> None:
        """Turn the cached leaf that the policy names into a free block."""
        self._free_cached(self.policy.choose())

    def share(self, key: bytes) -> int:
        """One more reference to the block under a known key."""
        block = self.index.of_key(key)
        self.share_block(block)
        return block.block_id

    def share_block(self, block: IndexedBlock) -> None:
        """One more reference to an indexed block."""
        if self.pool.retain(block.block_id):
            # `_uncache`, spelled out: a hit of 32K tokens comes by here 2,000 times.
            self.policy.discard(block)
            if block.parent is not None:
                block.parent.num_children -= 1

    def release(self, block_id: int) -> None:
        """One reference less; with the last, the block is cached if it is indexed, as far as the cap allows."""
        block = self.index.of_block(block_id)
        if self.pool.release(block_id, is_indexed=block is not None) and block is not None:
            if block.parent is not None:
                block.parent.num_children += 1
            self.policy.add(block)
            while self.pool.num_cached > self.max_cached:
                self.evict()
                self.num_evicted += 1

    def drop_cached(self) -> int:
        """Free every cached block; how many. In no order: nobody has to be asked whose turn it is."""
        cached = [block for block in self.index if self.pool.state(block.block_id) == "cached"]
        for block in cached:
            self._free_cached(block)
        return len(cached)

    def _free_cached(self, block: IndexedBlock) -> None:
        self._uncache(block)
        self.index.remove(block)
        self.pool.drop(block.block_id)

    def drop_tails(self, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        """Free the cached incomplete blocks that hold a beginning of these tokens: they say nothing more."""
        for block in self.index.continuations(parent_key, token_ids[0]):
            if is_beginning(block.token_ids, token_ids) and self.pool.state(block.block_id) == "cached":
                self._free_cached(block)

    def keep(self, block: IndexedBlock, until: float) -> None:
        """Let a block be evicted before `until` only when nothing else is left."""
        is_cached = self.pool.state(block.block_id) == "cached"
        if is_cached:
            self.policy.discard(block)
        block.kept_until = max(block.kept_until, until)
        if is_cached:
            self.policy.add(block)

    def gauges(self, group_id: int, ram: RamTier) -> PoolGauges:
        pool = self.pool
        return PoolGauges(
            group_id, self.window, pool.num_blocks, pool.num_active, pool.num_cached, pool.num_free,
            ram.num_slots[group_id], ram.num_used(group_id),
        )  # fmt: skip

    def _uncache(self, block: IndexedBlock) -> None:
        self.policy.discard(block)
        if block.parent is not None:
            block.parent.num_children -= 1
