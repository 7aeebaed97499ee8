"""In which order cached blocks leave. The one file to change for another order.

Owner: the engine thread, through `CacheManager`, which tells a policy about every block that becomes cached (no
reference, content indexed) or stops being cached, and asks for a victim when a free block is needed.

Contract of `choose`: the victim is a leaf, a block with `num_children == 0`; evicting it never cuts off a cached
continuation. There always is one while anything is cached: whoever references a block references the
blocks before it too, so the children of a cached block are cached themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvd.cache.prefix_index import IndexedBlock


class EvictionPolicy(Protocol):
    """The order of the cached blocks of one layer group."""

    def add(self, block: IndexedBlock) -> None:
        """The last reference went: the block is cached now, and was used until this moment."""
        ...

    def discard(self, block: IndexedBlock) -> None:
        """The block is not cached any more: it is used again, or was dropped."""
        ...

    def choose(self) -> IndexedBlock:
        """The leaf to evict next. Called only while something is cached; changes nothing."""
        ...


class LeastRecentlyUsed:
    """The block that was released longest ago goes first.

    That is leaf-first by itself: tables are released from their end, and whoever uses a block uses the ones before
    it, so a parent is always released later than its children. O(1).
    """

    def __init__(self) -> None:
        # In order of release. A plain dict would scan the holes at its front on every choice.
        self._blocks: OrderedDict[int, IndexedBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: IndexedBlock) -> None:
        self._blocks[block.block_id] = block

    def discard(self, block: IndexedBlock) -> None:
        del self._blocks[block.block_id]

    def choose(self) -> IndexedBlock:
        return next(iter(self._blocks.values()))
