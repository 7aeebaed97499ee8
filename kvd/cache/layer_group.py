"""Pool, index and eviction policy of one layer group, kept in step. Owner: the engine thread, through `CacheManager`.

Invariants: an indexed block is active or cached, never free; a cached one is always indexed and known to the policy;
`num_children` of an indexed block counts its children that are cached. Owner and times of its blocks are noted in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.cache.block_pool import CACHED, BlockPool
from kvd.cache.eviction import EvictionPolicy
from kvd.cache.ledger import OTHERS, EvictionReason, Ledger
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

    __slots__ = ("index", "ledger", "max_cached", "policy", "pool", "records", "window")

    def __init__(
        self, num_blocks: int, window: int, policy: EvictionPolicy, max_cached: int | None, ledger: Ledger
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(is_flat=window > 0)
        self.policy = policy
        self.window = window
        self.max_cached = num_blocks if max_cached is None else max_cached
        self.ledger = ledger
        self.records = ledger.open(num_blocks)

    @property
    def lead(self) -> int:
        """Blocks that a windowed group holds ahead of the first token to compute when a sequence starts."""
        return -(-self.window // BLOCK_SIZE) + 1

    def first_seen(self, position: int) -> int:
        """Number of the first block that a query at `position`, or any after it, sees."""
        return max(0, position - self.window + 1) // BLOCK_SIZE if self.window else 0

    def take(self, owner: int = OTHERS) -> int:
        """A block with one reference; evicts a cached one when none is free. owner: who is going to fill it."""
        if not self.pool.num_free:
            self.evict("capacity", owner)
        block_id = self.pool.take()
        self.records.owner[block_id] = owner
        return block_id

    def evict(self, reason: EvictionReason, evicted_for: int = OTHERS) -> None:
        """Turn the cached leaf that the policy names into a free block."""
        self._free_cached(self.policy.choose(), reason, evicted_for)

    def index_block(self, block_id: int, key: bytes, parent_key: bytes, depth: int, token_ids: tuple[int, ...]) -> None:
        """Make an active block known: it was filled just now."""
        self.index.insert(block_id, key, parent_key, depth, token_ids)
        self.records.filled[block_id] = self.ledger.now

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
        if not self.pool.release(block_id, is_indexed=block is not None):
            return
        if block is None:
            self.records.owner[block_id] = OTHERS
            return
        self.records.used[block_id] = self.ledger.now
        if block.parent is not None:
            block.parent.num_children += 1
        self.policy.add(block)
        while self.pool.num_cached > self.max_cached:
            self.evict("cap")

    def drop_cached(self) -> int:
        """Free every cached block; how many. In no order: nobody has to be asked whose turn it is."""
        cached = [block for block in self.index if self.pool.state(block.block_id) == "cached"]
        for block in cached:
            self._free_cached(block, "reset")
        return len(cached)

    def drop_cached_leaf(self, block: IndexedBlock) -> bool:
        """Free a cached block that no cached block continues; False where it is something else."""
        if self.pool.state(block.block_id) != "cached" or block.num_children:
            return False
        self._free_cached(block, "dropped")
        return True

    def _free_cached(self, block: IndexedBlock, reason: EvictionReason, evicted_for: int = OTHERS) -> None:
        self.ledger.evicted(self.records, block.block_id, block.key, reason, evicted_for)
        self._forget(block)

    def _forget(self, block: IndexedBlock) -> None:
        self._uncache(block)
        self.index.remove(block)
        self.pool.drop(block.block_id)
        self.records.owner[block.block_id] = OTHERS

    def drop_tails(self, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        """Free the cached incomplete blocks that hold a beginning of these tokens: they say nothing more."""
        for block in self.index.continuations(parent_key, token_ids[0]):
            if is_beginning(block.token_ids, token_ids) and self.pool.state(block.block_id) == "cached":
                self._forget(block)

    def keep(self, block: IndexedBlock, until: float) -> None:
        """Let a block be evicted before `until` only when nothing else is left."""
        is_cached = self.pool.state(block.block_id) == "cached"
        if is_cached:
            self.policy.discard(block)
        block.kept_until = max(block.kept_until, until)
        if is_cached:
            self.policy.add(block)

    def note_hits(self, blocks: Sequence[IndexedBlock]) -> None:
        """For the reuse gaps: the blocks of a chain, in order, were found."""
        if not blocks:
            return
        self.index.ends.was_hit(blocks[-1])
        # A chain is mostly used as a whole, so there are few different times.
        now, states, used = self.ledger.now, self.pool.states, self.records.used
        times: dict[float, int] = {}
        for block in blocks:
            block_id = block.block_id
            time = used[block_id] if states[block_id] == CACHED else now
            times[time] = times.get(time, 0) + 1
        self.ledger.hit(times)

    def last_used(self, block: IndexedBlock) -> float:
        """When an indexed block was used last: now, if it is in use."""
        block_id = block.block_id
        return self.ledger.now if self.pool.references(block_id) else self.records.used[block_id]

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
