"""A named session on disk: the blocks of one token sequence in one file, in the order in which they are to be restored.

    header   magic 8 | version u32 | number of groups u32 | block bytes u64 per group | key seed digest 16 | checksum 16
    block    b"BLOK" | group id u32 | key 16 | parent key 16 | token ids 16 × u32 | data digest 16 | checksum 16 | data
    end      b"DONE" | number of blocks u64 | blake2b-128 over the checksums of header and blocks, in order

Integers are little-endian; digests and checksums of blocks are those of `kvd.cache.disk_blocks`. Neither salt nor key
seed is in the file: the seed is compared by its digest, and the keys are hashes that the salt went into.

Any thread may read and write; blocks pass one at a time, so that a session may be larger than memory. A reader believes
nothing that it has not checked: the header must be the one that this server would write, lengths are its own, and the
key of a block must follow from its parent key and its tokens. Nothing is unpickled. A checksum proves that a file is
undamaged, not who wrote it: restore files that you trust.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from kvd.cache.disk_blocks import (
    HASH_BYTES,
    TOKEN_BYTES,
    BlockHead,
    StoredBlock,
    checksum_of,
    digest_of,
    pack_token_ids,
    unpack_token_ids,
    verified_head,
)
from kvd.errors import KvdError

SessionBlock = StoredBlock

_MAGIC = b"kvdsess\n"
_VERSION = 1
_MAX_GROUPS = 1024
_FIXED = struct.Struct("<8sII")
_BLOCK = struct.Struct(f"<I{HASH_BYTES}s{HASH_BYTES}s{TOKEN_BYTES}s{HASH_BYTES}s{HASH_BYTES}s")
_BLOCK_MARK, _END_MARK = b"BLOK", b"DONE"
_END = struct.Struct(f"<Q{HASH_BYTES}s")


class SessionFileError(KvdError):
    """A session cannot be written or read: damaged, of another model or format, or refused by the system."""


def write_session(
    path: str | os.PathLike[str], key_seed: bytes, block_bytes: Sequence[int], blocks: Iterable[SessionBlock]
) -> int:
    """Write a session, in place of an older file of that name only when it is complete; returns the number of blocks.

    key_seed     what the keys of the blocks are seeded with
    block_bytes  bytes of a block of each layer group

    The file has mode 0600. Raises SessionFileError when the system refuses; what `blocks` raises passes through. Either
    way the older file is untouched.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                num_blocks = _write(file, key_seed, block_bytes, blocks)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise SessionFileError(f"the session {path} cannot be written: {error.strerror or error}") from None
    return num_blocks


def read_session(path: str | os.PathLike[str], key_seed: bytes, block_bytes: Sequence[int]) -> Iterator[SessionBlock]:
    """The blocks of a session, each one checked before it is yielded.

    Raises SessionFileError at the first `next` for a file of another model or format, and as soon as damage is met:
    blocks that were yielded before are intact. A session is complete only when the iterator ends.
    """
    path = Path(path)
    try:
        # Without O_NONBLOCK a named pipe would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SessionFileError(f"the session {path} is not a plain file")
            yield from _read(file, path, key_seed, block_bytes)
    except OSError as error:
        raise SessionFileError(f"the session {path} cannot be read: {error.strerror or error}") from None


def _seed_digest(key_seed: bytes) -> bytes:
    return blake2b(key_seed, digest_size=HASH_BYTES, person=b"kvd session").digest()


def _hash(content: bytes) -> bytes:
    return blake2b(content, digest_size=HASH_BYTES, person=b"kvd session").digest()


def _follows(head: BlockHead) -> bool:
    """Whether a key is that of its parent and tokens: the formula of `kvd.cache.prefix_index`."""
    return blake2b(head.parent_key + head.token_bytes, digest_size=HASH_BYTES).digest() == head.key


def _header(key_seed: bytes, block_bytes: Sequence[int]) -> bytes:
    fixed = _FIXED.pack(_MAGIC, _VERSION, len(block_bytes)) + struct.pack(f"<{len(block_bytes)}Q", *block_bytes)
    header = fixed + _seed_digest(key_seed)
    return header + _hash(header)


def _write(file: BinaryIO, key_seed: bytes, block_bytes: Sequence[int], blocks: Iterable[SessionBlock]) -> int:
    header = _header(key_seed, block_bytes)
    file.write(header)
    total = blake2b(header[-HASH_BYTES:], digest_size=HASH_BYTES)
    num_blocks = 0
    for block in blocks:
        assert len(block.data) == block_bytes[block.group_id], f"a block of group {block.group_id} has another length"
        head = BlockHead(block.group_id, block.key, block.parent_key, pack_token_ids(block.token_ids))
        assert _follows(head), "a key that does not follow from its parent's and its tokens"
        digest = digest_of(block.data)
        checksum = checksum_of(head, digest)
        file.write(_BLOCK_MARK + _BLOCK.pack(*head, digest, checksum))
        file.write(block.data)
        total.update(checksum)
        num_blocks += 1
    file.write(_END_MARK + _END.pack(num_blocks, total.digest()))
    return num_blocks


def _read(file: BinaryIO, path: Path, key_seed: bytes, block_bytes: Sequence[int]) -> Iterator[SessionBlock]:
    damaged = SessionFileError(f"the session {path} is damaged")

    def take(num_bytes: int) -> bytes:
        content = file.read(num_bytes)
        if len(content) != num_bytes:
            raise SessionFileError(f"the session {path} is incomplete")
        return content

    header = _checked_header(take, path, key_seed, block_bytes)
    total = blake2b(header[-HASH_BYTES:], digest_size=HASH_BYTES)
    num_blocks = 0
    while (mark := take(len(_BLOCK_MARK))) == _BLOCK_MARK:
        group_id, key, parent_key, token_bytes, digest, checksum = _BLOCK.unpack(take(_BLOCK.size))
        head = verified_head(group_id, key, parent_key, token_bytes, digest, checksum)
        if head is None or head.group_id >= len(block_bytes) or not _follows(head):
            raise damaged
        data = take(block_bytes[head.group_id])
        if digest_of(data) != digest:
            raise damaged
        total.update(checksum)
        num_blocks += 1
        yield SessionBlock(head.group_id, head.key, head.parent_key, unpack_token_ids(head.token_bytes), data)
    if mark != _END_MARK or _END.unpack(take(_END.size)) != (num_blocks, total.digest()) or file.read(1):
        raise damaged


def _checked_header(take: Callable[[int], bytes], path: Path, key_seed: bytes, block_bytes: Sequence[int]) -> bytes:
    """Read the header; returns it when it is exactly what this server would write."""
    fixed = take(_FIXED.size)
    magic, version, num_groups = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise SessionFileError(f"{path} is not a session of kvd")
    if version != _VERSION:
        raise SessionFileError(f"the session {path} has format {version}, this kvd reads {_VERSION}")
    if num_groups > _MAX_GROUPS:
        raise SessionFileError(f"the session {path} is damaged")
    header = fixed + take(8 * num_groups + 2 * HASH_BYTES)
    if _hash(header[:-HASH_BYTES]) != header[-HASH_BYTES:]:
        raise SessionFileError(f"the session {path} is damaged")
    if header != _header(key_seed, block_bytes):
        raise SessionFileError(f"the session {path} was saved with another model or KV cache format")
    return header


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
