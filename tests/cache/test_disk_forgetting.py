"""The disk tier forgets single blocks, says how it is, and knows the formats that its folder was used with."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.cache.disk_folder import DATABASE_NAME, DiskFolder
from kvd.cache.disk_formats import FORMATS_NAME, MAX_FORMATS, remember_format
from kvd.cache.disk_store import DiskStore
from tests.cache.blocks import chain
from tests.cache.test_disk_link import SIZE, Host, until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def host(path: Path) -> Iterator[Host]:
    host = Host(path)
    yield host
    assert host.link.close()


def num_rows(path: Path) -> tuple[int, int]:
    connection = sqlite3.connect(path / DATABASE_NAME)
    try:
        tables = ("block", "payload")
        rows = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
    finally:
        connection.close()
    return rows[0], rows[1]


def test_a_block_that_is_forgotten_is_gone_at_once_and_soon_from_the_file(host: Host, path: Path) -> None:
    blocks = chain(1, 5)
    host.store_all(blocks)
    host.link.forget(0, blocks[4].key)
    assert not host.link.contains(0, blocks[4].key)
    assert host.link.contains(0, blocks[3].key)
    until(lambda: num_rows(path) == (4, 4))
    host.load(blocks[4:])
    assert not host.wait(1)[0].ok
    host.store(blocks[4:])  # it may come back
    assert host.wait(1)[0].ok
    until(lambda: num_rows(path) == (5, 5))
    assert host.link.contains(0, blocks[4].key)
    host.link.forget(1, b"nobody" * 3)


def test_a_store_that_waits_is_taken_back(host: Host, path: Path) -> None:
    """The writing thread is held by a lock of the file, so that what comes meanwhile waits."""
    blocks = chain(2, 80)
    host.store_all(blocks[:1])
    connection = sqlite3.connect(path / DATABASE_NAME, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    host.store(blocks[1:])
    host.link.forget(0, blocks[79].key)
    answers = host.wait(1)
    assert [(done.key, done.ok) for done in answers] == [(blocks[79].key, False)]
    connection.execute("ROLLBACK")
    connection.close()
    assert len(host.wait(78)) == 78
    until(lambda: not host.link._dropped)
    assert not host.link.contains(0, blocks[79].key)


def test_a_block_that_is_forgotten_while_it_is_written_does_not_come_back(host: Host, path: Path) -> None:
    """The writing thread has taken the store and waits for the file; the index does not know the block yet."""
    blocks = chain(7, 3)
    host.store_all(blocks[:1])
    connection = sqlite3.connect(path / DATABASE_NAME, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    host.store(blocks[1:])
    until(lambda: host.link._stores._taken)
    host.link.forget(0, blocks[2].key)
    assert not host.link.contains(0, blocks[2].key)
    connection.execute("ROLLBACK")
    connection.close()
    host.wait(2)
    until(lambda: num_rows(path) == (2, 2))
    assert [host.link.contains(0, block.key) for block in blocks] == [True, True, False]


def test_forgotten_blocks_are_deleted_from_the_store(path: Path) -> None:
    store = DiskStore(DiskFolder(path, print), SIZE, print)
    blocks = chain(3, 4)
    store.put_many(blocks)
    store.remove([(0, blocks[3].key), (0, blocks[1].key), (5, blocks[0].key)])
    assert [store.contains(0, block.key) for block in blocks] == [True, False, True, False]
    assert num_rows(path) == (2, 2)
    store.close()


def test_facts(host: Host) -> None:
    facts = host.link.facts()
    assert (facts.num_blocks, facts.max_bytes, facts.problem) == (0, SIZE, "")
    blocks = chain(4, 3)
    host.store_all(blocks)
    host.load(blocks, 100)
    host.wait(3)
    facts = host.link.facts()
    assert (facts.num_blocks, facts.num_written_bytes, facts.num_read_bytes) == (3, 15000, 15000)
    assert 15000 < facts.num_bytes <= SIZE
    assert facts.num_corrupt_blocks == 0


def test_a_damaged_block_is_counted(host: Host, path: Path) -> None:
    blocks = chain(5, 2)
    host.store_all(blocks)
    connection = sqlite3.connect(path / DATABASE_NAME)
    connection.execute("UPDATE payload SET data = zeroblob(5000) WHERE id = (SELECT max(id) FROM payload)")
    connection.commit()
    connection.close()
    host.load(blocks, 100)
    assert [done.ok for done in host.wait(2)] == [True, False]
    assert host.link.facts().num_corrupt_blocks == 1


def test_a_problem_lasts_until_a_write_goes_well(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(6, 2)
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "_insert", lambda *arguments: (_ for _ in ()).throw(sqlite3.OperationalError("full")))
        host.store(blocks[:1])
        assert not host.wait(1)[0].ok
        assert host.link.facts().problem.startswith("the disk cache could not be written: ")
    host.store(blocks[1:])
    assert host.wait(1)[0].ok
    assert host.link.facts().problem == ""


# --------------------------------------------------------------------------- formats


def test_formats_are_remembered_from_start_to_start(path: Path) -> None:
    lines: list[str] = []
    folder = DiskFolder(path, lines.append)
    assert remember_format(folder, b"m|int8", "int8", lines.append) == ()
    before = (path / FORMATS_NAME).stat()
    assert before.st_mode & 0o777 == 0o600
    assert remember_format(folder, b"m|int8", "int8", lines.append) == ()
    assert (path / FORMATS_NAME).stat().st_ino == before.st_ino, "nothing new is not written"
    assert remember_format(folder, b"m|int4", "int4", lines.append) == ((b"m|int8", "int8"),)
    assert remember_format(folder, b"m|int8", "int8", lines.append) == ((b"m|int4", "int4"),)
    for number in range(MAX_FORMATS + 5):
        others = remember_format(folder, b"%d" % number, "x", lines.append)
    assert len(others) == MAX_FORMATS - 1
    assert others[-1] == (b"%d" % (MAX_FORMATS + 3), "x")
    assert not lines
    DiskFolder(path, lines.append)  # the folder is as good as before
    path.chmod(0o755)
    DiskFolder(path, lines.append)
    assert len(lines) == 1, "only kvd's files are in it: it is closed to others"


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 200_000, '[{"key_seed": "zz", "name": "x"}]', '{"a": 1}'])
def test_a_damaged_note_is_made_anew(path: Path, text: str) -> None:
    lines: list[str] = []
    folder = DiskFolder(path, lines.append)
    (path / FORMATS_NAME).write_text(text)
    assert remember_format(folder, b"m|int8", "int8", lines.append) == ()
    assert lines == [f"{path / FORMATS_NAME} is damaged and is made anew"]
    assert remember_format(folder, b"m|int4", "int4", lines.append) == ((b"m|int8", "int8"),)


def test_a_link_in_place_of_the_note_is_not_followed(path: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = DiskFolder(path, lines.append)
    target = tmp_path / "target"
    target.write_text("[]")
    os.symlink(target, path / FORMATS_NAME)
    assert remember_format(folder, b"m|int8", "int8", lines.append) == ()
    assert "could not be noted" in lines[0]
    assert target.read_text() == "[]"


def test_a_folder_that_another_process_holds_has_no_formats(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    folder = DiskFolder(path, lines.append)
    monkeypatch.setattr("kvd.cache.disk_folder._LOCK_SECONDS", 0.0)
    with folder.lock():
        assert remember_format(folder, b"m", "x", lines.append) == ()
    assert "could not be noted" in lines[0]
