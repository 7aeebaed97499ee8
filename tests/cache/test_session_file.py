"""Session files: complete or refused, with one line that says why."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cache.session_file import SessionBlock, SessionFileError, read_session, write_session
from kvd.errors import KvdError
from tests.cache.blocks import SEED, chain, data_of

BLOCK_BYTES = (5000, 300)


def session_blocks(num_blocks: int = 4) -> list[SessionBlock]:
    """A chain whose blocks exist in both layer groups, ordered by depth."""
    wide = chain(1, num_blocks, num_bytes=5000)
    narrow = chain(1, num_blocks, num_bytes=300, group_id=1)
    return [block for pair in zip(wide, narrow, strict=True) for block in pair]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.session"


def test_a_session_comes_back_as_it_was(path: Path) -> None:
    blocks = session_blocks()
    assert write_session(path, SEED, BLOCK_BYTES, blocks) == 8
    assert list(read_session(path, SEED, BLOCK_BYTES)) == blocks
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_an_empty_session_is_one(path: Path) -> None:
    write_session(path, SEED, BLOCK_BYTES, [])
    assert list(read_session(path, SEED, BLOCK_BYTES)) == []


def test_blocks_may_be_views_of_memory(path: Path) -> None:
    blocks = session_blocks()
    write_session(path, SEED, BLOCK_BYTES, (block._replace(data=memoryview(block.data)) for block in blocks))
    assert list(read_session(path, SEED, BLOCK_BYTES)) == blocks


def test_one_block_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """Both ways in a process that may not hold the session: 64 blocks of 4 MiB, 128 MiB of address space to spare."""
    code = """
import resource, sys
from kvd.cache.session_file import read_session, write_session
from tests.cache.blocks import SEED, chain
size = 4 << 20
blocks = chain(1, 64, num_bytes=1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)
write_session(sys.argv[1], SEED, [size], (block._replace(data=bytes(size)) for block in blocks))
assert sum(len(block.data) for block in read_session(sys.argv[1], SEED, [size])) == 64 * size
"""
    root = Path(__file__).resolve().parent.parent.parent
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_failing_source_leaves_the_older_file(path: Path) -> None:
    blocks = session_blocks()
    write_session(path, SEED, BLOCK_BYTES, blocks)

    def failing() -> Iterator[SessionBlock]:
        yield blocks[0]
        raise RuntimeError("the engine ended")

    with pytest.raises(RuntimeError, match="the engine ended"):
        write_session(path, SEED, BLOCK_BYTES, failing())
    assert list(read_session(path, SEED, BLOCK_BYTES)) == blocks
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_narrow_before_anything_is_in_it(path: Path) -> None:
    modes: list[int] = []

    def watching() -> Iterator[SessionBlock]:
        modes.extend(stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir())
        yield from session_blocks()

    before = os.umask(0)
    try:
        write_session(path, SEED, BLOCK_BYTES, watching())
    finally:
        os.umask(before)
    assert modes == [0o600]


@pytest.mark.parametrize(
    ("seed", "block_bytes"), [(b"other weights", BLOCK_BYTES), (SEED, (5000,)), (SEED, (300, 5000)), (b"", BLOCK_BYTES)]
)
def test_another_model_or_format_is_refused(path: Path, seed: bytes, block_bytes: tuple[int, ...]) -> None:
    write_session(path, SEED, BLOCK_BYTES, session_blocks())
    with pytest.raises(SessionFileError, match="another model or KV cache format"):
        next(read_session(path, seed, block_bytes))


def test_neither_seed_nor_salt_is_in_the_file(path: Path) -> None:
    write_session(path, SEED, BLOCK_BYTES, session_blocks())
    assert SEED not in path.read_bytes()


def test_every_flipped_bit_is_noticed(path: Path) -> None:
    blocks = session_blocks(1)
    write_session(path, SEED, BLOCK_BYTES, blocks)
    whole = path.read_bytes()
    for place in [*range(400), *range(400, len(whole) - 600, 211), *range(len(whole) - 600, len(whole))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        found: list[SessionBlock] = []
        with pytest.raises(SessionFileError):
            found.extend(read_session(path, SEED, BLOCK_BYTES))
        assert found == blocks[: len(found)]


def test_every_truncation_is_noticed(path: Path) -> None:
    blocks = session_blocks(1)
    write_session(path, SEED, BLOCK_BYTES, blocks)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(SessionFileError, match="incomplete"):
            list(read_session(path, SEED, BLOCK_BYTES))
    path.write_bytes(whole + b"\0")
    with pytest.raises(SessionFileError, match="damaged"):
        list(read_session(path, SEED, BLOCK_BYTES))


def test_a_block_that_is_left_out_or_out_of_order_is_noticed(path: Path) -> None:
    write_session(path, SEED, (300,), chain(1, 3, num_bytes=300))
    whole = path.read_bytes()
    write_session(path, SEED, (300,), [])
    start = path.stat().st_size - 28
    length = (len(whole) - start - 28) // 3
    pieces = [whole[start + length * number : start + length * (number + 1)] for number in range(3)]
    assert b"".join([whole[:start], *pieces, whole[-28:]]) == whole
    for order in ((0, 1), (0, 2, 1), (0, 1, 1, 2)):
        path.write_bytes(b"".join([whole[:start], *(pieces[number] for number in order), whole[-28:]]))
        with pytest.raises(SessionFileError, match="damaged"):
            list(read_session(path, SEED, (300,)))


def test_what_cannot_be_read_or_written_is_one_line(path: Path) -> None:
    with pytest.raises(SessionFileError, match="cannot be read: No such file"):
        list(read_session(path, SEED, BLOCK_BYTES))
    with pytest.raises(SessionFileError, match="cannot be written: No such file"):
        write_session(path / "below", SEED, BLOCK_BYTES, [])
    with pytest.raises(SessionFileError, match="cannot be read: Is a directory"):
        list(read_session(path.parent, SEED, BLOCK_BYTES))
    os.mkfifo(path)
    with pytest.raises(SessionFileError, match="not a plain file"):
        list(read_session(path, SEED, BLOCK_BYTES))
    assert issubclass(SessionFileError, KvdError)


def test_a_key_that_does_not_follow_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are no secret: whoever writes a file by hand can make them. The chain must hold all the same."""
    blocks = chain(1, 2, num_bytes=300)
    foreign = [blocks[1]._replace(parent_key=blocks[0].parent_key)]
    with pytest.raises(AssertionError):
        write_session(path, SEED, (300,), foreign)
    with monkeypatch.context() as patch:
        patch.setattr("kvd.cache.session_file._follows", lambda head: True)
        write_session(path, SEED, (300,), foreign)
        assert list(read_session(path, SEED, (300,))) == foreign
    with pytest.raises(SessionFileError, match="damaged"):
        next(read_session(path, SEED, (300,)))


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.session"
    path.write_bytes(content)
    with pytest.raises(SessionFileError):
        list(read_session(path, SEED, BLOCK_BYTES))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_edited_sessions_are_refused_or_the_same(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Pieces cut out, inserted and overwritten anywhere: what is yielded is always right, and the end is an error."""
    path = tmp_path_factory.getbasetemp() / "edited.session"
    blocks = chain(1, 3, num_bytes=300)
    write_session(path, SEED, (300,), blocks)
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 700)))
    edited = whole[:start] + data.draw(st.binary(max_size=300)) + whole[end:]
    path.write_bytes(edited)
    found = []
    try:
        for block in read_session(path, SEED, (300,)):
            found.append(block)
            assert block.data == data_of(0, block.key, 300)
    except SessionFileError:
        assert edited != whole
    else:
        assert edited == whole
        assert found == blocks
