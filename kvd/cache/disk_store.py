"""The block file of the disk tier: KV blocks by (group, key) that survive a restart and a kill at any moment.

The file is an SQLite database in WAL mode with the blocks as BLOBs: transactions keep names, tokens and bytes together,
blocks of several models and formats lie side by side, free space is reused, and two processes may share the file.
LMDB is as safe but one more native dependency, and it reads through a memory map, where a truncated file ends the
process with SIGBUS (SQLite's own mmap is off for that reason); one file per block needs a directory entry and an
fsync each, and an index all the same; an index plus a file of slots would write each byte once instead of twice, but
need size classes, slot recovery and a locking protocol of our own. `docs/cache-files.md` has the measured rates.

Owner: one thread at a time per `DiskStore`; several stores, in one process or in many, may have the same folder open.

Invariants
  - Block file, write-ahead log and shared index stay within `size_bytes`: the number of pages is limited by SQLite, and
    the log by never beginning a transaction that might not fit what is reserved for it.
  - What `read_into` copies out matches its checksum under exactly the name that was asked for.
  - A block with children in the file is not evicted before them.
  - The file can always be thrown away. When it is damaged or was written by something else, it is, and the log says so.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from kvd.cache import disk_schema
from kvd.cache.disk_blocks import (
    BlockHead,
    StoredBlock,
    checksum_of,
    digest_of,
    pack_token_ids,
    unpack_token_ids,
    verified_head,
)
from kvd.cache.disk_folder import DiskFolder, DiskStoreError
from kvd.cache.disk_schema import PAGE_BYTES

SMALLEST_SIZE_BYTES = 16 << 20
_LARGEST_LOG_BYTES = 64 << 20
_SHARED_INDEX_BYTES = 64 << 10
_SPARE_PAGES = 8
"""Pages that an insertion may need besides those of its blocks: splits in the trees of the indexes."""
_PAGES_PER_BLOCK = 5
"""Pages that may change per block of a transaction besides its data: in the indexes, and where one is evicted."""
_HEADS_PER_READ = 512
_MOST_HITS_THAT_COUNT = 4

BlockName = tuple[int, bytes]
"""(group id, key)"""


class PutResult(NamedTuple):
    """What `put_many` did: the first `num_stored` blocks are in the file. `error` says in one line why not all."""

    num_stored: int
    evicted: list[BlockName]
    error: str | None


def smallest_size(block_bytes: int) -> int:
    """The smallest `size_bytes` of a store that takes blocks of `block_bytes`."""
    return max(SMALLEST_SIZE_BYTES, 8 * _transaction_bytes(block_bytes))


def _pages_of(num_bytes: int) -> int:
    return -(-num_bytes // (PAGE_BYTES - 4)) + 1


def _transaction_bytes(block_bytes: int) -> int:
    """Upper bound of what one block adds to the write-ahead log."""
    return (_pages_of(block_bytes) + _PAGES_PER_BLOCK) * PAGE_BYTES


class DiskStore:
    """The block file in a folder. Opening makes or recreates it where needed.

    folder      the prepared folder
    size_bytes  the most that block file and side files may take together
    log         gets one line when the file had to be recreated

    All methods raise DiskStoreError when the file cannot be used now (busy, disk full, I/O error). When the file was
    replaced by somebody else, the next call goes on with the new one.
    """

    def __init__(self, folder: DiskFolder, size_bytes: int, log: Callable[[str], None]) -> None:
        assert size_bytes >= SMALLEST_SIZE_BYTES, size_bytes
        self._folder = folder
        self._log = log
        self._log_bytes = min(_LARGEST_LOG_BYTES, size_bytes // 4)
        self.num_damaged = 0  # blocks that did not match their checksum
        self._max_pages = (size_bytes - self._log_bytes - _SHARED_INDEX_BYTES) // PAGE_BYTES
        self._open()

    # ------------------------------------------------------------------ blocks

    def put_many(self, blocks: Sequence[StoredBlock]) -> PutResult:
        """Store blocks in order, evicting others where room is needed; those that are there already count as stored."""
        evicted: list[BlockName] = []
        num_stored = 0
        digests = [digest_of(block.data) for block in blocks]
        while num_stored < len(blocks):
            count = self._fitting(blocks[num_stored:])
            if not count:
                return PutResult(num_stored, evicted, "disk_cache.size is too small for blocks of this size")
            chunk = slice(num_stored, num_stored + count)
            gone: list[BlockName] = []
            try:
                with self._guarded(), self._transaction():
                    self._insert(blocks[chunk], digests[chunk], gone)
            except DiskStoreError as error:
                return PutResult(num_stored, evicted, str(error))
            num_stored += count
            evicted += gone
        return PutResult(num_stored, evicted, None)

    def read_into(self, group_id: int, key: bytes, view: memoryview) -> bool:
        """Copy a block's bytes into `view`, which has exactly their length. False, with `view` as it was, on a miss.

        A row that is damaged or has another length is a miss too, and is deleted.
        """
        with self._guarded():
            row = self._connection.execute(
                "SELECT id, parent_key, token_ids, data_digest, checksum, data FROM block LEFT JOIN payload USING (id) "
                "WHERE group_id = ? AND key = ?",
                (group_id, key),
            ).fetchone()
        if row is None:
            return False
        row_id, parent_key, token_bytes, data_digest, checksum, data = row
        head = verified_head(group_id, key, parent_key, token_bytes, data_digest, checksum)
        if head is None or not isinstance(data, bytes) or len(data) != view.nbytes or digest_of(data) != data_digest:
            self._delete_damaged(row_id)
            return False
        view[:] = data
        return True

    def read_some(self, limit: int) -> int:
        """Read and hash a few blocks, whatever they are, for the sake of timing it; returns their bytes."""
        with self._guarded():
            rows = self._connection.execute("SELECT data FROM payload ORDER BY id LIMIT ?", (limit,)).fetchall()
        blocks = [data for (data,) in rows if isinstance(data, bytes)]
        for data in blocks:
            digest_of(data)
        return sum(map(len, blocks))

    def contains(self, group_id: int, key: bytes) -> bool:
        """Whether there is a row for a block; whether it is intact shows when it is read."""
        with self._guarded():
            row = self._connection.execute("SELECT 1 FROM block WHERE group_id = ? AND key = ?", (group_id, key))
            return row.fetchone() is not None

    def children(self, group_id: int, parent_key: bytes, limit: int) -> list[tuple[bytes, tuple[int, ...]]]:
        """(key, token ids) of at most `limit` blocks that follow a block, the most valuable first."""
        found = []
        with self._guarded():
            rows = self._connection.execute(
                "SELECT key, token_ids, data_digest, checksum FROM block WHERE group_id = ? AND parent_key = ? "
                "ORDER BY value DESC LIMIT ?",
                (group_id, parent_key, limit),
            ).fetchall()
        for key, token_bytes, data_digest, checksum in rows:
            head = verified_head(group_id, key, parent_key, token_bytes, data_digest, checksum)
            if head is not None:
                found.append((head.key, unpack_token_ids(head.token_bytes)))
        return found

    def heads(self) -> Iterator[list[BlockHead]]:
        """All intact heads, a few hundred at a time; the file is not held between two lists."""
        last_id = -1
        while True:
            with self._guarded():
                rows = self._connection.execute(
                    "SELECT id, group_id, key, parent_key, token_ids, data_digest, checksum FROM block "
                    "WHERE id > ? ORDER BY id LIMIT ?",
                    (last_id, _HEADS_PER_READ),
                ).fetchall()
            if not rows:
                return
            last_id = rows[-1][0]
            heads = (verified_head(*row[1:]) for row in rows)
            yield [head for head in heads if head is not None]

    def keys(self) -> Iterator[BlockName]:
        """(group id, key) of all intact heads."""
        for heads in self.heads():
            yield from ((head.group_id, head.key) for head in heads)

    def touch(self, names: Collection[BlockName]) -> None:
        """Blocks were of use: they stay for longer."""
        if not names:
            return
        with self._guarded(), self._transaction():
            clock, worth = self._clock(), self._hit_worth()
            self._connection.executemany(
                "UPDATE block SET hits = hits + 1, last_used = ?, value = ? + min(hits + 1, ?) * ? "
                "WHERE group_id = ? AND key = ?",
                [(clock, clock, _MOST_HITS_THAT_COUNT, worth, group_id, key) for group_id, key in names],
            )

    def remove(self, names: Collection[BlockName]) -> None:
        """Delete blocks; those that are not there are passed over."""
        with self._guarded(), self._transaction():
            rows = "SELECT id FROM block WHERE group_id = ? AND key = ?"
            self._connection.executemany(f"DELETE FROM payload WHERE id IN ({rows})", names)
            self._connection.executemany("DELETE FROM block WHERE group_id = ? AND key = ?", names)

    def reset(self) -> int:
        """Forget everything, in all processes that use the folder; returns the number of blocks."""
        num_blocks = self.num_blocks
        self._replace()
        return num_blocks

    def close(self) -> None:
        """Close the file. The last one to close it clears the write-ahead log away."""
        self._is_open = False
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    @property
    def num_blocks(self) -> int:
        with self._guarded():
            return int(self._connection.execute("SELECT count(*) FROM block").fetchone()[0])

    @property
    def num_bytes(self) -> int:
        """Bytes that block file and side files take."""
        return self._folder.num_bytes()

    # ------------------------------------------------------------------ writing

    def _fitting(self, blocks: Sequence[StoredBlock]) -> int:
        """How many of the first blocks go into one transaction."""
        total = 0
        for number, block in enumerate(blocks):
            total += _transaction_bytes(len(block.data))
            if total > self._log_bytes // (2 if number == 0 else 4):
                return number
        return len(blocks)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """One write transaction that is sure to fit the write-ahead log: half of it may be used when it begins."""
        if self._folder.wal_bytes() > self._log_bytes // 2:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.execute("BEGIN IMMEDIATE")
        # Another process may have written in between; while the transaction is open nobody can.
        if self._folder.wal_bytes() > self._log_bytes // 2:
            self._connection.execute("ROLLBACK")
            raise DiskStoreError("the write-ahead log could not be emptied", is_busy=True)
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            raise

    def _insert(self, blocks: Sequence[StoredBlock], digests: Sequence[bytes], evicted: list[BlockName]) -> None:
        num_pages = sum(_pages_of(len(block.data)) for block in blocks)
        evicted += self._make_room(num_pages, {(block.group_id, block.parent_key) for block in blocks})
        for block, digest in zip(blocks, digests, strict=True):
            head = BlockHead(block.group_id, block.key, block.parent_key, pack_token_ids(block.token_ids))
            row = self._connection.execute(
                "INSERT INTO block (group_id, key, parent_key, token_ids, data_digest, checksum, hits, last_used, "
                "value) VALUES (?, ?, ?, ?, ?, ?, 0, 0, 0) ON CONFLICT (group_id, key) DO NOTHING",
                (*head, digest, checksum_of(head, digest)),
            )
            if row.rowcount == 1:
                # Time is counted in blocks that were ever stored, which is what the row's id is.
                self._connection.execute("UPDATE block SET last_used = id, value = id WHERE id = ?", (row.lastrowid,))
                self._connection.execute("INSERT INTO payload (id, data) VALUES (?, ?)", (row.lastrowid, block.data))

    def _make_room(self, num_pages: int, parents: Collection[BlockName]) -> list[BlockName]:
        """Delete the least valuable leaves until `num_pages` more fit; `parents` of what comes stay if possible."""
        goal = num_pages + _SPARE_PAGES
        evicted: list[BlockName] = []
        while self._num_available_pages() < goal:
            leaves = self._leaves(parents)
            if not leaves:
                break
            while leaves and self._num_available_pages() < goal:
                _, row_id, group_id, key, parent_key = heapq.heappop(leaves)
                self._connection.execute("DELETE FROM payload WHERE id = ?", (row_id,))
                self._connection.execute("DELETE FROM block WHERE id = ?", (row_id,))
                evicted.append((group_id, key))
                if (group_id, parent_key) not in parents:
                    parent = self._connection.execute(
                        f"{disk_schema.LEAVES} AND group_id = ? AND key = ?", (group_id, parent_key)
                    ).fetchone()
                    if parent is not None:
                        heapq.heappush(leaves, parent)
        return evicted

    def _leaves(self, parents: Collection[BlockName]) -> list[tuple[int, int, int, bytes, bytes]]:
        """A heap of (value, row id, group id, key, parent key): the least valuable blocks without children."""
        limit = 64 + len(parents)
        rows = self._connection.execute(f"{disk_schema.LEAVES} ORDER BY value LIMIT ?", (limit,)).fetchall()
        leaves = [row for row in rows if (row[2], row[3]) not in parents]
        if not leaves:
            # Only what is to be extended is left, or damaged rows that name each other as parents.
            leaves = self._connection.execute(f"{disk_schema.BLOCKS} ORDER BY value LIMIT 1").fetchall()
        heapq.heapify(leaves)
        return leaves

    def _num_available_pages(self) -> int:
        num_pages, num_free = self._pragma("page_count"), self._pragma("freelist_count")
        return self._max_pages - (num_pages - num_free)

    def _clock(self) -> int:
        """How many blocks were ever stored."""
        row = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'block'").fetchone()
        return 0 if row is None else int(row[0])

    def _hit_worth(self) -> int:
        """One hit keeps a block as long as storing a quarter of what the file holds takes."""
        return max(1, self.num_blocks // 4)

    def _delete_damaged(self, row_id: int) -> None:
        self.num_damaged += 1
        # A row that cannot be deleted now stays a miss, and is deleted when it is next asked for.
        with contextlib.suppress(DiskStoreError), self._guarded(), self._transaction():
            self._connection.execute("DELETE FROM payload WHERE id = ?", (row_id,))
            self._connection.execute("DELETE FROM block WHERE id = ?", (row_id,))

    # ------------------------------------------------------------------ the file

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _open(self) -> None:
        """Open the block file, a new one if need be."""
        try:
            with self._folder.lock():
                self._open_locked()
        except sqlite3.Error as error:
            raise DiskStoreError(f"{self._folder.database}: {error}", is_busy=disk_schema.is_busy(error)) from None
        except OSError as error:
            raise DiskStoreError(f"{self._folder.path}: {error.strerror or error}") from None

    def _open_locked(self) -> None:
        identity = self._folder.create()
        try:
            self._connection = disk_schema.connect(self._folder.database, self._max_pages)
        except (sqlite3.Error, disk_schema.UnusableFile) as error:
            if isinstance(error, sqlite3.Error) and not disk_schema.is_damage(error):
                raise
            self._log(f"{self._folder.database} cannot be used and is made anew: {error}")
            self._folder.remove()
            identity = self._folder.create()
            self._connection = disk_schema.connect(self._folder.database, self._max_pages)
        self._identity = identity
        self._is_open = True

    def _replace(self) -> None:
        """Throw the block file away, unless somebody has done so already, and begin a new one."""
        self.close()
        try:
            with self._folder.lock():
                if self._folder.identity() == self._identity:
                    self._folder.remove()
        except OSError as error:
            raise DiskStoreError(f"{self._folder.path}: {error.strerror or error}") from None
        self._open()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Follow a file that was replaced; turn errors into DiskStoreError, and begin a new file on damage."""
        try:
            if not self._is_open or self._folder.identity() != self._identity:
                self.close()
                self._open()
            yield
        except sqlite3.Error as error:
            if disk_schema.is_damage(error):
                self._log(f"{self._folder.database} is damaged and is made anew: {error}")
                self._replace()
            raise DiskStoreError(f"{self._folder.database}: {error}", is_busy=disk_schema.is_busy(error)) from None
        except OSError as error:
            raise DiskStoreError(f"{self._folder.path}: {os.strerror(error.errno or 0)}") from None
