"""Which block is in which slot of the RAM tier. Owner: the engine thread, through `CacheManager`.

A slot is free, held or idle. It is held while a step plan, the slow tier or a request that waits for it depends on its
content, and by a request that was swapped out; held slots are never given to anybody else. Idle slots hold blocks
that may be wanted again; the one that was wanted longest ago gives way. The number of slots is fixed, so the tier never
takes more memory than it was given.

A slot is `ready` from the moment at which the save that fills it is planned: plans are run in order, so whoever plans a
restore later reads what was saved. One that the slow tier fills is ready when it says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvd.cache.prefix_index import MAX_CANDIDATES


@dataclass(slots=True, eq=False)
class RamBlock:
    """What one slot holds. A block without a key belongs to the request that was swapped out into it."""

    group_id: int
    slot: int
    key: bytes | None
    parent_key: bytes
    token_ids: tuple[int, ...]
    holds: int = 1
    is_ready: bool = False
    has_failed: bool = False
    is_withdrawn: bool = False  # nobody is to find it any more, though some still hold it
    is_landed: bool = False  # the bytes are there: the save was run, or the load has ended


class RamTier:
    """The slots of every layer group. `num_slots` of a group may be 0: then nothing of it is kept."""

    def __init__(self, num_slots: Sequence[int]) -> None:
        self.num_slots = tuple(num_slots)
        self.num_evicted = 0
        self._free = [list(range(number - 1, -1, -1)) for number in num_slots]
        self._blocks: list[dict[int, RamBlock]] = [{} for _ in num_slots]
        self._by_key: list[dict[bytes, RamBlock]] = [{} for _ in num_slots]
        self._idle: list[OrderedDict[int, RamBlock]] = [OrderedDict() for _ in num_slots]
        self._continuations: dict[tuple[int, bytes, int], dict[bytes, RamBlock]] = {}

    def find(self, group_id: int, key: bytes) -> RamBlock | None:
        """The block under a key; it may still be on its way."""
        return self._by_key[group_id].get(key)

    def continuations(self, group_id: int, parent_key: bytes, first_token: int) -> Sequence[RamBlock]:
        """The latest blocks that continue a chain with a token, the latest first."""
        alike = self._continuations.get((group_id, parent_key, first_token), {})
        return list(islice(reversed(alike.values()), MAX_CANDIDATES))

    def forget_if_idle(self, block: RamBlock) -> None:
        """Give the slot of a block up that nobody will want; not while somebody holds it."""
        if not block.holds:
            self._forget(block)

    def at(self, group_id: int, slot: int) -> RamBlock:
        return self._blocks[group_id][slot]

    def take(
        self, group_id: int, key: bytes | None, parent_key: bytes = b"", token_ids: tuple[int, ...] = ()
    ) -> RamBlock | None:
        """A slot for a block, held once; None when all are held. The key must not be there yet."""
        free = self._free[group_id]
        if not free:
            idle = self._idle[group_id]
            if not idle:
                return None
            self._forget(next(iter(idle.values())))
            self.num_evicted += 1
        block = RamBlock(group_id, free.pop(), key, parent_key, token_ids)
        self._blocks[group_id][block.slot] = block
        if key is not None:
            assert key not in self._by_key[group_id], "the key is in a slot already"
            self._by_key[group_id][key] = block
            self._continuations.setdefault((group_id, parent_key, token_ids[0]), {})[key] = block
        return block

    def hold(self, block: RamBlock) -> None:
        if not block.holds:
            del self._idle[block.group_id][block.slot]
        block.holds += 1

    def release(self, block: RamBlock) -> None:
        """One hold less. With the last, a block with a key becomes idle, the latest of all; another is forgotten."""
        assert block.holds > 0, "a slot was released more often than it was held"
        block.holds -= 1
        if block.holds:
            return
        if block.key is None or block.has_failed or block.is_withdrawn or not block.is_ready:
            self._forget(block)
        else:
            self._idle[block.group_id][block.slot] = block

    def fail(self, block: RamBlock) -> None:
        """What the slot holds is not to be used. Nobody finds it any more; the slot is free when nobody holds it."""
        block.has_failed = True
        self._unlink(block)
        if not block.holds:
            self._forget(block)

    def withdraw(self, block: RamBlock) -> None:
        """Nobody is to find a block any more; those that hold it may go on, and the slot is free after them."""
        block.is_withdrawn = True
        self._unlink(block)
        if not block.holds:
            self._forget(block)

    def reset(self) -> int:
        """Forget all idle blocks; returns how many."""
        idle = [block for group in self._idle for block in group.values()]
        for block in idle:
            self._forget(block)
        return len(idle)

    def num_used(self, group_id: int) -> int:
        return len(self._blocks[group_id])

    def num_available(self, group_id: int) -> int:
        """Slots that can be taken now."""
        return len(self._free[group_id]) + len(self._idle[group_id])

    def _unlink(self, block: RamBlock) -> None:
        if block.key is None or self._by_key[block.group_id].get(block.key) is not block:
            return
        del self._by_key[block.group_id][block.key]
        place = (block.group_id, block.parent_key, block.token_ids[0])
        del self._continuations[place][block.key]
        if not self._continuations[place]:
            del self._continuations[place]

    def _forget(self, block: RamBlock) -> None:
        self._unlink(block)
        self._idle[block.group_id].pop(block.slot, None)
        del self._blocks[block.group_id][block.slot]
        self._free[block.group_id].append(block.slot)
