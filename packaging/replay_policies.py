"""Eviction policies that the default is compared with. All of them are made leaf-first, as the cache manager needs it.

Each keeps its own order and evicts the first block in it that is a leaf. Queues that a paper moves blocks through when
they reach the head are moved through when a leaf reaches it; a block with cached children waits where it stands.
A FIFO order is that of the first release and survives further uses of the block. Plain FIFO, made leaf-first, is LRU
where every request that hits a leaf extends it, as on these traces: a leaf has then been released only once.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvd.cache.eviction import Clock, LeafOrder, Place
from kvd.cache.prefix_index import IndexedBlock


class MovingOrder(LeafOrder):
    """A `LeafOrder` whose cached blocks change places."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.counts = [0] * self.num_segments

    def add(self, block: IndexedBlock) -> None:
        super().add(block)
        self.counts[self._blocks[block.block_id].segment] += 1

    def discard(self, block: IndexedBlock) -> None:
        self.counts[self._blocks[block.block_id].segment] -= 1
        super().discard(block)

    def move(self, block: IndexedBlock, segment: int, rank: float) -> None:
        """Put a cached block behind all that have the same or a lower rank in `segment`."""
        self.counts[self._blocks[block.block_id].segment] -= 1
        self.counts[segment] += 1
        self._num_additions += 1
        place = Place(rank, self._num_additions, segment, block)
        self._blocks[block.block_id] = place
        if not block.num_children:
            self._push(place)


class SegmentedLru(MovingOrder):
    """SLRU: what was hit is in the protected segment, 80% at most; its oldest go back to the young end of the other."""

    num_segments = 2

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._protected: OrderedDict[int, IndexedBlock] = OrderedDict()

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        return int(block.num_hits > 0), 0.0

    def add(self, block: IndexedBlock) -> None:
        super().add(block)
        if self._blocks[block.block_id].segment:
            self._protected[block.block_id] = block
        while len(self._protected) > 0.8 * len(self._blocks):
            _, oldest = self._protected.popitem(last=False)
            self.move(oldest, 0, 0.0)

    def discard(self, block: IndexedBlock) -> None:
        self._protected.pop(block.block_id, None)
        super().discard(block)


class S3Fifo(MovingOrder):
    """Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.

    A small queue of 10% for new blocks, a main queue, and the keys of as many blocks that left the small queue as are
    cached: a block whose key is among them goes to the main queue at once. At the head of the small queue, what was
    hit twice or more moves to the main queue; at the head of the main queue, what was hit (up to 3 times
    counts) goes round again for one hit less.
    """

    num_segments = 2
    SMALL, MAIN = 0, 1

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._queues: dict[bytes, tuple[int, int]] = {}  # queue and number of those who are alive
        self._num_spent: dict[bytes, int] = {}  # hits that no longer count
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._numbers = itertools.count()
        self._chosen: IndexedBlock | None = None

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        if block.key not in self._queues:
            is_known = block.key in self._ghosts
            self._ghosts.pop(block.key, None)
            self._queues[block.key] = (self.MAIN if is_known else self.SMALL), next(self._numbers)
            self._num_spent[block.key] = block.num_hits
        return self._queues[block.key]

    def segments(self) -> Sequence[int]:
        is_small_full = self.counts[self.SMALL] >= 0.1 * len(self._blocks)
        return (self.SMALL, self.MAIN) if is_small_full else (self.MAIN, self.SMALL)

    def choose(self) -> IndexedBlock:
        while True:
            block = super().choose()
            key = block.key
            num_hits = min(block.num_hits - self._num_spent[key], 3)
            if self._queues[key][0] == self.SMALL and num_hits > 1:
                self._num_spent[key] = block.num_hits
            elif self._queues[key][0] == self.MAIN and num_hits > 0:
                self._num_spent[key] = block.num_hits - num_hits + 1
            else:
                self._chosen = block
                return block
            self._queues[key] = self.MAIN, next(self._numbers)
            self.move(block, *self._queues[key])

    def discard(self, block: IndexedBlock) -> None:
        if block is self._chosen:
            queue, _ = self._queues.pop(block.key)
            del self._num_spent[block.key]
            if queue == self.SMALL:
                self._ghosts[block.key] = None
                while len(self._ghosts) > len(self._blocks):
                    self._ghosts.popitem(last=False)
        super().discard(block)


class FarthestNextUse(LeafOrder):
    """Knows the future: the leaf that is needed last goes first (Belady). What a policy could reach, about."""

    def __init__(self, clock: Clock, next_use: Callable[[bytes], float]) -> None:
        super().__init__(clock)
        self._next_use = next_use

    def place(self, block: IndexedBlock) -> tuple[int, float]:
        return 0, -self._next_use(block.key)
