"""The disk tier as the cache manager meets it: every call is answered once, and nothing waits for the disk."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvd.cache import disk_store
from kvd.cache.disk_blocks import StoredBlock
from kvd.cache.disk_folder import DATABASE_NAME, LOCK_NAME, DiskStoreError
from kvd.cache.disk_store import DiskStore, PutResult
from kvd.cache.tiers import SlowDone, SlowTier
from kvd.engine.disk_lane import DiskJob, Lane, RareLines, Rate
from kvd.engine.disk_link import DiskLink
from kvd.errors import StartupError
from tests.cache.blocks import chain, data_of

SIZE = 16 << 20
BLOCK_BYTES = (5000, 300)
NUM_SLOTS = 2000
PATIENCE_SECONDS = 60.0


class Host:
    """A RAM tier in front of a disk tier: slots, and the answers that came."""

    def __init__(self, path: Path, *, size_bytes: int = SIZE) -> None:
        self.arenas = [bytearray(NUM_SLOTS * num_bytes) for num_bytes in BLOCK_BYTES]
        self.lines: list[str] = []
        self.answers: list[SlowDone] = []
        self.woken = threading.Event()
        self.link = DiskLink(
            str(path), size_bytes, BLOCK_BYTES, memory=self.slot, wake=self.woken.set, log=self.lines.append
        )

    def slot(self, group_id: int, slot: int) -> memoryview:
        num_bytes = BLOCK_BYTES[group_id]
        return memoryview(self.arenas[group_id])[slot * num_bytes : (slot + 1) * num_bytes]

    def store(self, blocks: Sequence[StoredBlock], first_slot: int = 0) -> None:
        for slot, block in enumerate(blocks, first_slot):
            self.slot(block.group_id, slot)[:] = block.data
            self.link.store(block.group_id, slot, block.key, block.parent_key, block.token_ids)

    def load(self, blocks: Sequence[StoredBlock], first_slot: int = 0) -> None:
        for slot, block in enumerate(blocks, first_slot):
            self.slot(block.group_id, slot)[:] = bytes(len(block.data))
            self.link.load(block.group_id, slot, block.key)

    def wait(self, num_answers: int) -> list[SlowDone]:
        """The next answers, as an engine gets them: polled when woken."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.woken.clear()
            self.answers += self.link.poll()
            if len(self.answers) >= num_answers:
                answers, self.answers = self.answers[:num_answers], self.answers[num_answers:]
                return answers
            assert self.woken.wait(deadline - time.monotonic()), "not every call was answered"

    def store_all(self, blocks: Sequence[StoredBlock]) -> None:
        self.store(blocks)
        assert all(done.ok for done in self.wait(len(blocks)))

    def is_right(self, done: SlowDone) -> bool:
        return self.slot(done.group_id, done.slot) == data_of(done.group_id, done.key, BLOCK_BYTES[done.group_id])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def host(path: Path) -> Iterator[Host]:
    host = Host(path)
    yield host
    assert host.link.close()


def until(condition: object) -> None:
    """Wait for a background thread to make `condition()` true."""
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


def test_it_is_a_slow_tier(host: Host) -> None:
    tier: SlowTier = host.link
    assert tier.poll() == []


def test_blocks_go_down_and_come_up(host: Host) -> None:
    blocks = chain(1, 20) + chain(1, 20, num_bytes=300, group_id=1)
    host.store(blocks)
    assert host.wait(40) == [
        SlowDone(False, block.group_id, slot, block.key, True) for slot, block in enumerate(blocks)
    ]
    assert all(host.link.contains(block.group_id, block.key) for block in blocks)
    host.load(blocks, 100)
    answers = host.wait(40)
    assert answers == [SlowDone(True, block.group_id, slot, block.key, True) for slot, block in enumerate(blocks, 100)]
    assert all(host.is_right(done) for done in answers)
    assert host.link.read_bytes_per_second is not None
    assert host.link.write_bytes_per_second is not None
    statistics = host.link.statistics()
    assert (statistics.num_stored, statistics.num_loaded, statistics.num_failed) == (40, 40, 0)
    assert statistics.num_blocks == 40
    assert statistics.num_bytes > 20 * 5000


def test_another_run_finds_them(host: Host, path: Path) -> None:
    blocks = chain(1, 20)
    host.store_all(blocks)
    assert host.link.close()
    later = Host(path)
    until(lambda: later.link.statistics().num_blocks == 20)
    assert later.link.children(0, blocks[0].parent_key) == [(blocks[0].key, blocks[0].token_ids)]
    until(lambda: later.link.read_bytes_per_second is not None)
    later.load(blocks)
    assert all(done.ok and later.is_right(done) for done in later.wait(20))
    assert later.link.close()


def test_children_are_bounded(host: Host) -> None:
    families = [chain(number, 1)[0] for number in range(100)]
    host.store_all(families)
    found = host.link.children(0, families[0].parent_key)
    assert len(found) == 64
    assert set(found) < {(block.key, block.token_ids) for block in families}
    assert host.link.children(1, families[0].parent_key) == []


def test_what_is_not_there_is_answered_too(host: Host) -> None:
    host.load(chain(1, 3))
    assert [done.ok for done in host.wait(3)] == [False] * 3
    assert host.link.statistics().num_failed == 3


def test_a_damaged_block_fails_once_and_is_forgotten(host: Host, path: Path) -> None:
    blocks = chain(1, 3)
    host.store_all(blocks)
    host.link._writing_store._connection.execute("UPDATE payload SET data = zeroblob(5000) WHERE id = 2")
    host.load(blocks)
    assert [done.ok for done in host.wait(3)] == [True, False, True]
    assert not host.link.contains(0, blocks[1].key)
    host.store_all(blocks[1:2])
    host.load(blocks)
    assert all(done.ok and host.is_right(done) for done in host.wait(3))


def test_eviction_reaches_the_index(path: Path) -> None:
    host = Host(path)
    num_blocks = 0
    number = 0
    while not host.link.statistics().num_evicted:
        host.store_all(chain(number, 32))
        num_blocks += 32
        number += 1
    statistics = host.link.statistics()
    assert statistics.num_blocks == num_blocks - statistics.num_evicted
    there = [block for n in range(number) for block in chain(n, 32) if host.link.contains(0, block.key)]
    assert len(there) == statistics.num_blocks
    for start in range(0, len(there), 500):
        some = there[start : start + 500]
        host.load(some)
        assert all(done.ok and host.is_right(done) for done in host.wait(len(some)))
    assert statistics.num_bytes <= SIZE
    assert host.link.close()


def test_a_clean_end_leaves_no_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(path)
    blocks = chain(1, 20)
    host.store_all(blocks)
    host.load(blocks)
    assert all(done.ok for done in host.wait(20))
    assert (path / f"{DATABASE_NAME}-wal").exists()
    close = DiskStore.close
    closing: list[DiskStore] = []
    most: list[int] = []

    def slow_close(store: DiskStore) -> None:
        closing.append(store)
        most.append(len(closing))
        time.sleep(0.1)
        close(store)
        closing.remove(store)

    monkeypatch.setattr(DiskStore, "close", slow_close)
    assert host.link.close()
    assert most == [1, 1], "two connections that close at once leave the log to each other"
    assert {file.name for file in path.iterdir()} == {DATABASE_NAME, LOCK_NAME}


# --------------------------------------------------------------------------- reset


def test_reset_forgets_here_and_in_the_files(host: Host, path: Path) -> None:
    blocks = chain(1, 20)
    host.store_all(blocks)
    assert host.link.reset() == 20
    assert not host.link.contains(0, blocks[0].key)
    assert host.link.children(0, blocks[0].parent_key) == []
    host.load(blocks)
    assert not any(done.ok for done in host.wait(20))
    host.store_all(chain(2, 3))
    assert host.link.close()
    later = Host(path)
    until(lambda: later.link.statistics().num_blocks)
    assert later.link.statistics().num_blocks == 3
    assert later.link.close()


def test_what_was_under_way_at_a_reset_is_not_found_after_it(path: Path) -> None:
    for number in range(10):
        host = Host(path)
        old, new = chain(3 * number, 32), chain(3 * number + 1, 32)
        host.store_all(chain(3 * number + 2, 32))
        host.store(old)
        host.load(chain(3 * number + 2, 32), 100)
        time.sleep(0.02 * (number % 5))
        host.link.reset()
        host.store(new, 200)
        answers = host.wait(96)
        assert [done.ok for done in sorted(answers, key=lambda done: done.slot)] == [False] * 64 + [True] * 32
        assert not any(host.link.contains(0, block.key) for block in old)
        assert host.link.close()
        store = DiskStore(host.link._folder, SIZE, host.lines.append)
        assert set(store.keys()) == {(0, block.key) for block in new}
        store.reset()
        store.close()


def test_a_load_between_a_reset_and_its_end_finds_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    reset = DiskStore.reset

    def slow_reset(store: DiskStore) -> int:
        assert go_on.wait(PATIENCE_SECONDS)
        return reset(store)

    blocks = chain(1, 20)
    host.store_all(blocks)
    monkeypatch.setattr(DiskStore, "reset", slow_reset)
    host.link.reset()
    host.load(blocks)
    assert not any(done.ok for done in host.wait(20))
    go_on.set()


def test_a_reset_by_another_process_is_noticed(host: Host) -> None:
    blocks = chain(1, 20)
    host.store_all(blocks)
    other = DiskStore(host.link._folder, SIZE, host.lines.append)
    other.reset()
    other.close()
    host.load(blocks[:1])
    assert [done.ok for done in host.wait(1)] == [False]
    assert not any(host.link.contains(0, block.key) for block in blocks)
    host.store_all(blocks)
    assert all(host.link.contains(0, block.key) for block in blocks)


# --------------------------------------------------------------------------- trouble


def hold_writer(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Stores wait until the event is set."""
    go_on = threading.Event()
    put_many = DiskStore.put_many

    def slow_put_many(store: DiskStore, blocks: Sequence[StoredBlock]) -> PutResult:
        assert go_on.wait(PATIENCE_SECONDS)
        return put_many(store, blocks)

    monkeypatch.setattr(DiskStore, "put_many", slow_put_many)
    return go_on


def test_a_full_queue_answers_no_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = hold_writer(monkeypatch)
    blocks = [block for number in range(20) for block in chain(number, 32)]
    host.store(blocks)
    num_skipped = host.link.statistics().num_skipped
    assert 640 - 256 - 32 <= num_skipped <= 640 - 256
    assert not any(done.ok for done in host.wait(num_skipped))
    go_on.set()
    assert all(done.ok for done in host.wait(640 - num_skipped))


def test_a_full_disk_is_one_line_and_no_hang(host: Host) -> None:
    host.store_all(chain(1, 4))
    host.link._writing_store._connection.execute("PRAGMA max_page_count = 1")
    blocks = [block for number in range(2, 10) for block in chain(number, 32)]
    host.store(blocks)
    answers = host.wait(len(blocks))
    assert not all(done.ok for done in answers)
    assert sum("full" in line for line in host.lines) == 1 == len(host.lines)
    failed = [done.key for done in answers if not done.ok]
    assert not any(host.link.contains(0, key) for key in failed)
    assert host.link.statistics().num_failed == len(failed)


@pytest.mark.parametrize("error", [DiskStoreError("input/output error"), ValueError("a bug")])
def test_every_error_is_answered(host: Host, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    blocks = chain(1, 5)
    host.store_all(blocks)

    def failing(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        for name in ("put_many", "read_into", "touch"):
            patch.setattr(DiskStore, name, failing)
        host.store(chain(2, 5))
        host.load(blocks, 100)
        assert not any(done.ok for done in host.wait(10))
    assert len(host.lines) == 1
    assert str(error) in host.lines[0]
    host.store_all(blocks)  # both threads are alive
    host.load(blocks)
    assert len(host.wait(5)) == 5


def test_a_wake_that_fails_ends_nothing(path: Path) -> None:
    host = Host(path)

    def failing() -> None:
        raise RuntimeError("the loop is closed")

    host.link._wake = failing
    host.store(chain(1, 3))
    until(lambda: host.link.statistics().num_stored == 3)
    host.link._wake = host.woken.set
    host.store(chain(2, 3))
    assert len(host.wait(6)) == 6
    assert host.link.close()


def test_files_that_vanish_are_made_anew(host: Host, path: Path) -> None:
    host.store_all(chain(1, 3))
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    host.store(chain(2, 3))
    assert len(host.wait(3)) == 3
    path.mkdir(mode=0o700)
    blocks = chain(3, 3)
    host.store_all(blocks)
    host.load(blocks)
    assert all(done.ok and host.is_right(done) for done in host.wait(3))
    assert (path / DATABASE_NAME).exists()


def test_closing_while_busy_answers_everything(path: Path) -> None:
    host = Host(path)
    down = [block for number in range(8) for block in chain(number, 32)]
    host.store_all(down[:64])
    host.store(down[64:], 64)
    host.load(down[:64], 1000)
    assert host.link.close()
    assert len(host.wait(256)) == 256
    assert host.link.poll() == []
    host.store(down[:2])
    host.load(down[:2], 10)
    assert [done.ok for done in host.wait(4)] == [False] * 4
    later = Host(path)
    until(lambda: later.link.statistics().num_blocks == 256)  # what was queued has been written
    assert later.link.close()


def test_closing_does_not_wait_for_ever(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = hold_writer(monkeypatch)
    host.store(chain(1, 3))
    assert not host.link.close(timeout_seconds=0.05)
    go_on.set()
    assert len(host.wait(3)) == 3


def test_a_folder_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    def slot(*_: int) -> memoryview:
        raise AssertionError

    with pytest.raises(StartupError, match="at least 16MiB"):
        DiskLink(str(tmp_path), 1 << 20, [300], memory=slot, wake=lambda: None, log=print)
    needed = -(-disk_store.smallest_size(30 << 20) >> 20)
    with pytest.raises(StartupError, match=f"at least {needed}MiB"):
        DiskLink(str(tmp_path), 64 << 20, [300, 30 << 20], memory=slot, wake=lambda: None, log=print)


def test_random_use_is_always_answered_and_right(path: Path) -> None:
    """Stores, loads, resets and restarts in random order against a disk that evicts."""
    choices = random.Random(3)
    known: dict[bytes, StoredBlock] = {}
    host = Host(path)
    for number in range(120):
        action = choices.random()
        blocks = chain(choices.randrange(200), 32)
        if action < 0.55:
            host.store(blocks)
            known.update((block.key, block) for block in blocks)
            assert [done.key for done in host.wait(32)] == [block.key for block in blocks]
        elif action < 0.95 and known:
            wanted = choices.sample(list(known.values()), min(len(known), 32))
            expected = [host.link.contains(0, block.key) for block in wanted]
            host.load(wanted)
            answers = host.wait(len(wanted))
            assert [done.ok for done in answers] == expected
            assert all(host.is_right(done) for done in answers if done.ok)
        elif number % 2:
            host.link.reset()
        else:
            assert host.link.close()
            before = host.link.statistics().num_blocks
            host = Host(path)
            until(lambda before=before, host=host: host.link.statistics().num_blocks == before)
        assert host.link.statistics().num_bytes <= SIZE
    assert host.link.close()
    assert host.lines == []


# --------------------------------------------------------------------------- parts


def test_a_lane_hands_out_in_order_and_in_bounds() -> None:
    jobs = [DiskJob(True, 0, slot, b"", memoryview(b""), 0) for slot in range(5)]
    lane = Lane(4)
    assert [lane.offer(job) for job in jobs] == [True] * 4 + [False]
    assert lane.take(3, linger_seconds=0.0, idle_seconds=0.0) == jobs[:3]
    assert lane.take(3, linger_seconds=0.01, idle_seconds=0.0) == jobs[3:4]
    assert lane.take(3, linger_seconds=0.0, idle_seconds=0.0) == []
    assert lane.offer(jobs[4])
    lane.nudge()
    assert lane.take(3, linger_seconds=0.0, idle_seconds=PATIENCE_SECONDS) == []
    lane.close()
    assert not lane.offer(jobs[0])
    assert lane.take(3, linger_seconds=PATIENCE_SECONDS, idle_seconds=PATIENCE_SECONDS) == jobs[4:]
    assert lane.take(3, linger_seconds=0.0, idle_seconds=PATIENCE_SECONDS) is None


def test_a_rate_follows_the_latest_transfers() -> None:
    rate = Rate()
    assert rate.bytes_per_second is None
    rate.add(0, 1.0)
    assert rate.bytes_per_second is None
    for _ in range(100):
        rate.add(1000, 1.0)
    assert rate.bytes_per_second == pytest.approx(1000, rel=0.01)
    for _ in range(100):
        rate.add(1000, 0.1)
    assert rate.bytes_per_second == pytest.approx(10_000, rel=0.01)


def test_warnings_are_rare_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines = RareLines(30.0)
    assert lines.line("full") == "full"
    assert lines.line("full") is None
    assert lines.line("full") is None
    now = 131.0
    assert lines.line("full") == "full (2 more like it since the last line)"
