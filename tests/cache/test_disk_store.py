"""The block file: what goes in comes out, its size is kept, and whatever is damaged is a miss."""

from __future__ import annotations

import random
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.cache.disk_blocks import StoredBlock
from kvd.cache.disk_folder import DATABASE_NAME, DiskFolder, DiskStoreError
from kvd.cache.disk_store import DiskStore, smallest_size
from kvd.errors import StartupError
from tests.cache.blocks import chain, folder_bytes, read

MIB = 1 << 20
SIZE = 16 * MIB

Open = Callable[..., DiskStore]


@pytest.fixture
def lines() -> list[str]:
    """What the stores logged."""
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_store(path: Path, lines: list[str]) -> Iterator[Open]:
    opened = []

    def open_store(size_bytes: int = SIZE) -> DiskStore:
        store = DiskStore(DiskFolder(path, lines.append), size_bytes, lines.append)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


# --------------------------------------------------------------------------- content


def test_blocks_come_back_as_they_were(open_store: Open, path: Path) -> None:
    store = open_store()
    blocks = chain(1, 5) + chain(2, 3, num_bytes=70_001) + chain(1, 2, num_bytes=9000, group_id=3)
    result = store.put_many(blocks)
    assert result == (len(blocks), [], None)
    assert all(read(store, block) for block in blocks)
    assert set(store.keys()) == {(block.group_id, block.key) for block in blocks}
    assert store.num_blocks == len(blocks)
    assert store.num_bytes == folder_bytes(path)


def test_blocks_survive_a_restart(open_store: Open) -> None:
    blocks = chain(1, 40)
    first = open_store()
    first.put_many(blocks)
    first.close()
    second = open_store()
    assert all(read(second, block) for block in blocks)
    (heads,) = second.heads()
    assert [head.parent_key for head in heads] == [block.parent_key for block in blocks]


def test_what_was_not_stored_is_a_miss(open_store: Open) -> None:
    store = open_store()
    here, absent = chain(1, 1), chain(2, 1)
    store.put_many(here)
    assert store.contains(0, here[0].key)
    assert not store.contains(0, absent[0].key)
    assert not store.contains(1, here[0].key)
    assert not read(store, absent[0])
    assert not read(store, here[0]._replace(group_id=1))


def test_a_slot_of_another_length_is_a_miss(open_store: Open) -> None:
    store = open_store()
    blocks = chain(1, 1)
    store.put_many(blocks)
    assert not store.read_into(0, blocks[0].key, memoryview(bytearray(len(blocks[0].data) + 1)))


def test_storing_twice_keeps_one(open_store: Open) -> None:
    store = open_store()
    blocks = chain(1, 4)
    assert store.put_many(blocks + blocks).num_stored == 8
    assert store.num_blocks == 4


def test_children_are_those_of_one_parent_and_group(open_store: Open) -> None:
    store = open_store()
    families = [chain(number, 2) for number in range(6)]  # all of one root
    stranger = chain(7, 1, group_id=1)
    store.put_many([block for family in families for block in family] + stranger)
    root = families[0][0].parent_key
    found = store.children(0, root, 64)
    assert sorted(found) == sorted((family[0].key, family[0].token_ids) for family in families)
    assert len(store.children(0, root, 4)) == 4
    assert store.children(0, families[2][0].key, 64) == [(families[2][1].key, families[2][1].token_ids)]
    assert store.children(0, families[2][1].key, 64) == []


def test_reset_forgets_everything_and_gives_the_space_back(open_store: Open, path: Path) -> None:
    store, other = open_store(), open_store()
    store.put_many(chain(1, 100))
    assert folder_bytes(path) > 500_000 + 100 * 5000 - 100_000
    assert store.reset() == 100
    assert store.num_blocks == 0
    assert other.num_blocks == 0  # follows to the new file
    assert folder_bytes(path) < 2 * MIB
    other.put_many(chain(2, 3))
    assert store.num_blocks == 3


# --------------------------------------------------------------------------- size


def test_the_folder_stays_within_its_size(open_store: Open, path: Path) -> None:
    store = open_store()
    largest = 0
    stored: list[tuple[int, bytes]] = []
    evicted: list[tuple[int, bytes]] = []
    for number in range(60):
        result = store.put_many(chain(number, 16, num_bytes=60_000))
        assert result.error is None
        stored += [(0, block.key) for block in chain(number, 16, num_bytes=1)]
        evicted += result.evicted
        largest = max(largest, folder_bytes(path))
    assert 3 * SIZE < 60 * 16 * 60_000
    assert SIZE // 2 < largest <= SIZE
    assert len(evicted) == len(set(evicted))
    assert set(store.keys()) == set(stored) - set(evicted)


def test_blocks_leave_from_the_ends_of_the_oldest_chains(open_store: Open) -> None:
    store = open_store()
    families = [chain(number, 16, num_bytes=60_000) for number in range(40)]
    for family in families:
        store.put_many(family)
    lengths = []
    for family in families:
        is_there = [store.contains(0, block.key) for block in family]
        assert is_there == sorted(is_there, reverse=True), "a block is there and its parent is not"
        lengths.append(sum(is_there))
    assert lengths[0] == 0
    assert lengths[-1] == 16
    assert lengths == sorted(lengths), "a newer chain left before an older one"


def test_touched_blocks_stay_for_longer(open_store: Open) -> None:
    store = open_store()
    wanted, unwanted = chain(1000, 8, num_bytes=60_000), chain(1001, 8, num_bytes=60_000)
    store.put_many(wanted + unwanted)
    for number in range(7):
        store.put_many(chain(number, 16, num_bytes=60_000))
    store.touch([(0, block.key) for block in wanted])
    num_evicted = 0
    number = 100
    while num_evicted < 40:
        num_evicted += len(store.put_many(chain(number, 16, num_bytes=60_000)).evicted)
        number += 1
    assert all(store.contains(0, block.key) for block in wanted)
    assert not any(store.contains(0, block.key) for block in unwanted)


def test_a_chain_is_not_eaten_by_its_own_continuation(open_store: Open) -> None:
    store = open_store()
    long = chain(1, 400, num_bytes=60_000)
    for start in range(0, 400, 4):
        assert store.put_many(long[start : start + 4]).error is None
        assert store.contains(0, long[start + 3].key)


def test_a_full_disk_stores_nothing_and_keeps_what_is_there(open_store: Open) -> None:
    store = open_store()
    before, after = chain(1, 8), chain(2, 60, num_bytes=60_000)
    store.put_many(before)
    store._connection.execute("PRAGMA max_page_count = 1")  # SQLite's lowest limit is what there is now
    result = store.put_many(after)
    assert result.num_stored < 60
    assert result.error is not None
    assert "full" in result.error
    assert all(read(store, block) for block in before)
    assert [read(store, block) for block in after] == [number < result.num_stored for number in range(60)]
    store._connection.execute("PRAGMA max_page_count = 200")
    assert store.put_many(after).num_stored == 60


def test_a_block_that_cannot_fit_is_refused(open_store: Open, path: Path) -> None:
    store = open_store()
    result = store.put_many(chain(1, 2, num_bytes=3 * MIB))
    assert result.num_stored == 0
    assert result.error is not None
    assert "too small" in result.error
    assert smallest_size(3 * MIB) > SIZE
    roomy = open_store(smallest_size(3 * MIB))
    for number in range(6):
        assert roomy.put_many(chain(number, 2, num_bytes=3 * MIB)).error is None
        assert folder_bytes(path) <= smallest_size(3 * MIB)


def test_a_file_that_is_larger_than_allowed_is_begun_anew(open_store: Open, path: Path, lines: list[str]) -> None:
    store = open_store(2 * SIZE)
    for number in range(20):
        store.put_many(chain(number, 16, num_bytes=60_000))
    store.close()
    assert folder_bytes(path) > SIZE
    assert open_store(SIZE).num_blocks == 0
    assert folder_bytes(path) < SIZE
    assert len(lines) == 1
    assert "larger than disk_cache.size" in lines[0]


# --------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("block", "id"),
        ("block", "group_id"),
        ("block", "key"),
        ("block", "parent_key"),
        ("block", "token_ids"),
        ("block", "data_digest"),
        ("block", "checksum"),
        ("payload", "id"),
        ("payload", "data"),
    ],
)
def test_a_flipped_bit_in_any_column_is_a_miss(open_store: Open, path: Path, table: str, column: str) -> None:
    """Every bit of the short columns, some of the block."""
    blocks = chain(1, 3, num_bytes=300)
    victim = blocks[1]
    store = open_store()
    other = sqlite3.connect(path / DATABASE_NAME, isolation_level=None)
    try:
        num_bits = 0
        bit = 0
        while True:
            store.reset()
            store.put_many(blocks)
            other.close()
            other = sqlite3.connect(path / DATABASE_NAME, isolation_level=None)
            where = "id = (SELECT id FROM block WHERE key = ?)"
            (value,) = other.execute(f"SELECT {column} FROM {table} WHERE {where}", (victim.key,)).fetchone()
            if isinstance(value, int):
                num_bits = 12
                flipped: int | bytes = value ^ 1 << bit
            else:
                num_bits = 8 * len(value)
                flipped = bytes(b ^ (1 << bit % 8 if place == bit // 8 else 0) for place, b in enumerate(value))
            try:
                other.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (flipped, victim.key))
            except sqlite3.IntegrityError:
                pass  # another row has that id
            else:
                assert not read(store, victim)
                assert (victim.key, victim.token_ids) not in store.children(
                    0, victim.parent_key, 9
                ) or table == "payload"
                # A row whose own id was changed lost its block; the others are whole.
                assert read(store, blocks[0])
                assert read(store, blocks[2])
                if column not in ("key", "group_id"):
                    assert not store.contains(0, victim.key), "the row is still there"
            bit += max(1, num_bits // 24)
            if bit >= num_bits:
                return
    finally:
        other.close()


@pytest.mark.parametrize("column", ["parent_key", "token_ids", "data_digest", "checksum"])
@pytest.mark.parametrize("value", [b"", b"short", 7, "text", 1.5])
def test_a_value_of_another_type_or_length_is_a_miss(
    open_store: Open, path: Path, column: str, value: bytes | int | str | float
) -> None:
    store = open_store()
    blocks = chain(1, 1)
    store.put_many(blocks)
    with sqlite3.connect(path / DATABASE_NAME) as other:
        other.execute(f"UPDATE block SET {column} = ?", (value,))
    other.close()
    assert list(store.keys()) == []
    assert not read(store, blocks[0])
    assert store.num_blocks == 0


@pytest.mark.parametrize("data", [b"", b"x" * 4999, 7, "text"])
def test_a_truncated_block_is_a_miss(open_store: Open, path: Path, data: bytes | int | str) -> None:
    store = open_store()
    blocks = chain(1, 1)
    store.put_many(blocks)
    with sqlite3.connect(path / DATABASE_NAME) as other:
        other.execute("UPDATE payload SET data = ?", (data,))
    other.close()
    assert not read(store, blocks[0])
    assert store.num_blocks == 0


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"\0" * 100_000, random.Random(1).randbytes(300_000)])
def test_a_file_that_is_no_database_is_begun_anew(
    open_store: Open, path: Path, lines: list[str], content: bytes
) -> None:
    path.mkdir(mode=0o700)
    (path / DATABASE_NAME).write_bytes(content)
    (path / f"{DATABASE_NAME}-wal").write_bytes(content)
    store = open_store()
    blocks = chain(1, 3)
    assert store.put_many(blocks).num_stored == 3
    assert all(read(store, block) for block in blocks)
    assert len(lines) == (1 if content else 0)


def test_a_file_of_another_version_or_program_is_begun_anew(open_store: Open, path: Path, lines: list[str]) -> None:
    for number, change in enumerate(
        ("PRAGMA user_version = 99", "PRAGMA application_id = 5", "CREATE TABLE more (x)", "DROP INDEX block_by_value")
    ):
        store = open_store()
        store.put_many(chain(1, 3))
        store.close()
        with sqlite3.connect(path / DATABASE_NAME) as other:
            other.execute(change)
        other.close()
        store = open_store()
        assert store.num_blocks == 0
        store.close()
        assert len(lines) == number + 1, lines


def test_damage_anywhere_in_the_file_gives_right_blocks_or_misses(open_store: Open, path: Path) -> None:
    """Pages overwritten, the file cut: the store never returns a wrong byte, and no error but its own."""
    blocks = [block for number in range(6) for block in chain(number, 8, num_bytes=60_000)]
    store = open_store()
    store.put_many(blocks)
    store.close()
    file = path / DATABASE_NAME
    whole = file.read_bytes()
    noise = random.Random(5)
    num_found = 0
    for number in range(60):
        damaged = bytearray(whole)
        if number % 3 == 2:
            del damaged[noise.randrange(len(damaged)) :]
        else:
            start = noise.randrange(len(damaged))
            length = noise.choice((1, 16, 4000, 65536))
            damaged[start : start + length] = noise.randbytes(len(damaged[start : start + length]))
        file.write_bytes(damaged)
        store = open_store()
        for block in blocks:
            num_found += _read_or_nothing(store, block)
        store.put_many(chain(100 + number, 4))
        list(_names_or_nothing(store))
        store.close()
        for extra in path.glob("*-wal"):
            extra.unlink()
    assert num_found > 60 * len(blocks) // 10


def _read_or_nothing(store: DiskStore, block: StoredBlock) -> bool:
    try:
        return read(store, block)
    except DiskStoreError:
        return False


def _names_or_nothing(store: DiskStore) -> Iterator[tuple[int, bytes]]:
    try:
        yield from store.keys()
    except DiskStoreError:
        return


def test_a_file_that_is_removed_while_open_is_begun_anew(open_store: Open, path: Path) -> None:
    store = open_store()
    store.put_many(chain(1, 3))
    for file in path.iterdir():
        file.unlink()
    assert store.num_blocks == 0
    assert store.put_many(chain(2, 3)).num_stored == 3
    other = open_store()
    assert other.num_blocks == 3


# --------------------------------------------------------------------------- the folder


def test_nobody_else_may_read(open_store: Open, path: Path) -> None:
    store = open_store()
    store.put_many(chain(1, 3))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    assert set(modes) > {DATABASE_NAME, f"{DATABASE_NAME}-wal", f"{DATABASE_NAME}-shm"}
    assert set(modes.values()) == {0o600}


def test_an_open_folder_is_closed_when_it_is_empty_and_refused_otherwise(path: Path, lines: list[str]) -> None:
    path.mkdir()
    path.chmod(0o755)
    DiskFolder(path, lines.append)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert len(lines) == 1
    path.chmod(0o755)
    (path / "letter.txt").write_text("mine")
    with pytest.raises(StartupError, match="holds other files"):
        DiskFolder(path, lines.append)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, lines: list[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StartupError, match="not a folder"):
        DiskFolder(file, lines.append)
    with pytest.raises(StartupError, match="cannot be used"):
        DiskFolder(file / "below", lines.append)


def test_a_folder_of_somebody_else_is_refused(path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(StartupError, match="another user"):
        DiskFolder(path, lines.append)


def test_a_folder_that_cannot_be_written_is_refused(
    path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's answer is replaced: tests may run as root, who may do anything."""
    path.mkdir(mode=0o700)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StartupError, match="cannot be written"):
        DiskFolder(path, lines.append)


def test_a_link_in_place_of_the_file_is_refused(path: Path, tmp_path: Path, lines: list[str]) -> None:
    path.mkdir(mode=0o700)
    (path / DATABASE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="not a plain file"):
        DiskFolder(path, lines.append)
    assert not (tmp_path / "elsewhere").exists()
