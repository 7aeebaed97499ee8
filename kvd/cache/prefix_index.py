"""Which block holds which tokens: chained 128-bit keys, and the blocks that are known under them.

Owner: the engine thread, through `CacheManager`; hashing alone may also run elsewhere.

    root  = blake2b-128(length of key_seed | key_seed | salt)
    key i = blake2b-128(key i-1 | 16 token ids, 4 bytes each, little-endian)

    tail  = blake2b-128(key of the block before | n token ids), n < 16: the last, incomplete block of a sequence

A key thus stands for everything that can change a byte of a block: all tokens before it, the salt, and
through `key_seed` the weights, the layout of the block and the arithmetic that filled it. It is the same in
every process. Where blocks of several layer groups meet in one place, the group id is added to it.

Whoever looks a chain up goes from its root and stops at the first key that is missing. So a block whose parent has
gone is out of reach until the parent is published again, and never wrong.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from kvd.cache.chain_ends import ChainEnds
from kvd.core import BLOCK_SIZE

KEY_BYTES = 16
MAX_CANDIDATES = 32
"""Blocks that are compared token by token when a partial hit is looked for: the latest ones."""

_PACK = struct.Struct(f"<{BLOCK_SIZE}I").pack
_PACKED_BYTES = 4 * BLOCK_SIZE
_PACKED_TYPE = next(code for code in "IL" if array(code).itemsize == 4)


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
        first, end = len(keys) * BLOCK_SIZE, num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if first >= end:
            return
        key = keys[-1] if keys else self.root
        if end - first == BLOCK_SIZE:
            keys.append(blake2b(key + _PACK(*token_ids[first:end]), digest_size=KEY_BYTES).digest())
            return
        packed = _pack(token_ids[first:end])
        for at in range(0, len(packed), _PACKED_BYTES):
            key = blake2b(key + packed[at : at + _PACKED_BYTES], digest_size=KEY_BYTES).digest()
            keys.append(key)

    def parent_key(self, number: int) -> bytes:
        """The key before block `number`: that of the block before it, or the root."""
        return self.keys[number - 1] if number else self.root


def tail_key(parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of an incomplete block. Being shorter, what is hashed is never that of a whole one."""
    return blake2b(parent_key + _pack(token_ids), digest_size=KEY_BYTES).digest()


def _pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers."""
    words = array(_PACKED_TYPE, token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


@dataclass(slots=True, eq=False)
class IndexedBlock:
    """A block under its key, with what an eviction policy may want to know.

    parent        the block before it; None for the first of a chain, where it is not indexed, and in windowed groups
    depth         blocks before it
    token_ids     its tokens: 16, or fewer in the last block of a sequence that has ended
    num_children  blocks behind it that are cached: it is a leaf when there are none
    num_hits      how often a request found it instead of computing it
    kept_until    time (of the manager's clock) before which it is evicted only when nothing else is left
    """

    block_id: int
    key: bytes
    parent: IndexedBlock | None
    depth: int
    token_ids: tuple[int, ...] = ()
    parent_key: bytes = b""
    num_children: int = 0
    num_hits: int = 0
    kept_until: float = 0.0

    @property
    def is_whole(self) -> bool:
        return len(self.token_ids) == BLOCK_SIZE


class PrefixIndex:
    """The indexed blocks of one layer group, by key, by block id, and by what they continue.

    is_flat: blocks are kept apart from their parents, because the group gives up the front of a chain first.
    """

    def __init__(self, *, is_flat: bool = False) -> None:
        self.is_flat = is_flat
        self._by_key: dict[bytes, IndexedBlock] = {}
        self.ends = ChainEnds(self._by_key.get)
        self._by_block: dict[int, IndexedBlock] = {}
        # By parent key, then first token; the latest last. Dictionaries, since a beginning may have thousands.
        self._continuations: dict[bytes, dict[int, dict[bytes, IndexedBlock]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[IndexedBlock]:
        return iter(self._by_key.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def find(self, key: bytes) -> IndexedBlock | None:
        return self._by_key.get(key)

    def of_key(self, key: bytes) -> IndexedBlock:
        """The block under a key that is known; KeyError would be a bug of ours."""
        return self._by_key[key]

    def of_block(self, block_id: int) -> IndexedBlock | None:
        return self._by_block.get(block_id)

    def match_length(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` keys are known, counted from the start without a gap."""
        by_key = self._by_key
        for number in range(limit):
            if keys[number] not in by_key:
                return number
        return limit

    def guess_length(self, keys: Sequence[bytes]) -> int:
        """`match_length` of all keys by bisection: right as long as no chain lost a block in its middle."""
        by_key = self._by_key
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in by_key:
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, block_id: int, key: bytes, parent_key: bytes, depth: int, token_ids: tuple[int, ...]) -> None:
        """Make `block_id` known under `key`. `parent_key` is the chain's root for the first block."""
        assert key not in self._by_key, "the key is taken: use the block that has it"
        assert block_id not in self._by_block, f"block {block_id} has a key already"
        parent = None if self.is_flat else self._by_key.get(parent_key)
        block = IndexedBlock(block_id, key, parent, depth, token_ids, parent_key)
        self._by_key[key] = block
        self._by_block[block_id] = block
        self._continuations.setdefault(parent_key, {}).setdefault(token_ids[0], {})[key] = block
        if block.is_whole:
            self.ends.inserted(block)

    def remove(self, block: IndexedBlock) -> None:
        del self._by_key[block.key]
        del self._by_block[block.block_id]
        behind = self._continuations[block.parent_key]
        alike = behind[block.token_ids[0]]
        del alike[block.key]
        if not alike:
            del behind[block.token_ids[0]]
            if not behind:
                del self._continuations[block.parent_key]
        if block.is_whole:
            self.ends.removed(block)

    def continuations(self, parent_key: bytes, first_token: int) -> Sequence[IndexedBlock]:
        """The latest blocks that continue a chain with a token, the latest first."""
        alike = self._continuations.get(parent_key, {}).get(first_token, {})
        return list(islice(reversed(alike.values()), MAX_CANDIDATES))

    def all_continuations(self, parent_key: bytes) -> list[IndexedBlock]:
        """Every block that continues a chain, whole or not."""
        behind = self._continuations.get(parent_key, {})
        return [block for alike in behind.values() for block in alike.values()]


def is_beginning(token_ids: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether a block's tokens are a beginning of others, and fewer: then it says nothing that the others do not."""
    return len(token_ids) < len(of) and token_ids == of[: len(token_ids)]


def common_length(token_ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Leading tokens that both have in common."""
    length = 0
    for ours, theirs in zip(token_ids, wanted, strict=False):
        if ours != theirs:
            break
        length += 1
    return length
