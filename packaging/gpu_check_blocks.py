"""Blocks that were saved to RAM and restored are the same bytes; and how fast that goes."""

from __future__ import annotations

import random

import torch
from gpu_check_world import Line, World

from kvd.cache.store import allocate_arena, allocate_cache, restore_blocks, save_blocks
from kvd.core import BlockTransfer
from kvd_kernels.kv_format import LayerFormat, build_kv_format

BLOCKS, DRY_BLOCKS = 512, 12


@torch.inference_mode()
def run(world: World) -> list[Line]:
    """Saves in shuffled order, overwrites the pool, restores to other places, compares every byte."""
    shape, ops = world.shape, world.ops
    layer = LayerFormat(shape.kv_heads, shape.head_dim, "int8", "int8", rotated=True)
    kv_format = build_kv_format([(0, layer)] * shape.layers)
    count = DRY_BLOCKS if world.is_dry else BLOCKS
    cache = allocate_cache(kv_format, count, ops.device)
    pool = cache.pools[0]
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8, device=pool.device))
    original = pool.clone().cpu()
    arena = allocate_arena(kv_format, count, ops)
    order = random.Random(0)
    slots, targets = order.sample(range(count), count), order.sample(range(count), count)
    saved = [BlockTransfer(0, block, slots[block]) for block in range(count)]
    save_seconds = sum(transfer.seconds() for transfer in save_blocks(ops, cache, arena, saved))
    in_ram = torch.equal(arena.slots[0][torch.tensor(slots)], original)
    pool.zero_()
    restored = [BlockTransfer(0, targets[block], slots[block]) for block in range(count)]
    restore_seconds = sum(transfer.seconds() for transfer in restore_blocks(ops, cache, arena, restored))
    found = pool.cpu()[torch.tensor(targets)]
    ops.copy_block(cache, 0, targets[0], targets[1], 16)
    is_copied = torch.equal(pool[targets[1]].cpu(), original[0])
    return [
        _check("blocks in RAM are the bytes of the pool", in_ram),
        _check("restored blocks are the bytes that were saved", torch.equal(found, original)),
        _check("a copied block is its source", is_copied),
        _rate("saving to RAM", original.nbytes, save_seconds),
        _rate("restoring from RAM", original.nbytes, restore_seconds),
    ]


def _check(name: str, holds: bool) -> Line:
    return Line("blocks", name, "ok" if holds else "FAILED", is_failure=not holds)


def _rate(name: str, num_bytes: int, seconds: float) -> Line:
    rate = num_bytes / max(seconds, 1e-9)
    return Line("blocks", name, f"{rate / 1e9:.1f} GB/s", "", rate, "B/s")
