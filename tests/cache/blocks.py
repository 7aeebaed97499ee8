"""Blocks whose content follows from their key, so that whoever finds one can tell whether it is right."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path

from kvd.cache.disk_blocks import StoredBlock
from kvd.cache.disk_folder import DiskFolder, DiskStoreError
from kvd.cache.disk_store import DiskStore
from kvd.cache.prefix_index import KeyChain
from kvd.core import BLOCK_SIZE

SEED = b"weights and layout"


def data_of(group_id: int, key: bytes, num_bytes: int) -> bytes:
    """What the block under a key must hold."""
    return hashlib.shake_128(group_id.to_bytes(4, "little") + key).digest(num_bytes)


def chain(number: int, num_blocks: int, *, num_bytes: int = 5000, group_id: int = 0) -> list[StoredBlock]:
    """The blocks of one token sequence; `number` tells sequences apart."""
    token_ids = [number * 1000 + position for position in range(num_blocks * BLOCK_SIZE)]
    keys = KeyChain(SEED, "")
    keys.extend(token_ids, len(token_ids))
    parents = [keys.root, *keys.keys]
    return [
        StoredBlock(
            group_id,
            key,
            parents[place],
            tuple(token_ids[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]),
            data_of(group_id, key, num_bytes),
        )
        for place, key in enumerate(keys.keys)
    ]


def read(store: DiskStore, block: StoredBlock) -> bool:
    """Read a block; whether it is there. What is there must be right."""
    view = memoryview(bytearray(len(block.data)))
    if not store.read_into(block.group_id, block.key, view):
        assert not any(view), "a miss wrote into the slot"
        return False
    assert view == block.data, "the store returned other bytes"
    return True


def folder_bytes(path: Path) -> int:
    """Bytes of all files in a folder, as the file system has them."""
    return sum(entry.stat().st_size for entry in path.iterdir())


def fill(path: str, size_bytes: int, num_bytes: int, first: int, num_chains: int) -> None:
    """Write and read chains. Prints a line when the first one is in, and how many blocks were not stored at the end."""

    def complain(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    store = DiskStore(DiskFolder(path, complain), size_bytes, complain)
    num_left_out = 0
    for number in range(num_chains):
        blocks = chain(first + number, 8, num_bytes=num_bytes)
        num_left_out += len(blocks) - store.put_many(blocks).num_stored
        for block in blocks:
            read(store, block)
        with contextlib.suppress(DiskStoreError):
            store.touch([(block.group_id, block.key) for block in blocks[:2]])
        if not number:
            print("filling", flush=True)
    store.close()
    print(num_left_out, flush=True)


if __name__ == "__main__":
    fill(sys.argv[1], *map(int, sys.argv[2:]))
