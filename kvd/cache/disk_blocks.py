"""What a block is outside memory: its names, its bytes and the checksums that tie them together.

    data_digest = blake2b-128(data)
    checksum    = blake2b-128(format version | group id | key | parent key | token ids | data_digest)

All fields have a fixed length, integers are little-endian. The two stages let a reader judge names and tokens without
the bytes of the block. Any thread may call these functions; hashing the data releases the GIL.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from kvd.core import BLOCK_SIZE

FORMAT_VERSION = 1
"""Part of every checksum: raise it when the meaning of a stored field changes, and old files are misses."""

HASH_BYTES = 16
TOKEN_BYTES = 4 * BLOCK_SIZE

_TOKENS = struct.Struct(f"<{BLOCK_SIZE}I")
_HEAD = struct.Struct("<II")


class StoredBlock(NamedTuple):
    """One block of one layer group.

    group_id, key: its name; both keys are 16 bytes, `parent_key` is the chain's root key for the first block
    token_ids: its 16 tokens
    data: its bytes as the KV format lays them out
    """

    group_id: int
    key: bytes
    parent_key: bytes
    token_ids: tuple[int, ...]
    data: memoryview | bytes


class BlockHead(NamedTuple):
    """A stored block without its data. `token_bytes` are the token ids as stored."""

    group_id: int
    key: bytes
    parent_key: bytes
    token_bytes: bytes


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """16 token ids as 64 bytes: uint32, little-endian."""
    return _TOKENS.pack(*token_ids)


def unpack_token_ids(token_bytes: bytes) -> tuple[int, ...]:
    """The inverse of `pack_token_ids`."""
    return _TOKENS.unpack(token_bytes)


def digest_of(data: memoryview | bytes) -> bytes:
    """blake2b-128 of a block's bytes."""
    return blake2b(data, digest_size=HASH_BYTES, person=b"kvd block data").digest()


def checksum_of(head: BlockHead, data_digest: bytes) -> bytes:
    """blake2b-128 over everything that a stored block consists of."""
    fixed = _HEAD.pack(FORMAT_VERSION, head.group_id)
    content = fixed + head.key + head.parent_key + head.token_bytes + data_digest
    return blake2b(content, digest_size=HASH_BYTES, person=b"kvd block").digest()


def verified_head(
    group_id: object, key: object, parent_key: object, token_bytes: object, data_digest: object, checksum: object
) -> BlockHead | None:
    """The head of a stored block when its fields have the right types and lengths and match the checksum."""
    if not isinstance(group_id, int) or not 0 <= group_id < 1 << 32:
        return None
    if not (isinstance(key, bytes) and isinstance(parent_key, bytes) and isinstance(token_bytes, bytes)):
        return None
    if not (isinstance(data_digest, bytes) and isinstance(checksum, bytes)):
        return None
    lengths = len(key), len(parent_key), len(token_bytes), len(data_digest)
    if lengths != (HASH_BYTES, HASH_BYTES, TOKEN_BYTES, HASH_BYTES):
        return None
    head = BlockHead(group_id, key, parent_key, token_bytes)
    return head if checksum_of(head, data_digest) == checksum else None
