"""Which block holds which tokens: chained 128-bit keys, and the blocks that are known under them.

Owner: the engine thread, through `CacheManager`; hashing alone may also run elsewhere.

    root  = blake2b-128(length of key_seed | key_seed | salt)
    key i = blake2b-128(key i-1 | 16 token ids, 4 bytes each, little-endian)

A key thus stands for everything that can change a byte of a block: all tokens before it, the salt, and
through `key_seed` the weights, the layout of the block and the arithmetic that filled it. It is the same in
every process. Where blocks of several layer groups meet in one place, the group id is to be added to it.

Invariant: the index is closed under prefixes. An indexed block's parent is indexed too, `num_children` counts
the indexed children, and only blocks without children are removed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvd.core import BLOCK_SIZE

KEY_BYTES = 16
_PACK = struct.Struct(f"<{BLOCK_SIZE}I").pack


def root_key(key_seed: bytes, salt: str) -> bytes:
    """The key before the first block. `salt` may be any text, also with lone surrogates."""
    text = len(key_seed).to_bytes(8, "little") + key_seed + salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=KEY_BYTES).digest()


class KeyChain:
    """The keys of the full blocks of one growing token sequence, hashed once each.

    Owned by whoever owns the sequence. Tokens are only ever appended; `keys[i]` belongs to the tokens
    16·i … 16·i + 15.
    """

    __slots__ = ("keys", "root")

    def __init__(self, key_seed: bytes, salt: str) -> None:
        self.root = root_key(key_seed, salt)
        self.keys: list[bytes] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Make `keys` cover the full blocks among the first `num_tokens` of `token_ids`."""
        keys = self.keys
        start = len(keys)
        key = keys[-1] if keys else self.root
        for first in range(start * BLOCK_SIZE, num_tokens - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = blake2b(key + _PACK(*token_ids[first : first + BLOCK_SIZE]), digest_size=KEY_BYTES).digest()
            keys.append(key)


@dataclass(slots=True, eq=False)
class IndexedBlock:
    """A block under its key, with what an eviction policy may want to know. `depth` counts blocks before it."""

    block_id: int
    key: bytes
    parent: IndexedBlock | None
    depth: int
    num_children: int = 0
    num_hits: int = 0  # how often a request found it instead of computing it
    kept_until: float = 0.0  # monotonic seconds before which it goes only when nothing else is left


class PrefixIndex:
    """The indexed blocks of one layer group, by key and by block id."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, IndexedBlock] = {}
        self._by_block: dict[int, IndexedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[IndexedBlock]:
        return iter(self._by_key.values())

    def find(self, key: bytes) -> IndexedBlock | None:
        return self._by_key.get(key)

    def of_block(self, block_id: int) -> IndexedBlock | None:
        return self._by_block.get(block_id)

    def match_length(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` keys are known, counted from the start without a gap."""
        by_key = self._by_key
        for number in range(limit):
            if keys[number] not in by_key:
                return number
        return limit

    def insert(self, block_id: int, key: bytes, parent_key: bytes | None) -> IndexedBlock:
        """Make `block_id` known under `key`; `parent_key` is None for the first block of a chain."""
        assert key not in self._by_key, "the key is taken: use the block that has it"
        assert block_id not in self._by_block, f"block {block_id} has a key already"
        parent = None
        depth = 0
        if parent_key is not None:
            parent = self._by_key[parent_key]
            parent.num_children += 1
            depth = parent.depth + 1
        block = IndexedBlock(block_id, key, parent, depth)
        self._by_key[key] = block
        self._by_block[block_id] = block
        return block

    def remove(self, block: IndexedBlock) -> None:
        """Forget a block on which no indexed block depends."""
        assert not block.num_children, f"block {block.block_id} still has children in the index"
        del self._by_key[block.key]
        del self._by_block[block.block_id]
        if block.parent is not None:
            block.parent.num_children -= 1
