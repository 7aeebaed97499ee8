"""In which order cached blocks leave. The one file to change for another order; `cache_eviction` names the order.

Owner: the engine thread, through `CacheManager`, which tells a policy about every block that becomes cached (no
reference, content indexed) or stops being cached, and asks for a victim when a free block is needed.

Contract of `choose`: the victim is a leaf, a block with `num_children == 0`; evicting it never cuts off a cached
continuation. There always is one while anything is cached: whoever references a block references the
blocks before it too, so the children of a cached block are cached themselves. A kept block (`kept_until` lies ahead)
is a victim only when every leaf is kept.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvd.cache.prefix_index import IndexedBlock

Clock = Callable[[], float]
"""Monotonic seconds; `kept_until` is compared with it."""


class EvictionPolicy(Protocol):
    """The order of the cached blocks of one layer group."""

    def add(self, block: IndexedBlock) -> None:
        """The last reference went: the block is cached now, and was used until this moment.

        A block comes after its children. Its `kept_until` does not change while it is cached.
        """
        ...

    def discard(self, block: IndexedBlock) -> None:
        """The block is not cached any more: it is used again, or was dropped."""
        ...

    def choose(self) -> IndexedBlock:
        """The leaf to evict next. Called only while something is cached; changes nothing.

        Evicting is `discard` of the block that was chosen last; nothing tells the policy that its parent has
        become a leaf by that.
        """
        ...


MIN_STALE_ENTRIES = 64
"""So many stale entries are tolerated however few blocks there are."""

PROTECTED_HITS = 1
"""A block that was used again this often is protected: one hit, that is the second use."""
PROTECTED_SHARE = 0.4
"""Most cached blocks, as a share, that protection can hold against new ones."""
COST_DOUBLES_AT_DEPTH = 2048
"""Blocks before a block at which attention costs as much as all the rest: 32K tokens, about right for 7B parameters.

With P parameters a token costs 2·P operations, and 4 · layers · attention width more for each token before it.
"""


class Place(NamedTuple):
    """Where a block stands while it is cached. Compares by rank, then by the number of its addition."""

    rank: float
    number: int
    segment: int
    block: IndexedBlock


class LeafOrder:
    """Cached blocks in one or more segments, each of which gives up its leaf of the lowest rank first.

    A subclass says where a block belongs, and which segment is to give way. Among equal ranks the block that was added
    first leaves first. Only leaves are in the heaps, so a chain that is released or used again costs one entry,
    whatever its length. Entries of blocks that are no longer cached, or no longer leaves, stay until they come to the
    top, or until there are more of them than cached blocks. Every operation is O(log n) amortised.
    """

    num_segments = 1

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._blocks: dict[int, Place] = {}
        self._leaves: list[list[Place]] = [[] for _ in range(self.num_segments)]
        # Leaves that were kept when last looked at; the first is the one whose time ends first.
        self._kept: list[tuple[float, Place]] = []
        # Parents of blocks that left. Whether they are leaves shows only after the index has removed the block.
        self._parents: dict[int, IndexedBlock] = {}
        self._num_additions = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        """Segment and rank of a block that is being added. Called once per addition, children before parents."""
        raise NotImplementedError

    def segments(self) -> Sequence[int]:
        """The segments in the order in which they have to give way now; all of them."""
        return range(self.num_segments)

    def add(self, block: IndexedBlock) -> None:
        self._num_additions += 1
        segment, rank = self.place(block)
        place = Place(rank, self._num_additions, segment, block)
        self._blocks[block.block_id] = place
        if not block.num_children:
            self._push(place)

    def discard(self, block: IndexedBlock) -> None:
        del self._blocks[block.block_id]
        parent = block.parent
        if parent is not None and self._is_cached(parent):
            self._parents[parent.block_id] = parent

    def choose(self) -> IndexedBlock:
        for parent in self._parents.values():
            if self._is_cached(parent) and not parent.num_children:
                self._push(self._blocks[parent.block_id])
        self._parents.clear()
        now = self._clock()
        while self._kept and self._kept[0][0] <= now:
            self._push(heapq.heappop(self._kept)[1])
        for segment in self.segments():
            place = self._lowest(self._leaves[segment], now)
            if place is not None:
                return place.block
        while not self._is_current(self._kept[0][1]):
            heapq.heappop(self._kept)
        return self._kept[0][1].block

    def _lowest(self, leaves: list[Place], now: float) -> Place | None:
        """The first place of a heap that is a leaf's and not kept; what is in front of it goes where it belongs."""
        while leaves:
            place = leaves[0]
            if self._is_current(place):
                if place.block.kept_until <= now:
                    return place
                heapq.heappush(self._kept, (place.block.kept_until, place))
            heapq.heappop(leaves)
        return None

    def _is_cached(self, block: IndexedBlock) -> bool:
        place = self._blocks.get(block.block_id)
        return place is not None and place.block is block

    def _is_current(self, place: Place) -> bool:
        block = place.block
        return not block.num_children and self._blocks.get(block.block_id) is place

    def _push(self, place: Place) -> None:
        if sum(map(len, self._leaves)) + len(self._kept) > 2 * len(self._blocks) + MIN_STALE_ENTRIES:
            self._rebuild()
        heapq.heappush(self._leaves[place.segment], place)

    def _rebuild(self) -> None:
        """Heaps without stale entries: as many pushes have passed since the last time as there are blocks."""
        self._kept.clear()
        for leaves in self._leaves:
            leaves.clear()
        for place in self._blocks.values():
            if not place.block.num_children:
                self._leaves[place.segment].append(place)
        for leaves in self._leaves:
            heapq.heapify(leaves)


class LeastRecentlyUsed(LeafOrder):
    """The leaf that was released longest ago goes first."""

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        return 0, 0.0


class ReuseValue(LeafOrder):
    """The leaf that is worth least goes first: chance of reuse × cost of recomputing it. Blocks have equal bytes.

    Chance of reuse: a block that was hit is likelier to be hit again than one that never was, and within either kind
    the more recently used one is. Never-hit blocks give way first, so a scan cannot flush a shared prefix; but when
    hit ones are more than `PROTECTED_SHARE` of the cached blocks, those give way, so that hot blocks that have gone
    stale leave and new ones have time to be hit.

    Cost: a block's tokens attend to all that lies before them. Where recomputing costs twice as much a block stays for
    one more turnover of the cache: age counts blocks that were cached anew, and a bonus sets it off.

    Two segments are those of SLRU (Karedla, Love and Wherry, "Caching strategies to improve disk system performance",
    1994), but nothing moves between them while it is cached, so that a chain stays whole.
    """

    num_segments = 2

    def __init__(self, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._num_protected = 0
        self._num_new = 0

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        segment = int(block.num_hits >= PROTECTED_HITS)
        self._num_protected += segment
        self._num_new += 1 - segment
        return segment, self._num_new + len(self._blocks) * (block.depth / COST_DOUBLES_AT_DEPTH)

    def segments(self) -> Sequence[int]:
        return (1, 0) if self._num_protected > PROTECTED_SHARE * len(self._blocks) else (0, 1)

    def discard(self, block: IndexedBlock) -> None:
        self._num_protected -= self._blocks[block.block_id].segment
        super().discard(block)


POLICIES: dict[str, Callable[[Clock], EvictionPolicy]] = {"value": ReuseValue, "lru": LeastRecentlyUsed}
"""By the name that `cache_eviction` has for it; the first is the default."""
