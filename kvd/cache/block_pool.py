"""The blocks of one layer group: who is free, active or cached, and how many references an active block has.

Owner: the engine thread, through `CacheManager`. Every operation is O(1).

    free     content is worthless; any block may be taken
    active   one or more references: a request's table, or a step in flight, names the block
    cached   no reference, but its content is indexed under a key and may be shared again

    free ──take──► active ──release──► free      (content not indexed)
                     │ ▲
             release │ │ retain                  (content indexed)
                     ▼ │
                   cached ──drop──► free

Ownership: the pool owns states and counts and nothing else. Which blocks have a key is known to the prefix
index, in which order cached blocks leave is known to the eviction policy; `CacheManager` keeps the three in
step. Invariant: free + active + cached = num_blocks, and a block has references exactly when it is active.
"""

from __future__ import annotations

from typing import Literal

BlockState = Literal["free", "active", "cached"]

FREE, CACHED, ACTIVE, SHARED = range(4)
"""Entries of `BlockPool.states`; shared is active with more than one reference."""


class BlockPool:
    """Counts references to the physical blocks 0 … num_blocks - 1 of one layer group."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.num_cached = 0
        self._references = [0] * num_blocks
        self.states = bytearray(num_blocks)  # read by others, never written
        # The lowest ids are handed out first, so that a lightly used pool touches little memory.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can become active: the free ones, and the cached ones after eviction."""
        return len(self._free) + self.num_cached

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def state(self, block_id: int) -> BlockState:
        """The state of one block."""
        if self._references[block_id]:
            return "active"
        return "cached" if self.states[block_id] == CACHED else "free"

    def free_block_ids(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self) -> int:
        """free → active with one reference. The caller has made sure that a block is free."""
        assert self._free, "take() from a pool without a free block"
        block_id = self._free.pop()
        assert not self._references[block_id], f"block {block_id} was free and had references"
        self._references[block_id] = 1
        self.states[block_id] = ACTIVE
        return block_id

    def retain(self, block_id: int) -> bool:
        """One more reference to a block that holds something; True when it was cached until now."""
        was_cached = self.states[block_id] == CACHED
        if was_cached:
            self.states[block_id] = ACTIVE
            self.num_cached -= 1
        else:
            self.states[block_id] = SHARED
            assert self._references[block_id], f"block {block_id} is free: nothing in it to share"
        self._references[block_id] += 1
        return was_cached

    def release(self, block_id: int, *, is_indexed: bool) -> bool:
        """One reference less; True when it was the last, and the block is now cached (if indexed) or free."""
        references = self._references[block_id] - 1
        assert references >= 0, f"block {block_id} was released more often than it was taken"
        self._references[block_id] = references
        if references:
            if references == 1:
                self.states[block_id] = ACTIVE
            return False
        if is_indexed:
            self.states[block_id] = CACHED
            self.num_cached += 1
        else:
            self.states[block_id] = FREE
            self._free.append(block_id)
        return True

    def drop(self, block_id: int) -> None:
        """cached → free. The caller removes its key in the same breath."""
        assert self.states[block_id] == CACHED, f"block {block_id} is not cached: somebody uses it, or nobody knows it"
        self.states[block_id] = FREE
        self.num_cached -= 1
        self._free.append(block_id)
