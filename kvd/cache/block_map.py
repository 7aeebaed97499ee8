"""What the blocks of a layer group are, summed up so that a screen can show them all.

`copy_blocks` is for the engine thread and takes as long as copying some bytes per block; `draw_map` may run anywhere
afterwards.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from kvd.cache.block_pool import ACTIVE, CACHED, FREE, SHARED
from kvd.cache.manager import CacheManager
from kvd.insight import BlockMap, MapCell

_NO_BLOCK = 255
"""State of what fills up the last cell."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """One group at one moment: per block its state (of `block_pool`), its owner, and when it was used last."""

    group_id: int
    num_groups: int
    now: float
    states: bytes
    owners: bytes
    used: bytes  # doubles
    pinned: array[int]  # block ids
    names: tuple[str, ...]


def copy_blocks(cache: CacheManager, group_id: int) -> BlockCopies:
    """The engine thread. The group must exist."""
    group, ledger = cache.groups[group_id], cache.ledger
    ledger.tick()
    return BlockCopies(
        group_id, cache.num_groups, ledger.now, bytes(group.pool.states), bytes(group.records.owner),
        group.records.used.tobytes(), cache.chains.pinned_blocks(group_id), tuple(ledger.owners.names),
    )  # fmt: skip


def draw_map(copies: BlockCopies, max_cells: int) -> BlockMap:
    """At most `max_cells` cells. Owners that have no blocks are listed too, so that numbers stay what they were."""
    import numpy as np  # where it is needed: whoever imports the cache does without

    num_blocks, num_names = len(copies.states), len(copies.names)
    per_cell = -(-num_blocks // max(1, max_cells))
    num_cells = -(-num_blocks // per_cell)

    def cells_of(values: bytes, kind: Any, filler: float) -> Any:
        padded = np.full(num_cells * per_cell, filler, dtype=kind)
        padded[:num_blocks] = np.frombuffer(values, dtype=kind)
        return padded.reshape(num_cells, per_cell)

    states = cells_of(copies.states, np.uint8, _NO_BLOCK)
    is_cached, is_shared = states == CACHED, states == SHARED
    num_cached = is_cached.sum(axis=1)
    num_shared = is_shared.sum(axis=1)
    num_active = (states == ACTIVE).sum(axis=1) + num_shared
    pinned = np.bincount(np.array(copies.pinned, dtype=np.int64) // per_cell, minlength=num_cells)
    is_taken = is_cached | is_shared | (states == ACTIVE)
    owners = cells_of(copies.owners, np.uint8, 0)
    places = np.arange(num_cells)[:, None] * num_names + owners
    by_owner = np.bincount(places[is_taken], minlength=num_cells * num_names).reshape(num_cells, num_names)
    owner = np.where(num_cached + num_active > 0, by_owner.argmax(axis=1), -1)
    # The unused ones sort behind; of an even number of times the earlier one of the two in the middle.
    times = np.sort(np.where(is_cached, cells_of(copies.used, np.float64, 0.0), np.inf), axis=1)
    middle = times[np.arange(num_cells), np.maximum(num_cached - 1, 0) // 2]
    idle = np.where(num_cached > 0, np.maximum(0.0, copies.now - middle), 0.0)
    columns = ((states == FREE).sum(axis=1), num_cached, num_active, num_shared, pinned, owner, idle)
    return BlockMap(
        copies.group_id, copies.num_groups, num_blocks, per_cell, copies.names, tuple(by_owner.sum(axis=0).tolist()),
        tuple(map(MapCell, *[column.tolist() for column in columns])),
    )  # fmt: skip
