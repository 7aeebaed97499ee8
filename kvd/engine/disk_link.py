"""The disk tier as the cache manager uses it: a `SlowTier` whose work is done by a reading and a writing thread.

Owner: the engine thread calls the methods of `SlowTier`, none of which waits for the disk. The two threads own one
`DiskStore` each, move bytes between the block file and the slots of the RAM tier, and leave answers for `poll`; then
they call `wake`. SQLite, hashing of blocks and all waiting run without the GIL; what holds it is the copy of a block
between SQLite's memory and a slot.

Invariants
  - Every `store` and `load` is answered exactly once, also when a queue is full, the disk is, or the tier is closed.
  - A slot's memory is touched only between the call and its answer.
  - Nothing that was stored, queued or read before a `reset` is found after it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvd.cache.disk_blocks import BlockHead, StoredBlock, pack_token_ids
from kvd.cache.disk_folder import DiskFolder, DiskStoreError
from kvd.cache.disk_index import DiskIndex
from kvd.cache.disk_store import DiskStore, smallest_size
from kvd.cache.tiers import SlowDone
from kvd.engine.disk_lane import DiskJob, Lane, RareLines, Rate
from kvd.errors import StartupError
from kvd.views import DiskFacts

_Result = TypeVar("_Result")

_MAX_QUEUED_STORES = 256
_MAX_QUEUED_LOADS = 1024
_BLOCKS_PER_BATCH = 32
_LINGER_SECONDS = 0.1
_IDLE_SECONDS = 1.0
_MAX_CHILDREN = 64
_SECONDS_BETWEEN_WARNINGS = 30.0
_NUM_MEASURED_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """Blocks since the start; `num_bytes` is what the files in the folder take now."""

    num_stored: int
    num_loaded: int
    num_failed: int  # not stored, or not read: I/O errors, a full disk, damage, evicted by another process
    num_evicted: int
    num_skipped: int  # not stored or not loaded because the queue was full
    num_blocks: int
    num_bytes: int


class DiskLink:
    """Blocks of this server in a folder.

    path, size_bytes  `disk_cache`
    block_bytes       bytes of a block of each layer group
    memory            (group id, slot) → the bytes of a slot of the RAM tier, writable; called by the engine thread
    wake              called from any thread when `poll` has something
    log               one line per call, from any thread

    Raises StartupError when the folder cannot be used or is too small for a block.
    """

    def __init__(
        self,
        path: str,
        size_bytes: int,
        block_bytes: Sequence[int],
        *,
        memory: Callable[[int, int], memoryview],
        wake: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        needed = smallest_size(max(block_bytes))
        if size_bytes < needed:
            raise StartupError(f"disk_cache.size is too small for blocks of this model: at least {-(-needed >> 20)}MiB")
        self._max_bytes = size_bytes
        self._memory = memory
        self._wake = wake
        self._log = log
        self._folder = DiskFolder(path, log)
        try:
            self._writing_store = DiskStore(self._folder, size_bytes, log)
            self._reading_store = DiskStore(self._folder, size_bytes, log)
        except DiskStoreError as error:
            raise StartupError(f"disk_cache cannot be used: {error}") from None
        self._index = DiskIndex()
        self._first_epoch = self._index.epoch
        self._file_lock = threading.Lock()
        self._file = self._folder.identity()
        self._stores = Lane(_MAX_QUEUED_STORES)
        self._loads = Lane(_MAX_QUEUED_LOADS)
        self._done: deque[tuple[int, SlowDone]] = deque()  # with the epoch of the job
        self._touched: deque[tuple[int, bytes]] = deque(maxlen=_MAX_QUEUED_LOADS)
        self._dropped: deque[tuple[int, bytes]] = deque()  # to be deleted from the file
        self._dropped_late: deque[tuple[int, bytes]] = deque()  # likewise, as soon as the stores at hand are done
        self._reset_wanted = threading.Event()
        self._deadline = float("inf")
        self._read_rate, self._write_rate = Rate(), Rate()
        self._warnings = RareLines(_SECONDS_BETWEEN_WARNINGS)
        # Each counter has one thread that writes it.
        self._num_stored = self._num_loaded = self._num_evicted = self._num_skipped = 0
        self._num_stores_failed = self._num_loads_failed = 0
        self._num_written_bytes = self._num_read_bytes = 0
        self._num_file_bytes = self._folder.num_bytes()
        self._read_problem = self._write_problem = ""  # what went wrong last, until it goes well again
        self._threads = (
            threading.Thread(target=self._write_until_closed, name="kvd-disk-write", daemon=True),
            threading.Thread(target=self._read_until_closed, name="kvd-disk-read", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ the engine thread

    def contains(self, group_id: int, key: bytes) -> bool:
        return (group_id, key) in self._index

    def children(self, group_id: int, parent_key: bytes) -> Sequence[tuple[bytes, tuple[int, ...]]]:
        """(key, 16 token ids) of at most 64 blocks that continue a chain, the newest first."""
        return self._index.children(group_id, parent_key, _MAX_CHILDREN)

    def store(self, group_id: int, slot: int, key: bytes, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        """Write a slot's block to disk. The slot belongs to the tier until `poll` reports it."""
        view = self._memory(group_id, slot).cast("B")
        job = DiskJob(False, group_id, slot, key, view, self._index.epoch, parent_key, token_ids)
        self._offer(self._stores, job)

    def load(self, group_id: int, slot: int, key: bytes) -> None:
        """Read a block into a slot. The slot belongs to the tier until `poll` reports it."""
        view = self._memory(group_id, slot).cast("B")
        self._offer(self._loads, DiskJob(True, group_id, slot, key, view, self._index.epoch))

    def poll(self) -> list[SlowDone]:
        """What has ended since the last call. What was begun before a reset has failed."""
        ended = [self._done.popleft() for _ in range(len(self._done))]
        return [done if epoch == self._index.epoch else done._replace(ok=False) for epoch, done in ended]

    def forget(self, group_id: int, key: bytes) -> None:
        """Forget a block; the file loses it as soon as the writing thread gets to it."""
        withdrawn, is_written = self._stores.withdraw(group_id, key)
        self._answer(withdrawn, is_ok=False)
        if is_written:
            self._dropped_late.append((group_id, key))
        if withdrawn or (group_id, key) in self._index:
            self._index.remove([(group_id, key)])
            self._dropped.append((group_id, key))

    def reset(self) -> int:
        """Forget every block; returns how many there were. The files go as soon as the writing thread gets to it."""
        num_blocks = self._index.forget()
        self._reset_wanted.set()
        self._stores.nudge()
        return num_blocks

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Write what is queued and end the threads, within about `timeout_seconds`. Later calls are answered "no".

        False when a thread is stuck in the operating system: what it works on stays unanswered, and its slots must not
        be freed while the process lives.
        """
        self._deadline = time.monotonic() + timeout_seconds
        self._stores.close()
        self._loads.close()
        self._answer(self._loads.drain(), is_ok=False)
        for thread, store in zip(self._threads, (self._writing_store, self._reading_store), strict=True):
            thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)
            # One after the other: of two connections that close at once neither is the last, which clears the log away.
            if not thread.is_alive():
                store.close()
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def folder(self) -> DiskFolder:
        return self._folder

    @property
    def read_bytes_per_second(self) -> float | None:
        """Measured rate of loads, checksum included; None while nothing was read yet."""
        return self._read_rate.bytes_per_second

    @property
    def write_bytes_per_second(self) -> float | None:
        """Measured rate of stores, checksum and eviction included; None while nothing was written yet."""
        return self._write_rate.bytes_per_second

    def statistics(self) -> DiskStatistics:
        """Counters and size. Any thread; asks the operating system for the size."""
        return DiskStatistics(
            num_stored=self._num_stored,
            num_loaded=self._num_loaded,
            num_failed=self._num_stores_failed + self._num_loads_failed,
            num_evicted=self._num_evicted,
            num_skipped=self._num_skipped,
            num_blocks=len(self._index),
            num_bytes=self._folder.num_bytes(),
        )

    def facts(self) -> DiskFacts:
        """For observers; asks nobody. The bytes are those after the latest write."""
        return DiskFacts(
            num_blocks=len(self._index),
            num_bytes=self._num_file_bytes,
            max_bytes=self._max_bytes,
            num_written_bytes=self._num_written_bytes,
            num_read_bytes=self._num_read_bytes,
            num_corrupt_blocks=self._reading_store.num_damaged,
            problem=self._write_problem or self._read_problem,
        )

    def _offer(self, lane: Lane, job: DiskJob) -> None:
        if not lane.offer(job):
            self._num_skipped += 1
            self._answer([job], is_ok=False)

    # ------------------------------------------------------------------ both threads

    def _answer(self, jobs: Iterable[DiskJob], *, is_ok: bool) -> None:
        answers = [(job.epoch, SlowDone(job.is_load, job.group_id, job.slot, job.key, is_ok)) for job in jobs]
        if not answers:
            return
        self._done.extend(answers)
        try:
            self._wake()
        except Exception as error:
            # The answers are there for the next poll all the same.
            self._warn(f"the engine could not be woken: {error!r}")

    def _warn(self, text: str) -> None:
        line = self._warnings.line(text)
        if line is not None:
            self._log(line)

    def _attempt(self, participle: str, action: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Do something with the disk; on an error of any kind warn and go on.

        A thread that ended would leave slots held for ever.
        """
        try:
            result = action()
        except DiskStoreError as error:
            problem = f"the disk cache could not be {participle}: {error}"
        except Exception as error:
            problem = f"the disk cache failed: {error!r}"
        else:
            return result
        if participle == "read":
            self._read_problem = problem
        else:
            self._write_problem = problem
        self._warn(problem)
        return otherwise

    def _follow(self) -> None:
        """When the block file was replaced, by a store or by anybody else, nothing that was known is in it."""
        with self._file_lock:
            file = self._folder.identity()
            if file is not None and file != self._file:
                self._file = file
                self._index.clear()

    # ------------------------------------------------------------------ the writing thread

    def _write_until_closed(self) -> None:
        self._attempt("listed", self._list_blocks, None)
        while True:
            jobs = self._stores.take(_BLOCKS_PER_BATCH, linger_seconds=_LINGER_SECONDS, idle_seconds=_IDLE_SECONDS)
            if jobs is None:
                break
            num_stored = 0
            # A reset empties the files before anything of its epoch is written, and nothing older is written any more.
            epoch = self._index.epoch
            stale = [job for job in jobs if job.epoch != epoch]
            jobs = [job for job in jobs if job.epoch == epoch]
            if self._reset_wanted.is_set():
                self._attempt("emptied", self._empty_files, None)
            if self._dropped:
                self._attempt("written", partial(self._delete, self._dropped), None)
            if jobs and not self._reset_wanted.is_set() and time.monotonic() < self._deadline:
                num_stored = self._attempt("written", partial(self._write, jobs, epoch), 0)
            if self._dropped_late:
                self._attempt("written", partial(self._delete, self._dropped_late), None)
            self._stores.finish()
            self._attempt("written", self._touch, None)
            self._num_stored += num_stored
            self._num_stores_failed += len(stale) + len(jobs) - num_stored
            self._answer(jobs[:num_stored], is_ok=True)
            self._answer(jobs[num_stored:] + stale, is_ok=False)
        if self._reset_wanted.is_set():
            self._attempt("emptied", self._empty_files, None)

    def _list_blocks(self) -> None:
        """What earlier runs have left; nothing of it once there was a reset, which may come before this thread does."""
        for heads in self._writing_store.heads():
            self._index.add(heads, self._first_epoch)
            if self._first_epoch != self._index.epoch or self._deadline < float("inf"):
                return

    def _write(self, jobs: Sequence[DiskJob], epoch: int) -> int:
        """Store the jobs in order; returns how many of them are stored."""
        blocks = [StoredBlock(job.group_id, job.key, job.parent_key, job.token_ids, job.view) for job in jobs]
        start = time.perf_counter()
        result = self._writing_store.put_many(blocks)
        stored = blocks[: result.num_stored]
        self._write_rate.add(sum(len(block.data) for block in stored), time.perf_counter() - start)
        self._follow()
        self._num_evicted += len(result.evicted)
        heads = [
            BlockHead(block.group_id, block.key, block.parent_key, pack_token_ids(block.token_ids)) for block in stored
        ]
        self._index.add(heads, epoch)
        self._index.remove(result.evicted)
        self._num_written_bytes += sum(len(block.data) for block in stored)
        self._num_file_bytes = self._folder.num_bytes()
        self._write_problem = f"the disk cache could not be written: {result.error}" if result.error else ""
        if self._write_problem:
            self._warn(self._write_problem)
        if epoch != self._index.epoch:
            self._reset_wanted.set()  # the reset came while these were written
            self._stores.nudge()
            return 0
        return result.num_stored

    def _delete(self, dropped: deque[tuple[int, bytes]]) -> None:
        """Blocks that were forgotten; tried again when it fails. Whoever stores one anew has queued that since."""
        names = list(dropped)
        self._index.remove(names)
        self._writing_store.remove(names)
        for _ in names:
            dropped.popleft()

    def _empty_files(self) -> None:
        """Carry a reset out; tried again when it fails."""
        self._writing_store.reset()
        self._num_file_bytes = self._folder.num_bytes()
        self._reset_wanted.clear()
        self._follow()

    def _touch(self) -> None:
        names = [self._touched.popleft() for _ in range(len(self._touched))]
        self._writing_store.touch(names)

    # ------------------------------------------------------------------ the reading thread

    def _read_until_closed(self) -> None:
        self._attempt("read", self._measure, None)
        while True:
            jobs = self._loads.take(1, linger_seconds=0.0, idle_seconds=_IDLE_SECONDS)
            if jobs is None:
                break
            for job in jobs:
                is_ok = self._attempt("read", partial(self._read, job), False)
                self._num_loaded += is_ok
                self._num_loads_failed += not is_ok
                self._answer([job], is_ok=is_ok)

    def _measure(self) -> None:
        """A first rate, from blocks of an earlier run, for those who decide between loading and computing."""
        start = time.perf_counter()
        num_bytes = self._reading_store.read_some(_NUM_MEASURED_BLOCKS)
        if num_bytes:
            self._read_rate.add(num_bytes, time.perf_counter() - start)

    def _read(self, job: DiskJob) -> bool:
        name = job.group_id, job.key
        # After a reset the files still have the block for a moment, the index does not.
        if job.epoch != self._index.epoch or name not in self._index:
            return False
        start = time.perf_counter()
        try:
            is_ok = self._reading_store.read_into(job.group_id, job.key, job.view)
        except DiskStoreError as error:
            if not error.is_busy:
                self._index.remove([name])
            raise
        finally:
            self._follow()
        if not is_ok:
            self._index.remove([name])
            return False
        self._read_rate.add(job.view.nbytes, time.perf_counter() - start)
        self._num_read_bytes += job.view.nbytes
        self._read_problem = ""
        self._touched.append(name)
        return job.epoch == self._index.epoch
