"""Measures what the disk tier's store does per second, checksums included, and the moves between pool and RAM tier.

    .venv/bin/python packaging/measure_disk.py [FOLDER]

FOLDER is where the blocks are written, a temporary folder unless given. Reads come from the page cache. Medians of
five rounds of 256 blocks, in MB/s, for blocks of 192,000 bytes (the default model's) and of 460,000.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvd.cache.disk_blocks import StoredBlock, digest_of
from kvd.cache.disk_folder import DiskFolder
from kvd.cache.disk_store import DiskStore
from kvd_kernels.registry import create_ops

NUM_BLOCKS, ROUNDS = 256, 5


def rate(num_bytes: int, action: Callable[[int], object]) -> str:
    """MB/s of an action that moves so many bytes in each round."""
    rates = []
    for number in range(ROUNDS):
        started = time.perf_counter()
        action(number)
        rates.append(num_bytes / (time.perf_counter() - started) / 1e6)
    return f"{statistics.median(rates):7.0f} MB/s   ({min(rates):.0f} to {max(rates):.0f})"


def measure_store(folder: Path, block_bytes: int) -> None:
    store = DiskStore(DiskFolder(folder, print), 4 << 30, print)
    data = [os.urandom(block_bytes) for _ in range(NUM_BLOCKS)]
    target = memoryview(bytearray(block_bytes))
    total = NUM_BLOCKS * block_bytes

    def key(number: int, index: int) -> bytes:
        return (number * NUM_BLOCKS + index).to_bytes(16, "little")

    def write(number: int) -> None:
        for first in range(0, NUM_BLOCKS, 32):
            some = range(first, first + 32)
            store.put_many(
                [StoredBlock(0, key(number, each), b"p" * 16, tuple(range(16)), data[each]) for each in some]
            )

    def read(number: int) -> None:
        for index in range(NUM_BLOCKS):
            assert store.read_into(0, key(number, index), target)

    print(f"{block_bytes} bytes, written in transactions of 32 {rate(total, write)}")
    print(f"{block_bytes} bytes, read and checked             {rate(total, read)}")
    print(
        f"{block_bytes} bytes, hashed alone                 {rate(total, lambda _: [digest_of(each) for each in data])}"
    )
    store.close()


def measure_moves(block_bytes: int) -> None:
    ops = create_ops("cpu")
    pool = torch.zeros((NUM_BLOCKS, block_bytes), dtype=torch.uint8)
    slots = torch.zeros((NUM_BLOCKS, block_bytes), dtype=torch.uint8)
    order = list(range(0, NUM_BLOCKS, 2)) + list(range(1, NUM_BLOCKS, 2))
    total = NUM_BLOCKS * block_bytes
    moves = rate(total, lambda _: ops.copy_rows(pool, order, slots, order))
    print(f"{block_bytes} bytes, pool to RAM                  {moves}")
    print(f"{block_bytes} bytes, one copy of them all         {rate(total, lambda _: slots.copy_(pool))}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        parent = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        for block_bytes in (192_000, 460_000):
            measure_store(parent / f"blocks-{block_bytes}", block_bytes)
            measure_moves(block_bytes)
