"""The tensors of the KV cache and of its RAM tier. The only file of this room that knows torch.

Owned by the engine thread, apart from arena slots that it has handed to somebody else. The store neither allocates
nor frees blocks or slots: the manager says which one means what, ops read and write the bytes, and the store holds
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvd.core import BlockTransfer
from kvd_kernels.kv_format import KVFormat
from kvd_kernels.ops import KVCache, Ops, Transfer


def allocate_cache(kv_format: KVFormat, num_blocks: int, device: torch.device) -> KVCache:
    """A pool of `num_blocks` blocks per layer group, contents undefined.

    On the CPU the operating system hands out pages when a block is first written, so an idle server's resident
    memory grows with use, up to the budget that was printed at start.
    """
    pools = tuple(
        torch.empty((num_blocks, group.block_bytes), dtype=torch.uint8, device=device) for group in kv_format.groups
    )
    return KVCache(kv_format, pools)


class Arena:
    """The RAM tier's memory: per layer group uint8 [num_slots, block_bytes] in host memory, contents undefined.

    The engine thread alone runs saves and restores; another thread may use a slot through `memory` for as long as the
    manager holds that slot for it.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.slots = tuple(slots)
        self._bytes = tuple(group.view(-1).numpy().data for group in slots)

    def memory(self, group_id: int, slot: int) -> memoryview:
        """The bytes of one slot, writable, without a copy."""
        num_slots, block_bytes = self.slots[group_id].shape
        assert 0 <= slot < num_slots
        return self._bytes[group_id][slot * block_bytes : (slot + 1) * block_bytes]


def allocate_arena(kv_format: KVFormat, num_slots: int | Sequence[int], ops: Ops) -> Arena:
    """Memory of the RAM tier beside a cache of `ops`.

    num_slots: of every group, or one number for each. Pageable memory is handed out as slots are first written; that of
    a GPU's backend is pinned, and taken at once.
    """
    groups = kv_format.groups
    counts = [num_slots] * len(groups) if isinstance(num_slots, int) else list(num_slots)
    return Arena([
        ops.allocate_host(count, group.block_bytes) for group, count in zip(groups, counts, strict=True)
    ])  # fmt: skip


def save_blocks(ops: Ops, cache: KVCache, arena: Arena, transfers: Sequence[BlockTransfer]) -> list[Transfer]:
    """Copy whole blocks of the pools to slots of the arena; what there is to wait for before the slots are read."""
    return [
        ops.copy_rows(cache.pools[group_id], block_ids, arena.slots[group_id], slots)
        for group_id, (block_ids, slots) in _by_group(transfers).items()
    ]


def restore_blocks(ops: Ops, cache: KVCache, arena: Arena, transfers: Sequence[BlockTransfer]) -> list[Transfer]:
    """Copy slots of the arena to whole blocks of the pools; what there is to wait for before the slots are reused."""
    return [
        ops.copy_rows(arena.slots[group_id], slots, cache.pools[group_id], block_ids)
        for group_id, (block_ids, slots) in _by_group(transfers).items()
    ]


def read_block(cache: KVCache, group_id: int, block_id: int) -> bytes:
    """The bytes of one block, as a file keeps them."""
    return cache.pools[group_id][block_id].cpu().numpy().tobytes()


def write_block(cache: KVCache, group_id: int, block_id: int, data: bytes | memoryview) -> None:
    """Fill one block with bytes that `read_block` gave for a block of the same layout."""
    block = cache.pools[group_id][block_id]
    assert len(data) == block.numel(), f"{len(data)} bytes for a block of {block.numel()}"
    block.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _by_group(transfers: Sequence[BlockTransfer]) -> dict[int, tuple[list[int], list[int]]]:
    """Per layer group the block ids and the slots of its transfers, in their order."""
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for group_id, block_id, slot in transfers:
        block_ids, slots = groups.setdefault(group_id, ([], []))
        block_ids.append(block_id)
        slots.append(slot)
    return groups
