"""The block file among processes: killed at any moment, and shared."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from kvd.cache.disk_blocks import pack_token_ids, unpack_token_ids
from kvd.cache.disk_folder import DiskFolder
from kvd.cache.disk_store import DiskStore
from kvd.core import BLOCK_SIZE
from tests.cache.blocks import chain, folder_bytes, read

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE = 16 << 20
BLOCK_BYTES = 60_000
FOR_EVER = 1_000_000


def fill_command(path: Path, first: int, num_chains: int) -> list[str]:
    arguments = path, SIZE, BLOCK_BYTES, first, num_chains
    return [sys.executable, "-m", "tests.cache.blocks", *map(str, arguments)]


def start_filling(path: Path, first: int, num_chains: int) -> subprocess.Popen[str]:
    """A process that writes chains; returns when its first one is stored."""
    command = fill_command(path, first, num_chains)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != "filling\n":
        process.kill()
        raise AssertionError(process.communicate()[1])
    return process


def read_all(path: Path, lines: list[str]) -> list[int]:
    """Open the store and read every block that it lists; the numbers of the chains that they belong to."""
    store = DiskStore(DiskFolder(path, lines.append), SIZE, lines.append)
    try:
        numbers = []
        for heads in store.heads():
            for head in heads:
                number, position = divmod(unpack_token_ids(head.token_bytes)[0], 1000)
                place = position // BLOCK_SIZE
                block = chain(number, place + 1, num_bytes=BLOCK_BYTES)[place]
                assert head == (0, block.key, block.parent_key, pack_token_ids(block.token_ids))
                assert read(store, block), "a listed block is not intact"
                numbers.append(number)
        assert store.put_many(chain(1, 8, num_bytes=BLOCK_BYTES)).error is None
        return numbers
    finally:
        store.close()


def test_twenty_kills_lose_nothing_but_what_was_under_way(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    moments = random.Random(7)
    lines: list[str] = []
    num_chains = 0
    for number in range(20):
        first = 100_000 + 50_000 * number
        process = start_filling(path, first, FOR_EVER)
        time.sleep(moments.uniform(0.0, 0.3))
        process.kill()
        _, errors = process.communicate()
        assert errors == ""
        assert folder_bytes(path) <= SIZE
        found = {chain for chain in read_all(path, lines) if chain >= first}
        assert found, "what was stored before the kill is gone"
        num_chains += len(found)
        assert folder_bytes(path) <= SIZE
    assert num_chains > 20, "the processes were killed before they did anything"
    assert lines == [], "the file had to be made anew"


def test_kills_while_the_file_is_made(tmp_path: Path) -> None:
    moments = random.Random(8)
    lines: list[str] = []
    for number in range(10):
        path = tmp_path / str(number)
        process = subprocess.Popen(fill_command(path, 2, FOR_EVER), cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.03))
        process.kill()
        process.wait()
        read_all(path, lines)
    assert lines == []


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    processes = [start_filling(path, first, 60) for first in (1000, 2000)]
    for process in processes:
        output, errors = process.communicate()
        assert errors == ""
        assert process.returncode == 0
        assert int(output) < 60 * 8 // 2, "most blocks were not stored"
        assert folder_bytes(path) <= SIZE
    lines: list[str] = []
    numbers = read_all(path, lines)
    assert len(numbers) > 50
    assert set(numbers) <= {*range(1000, 1060), *range(2000, 2060)}
    assert lines == []
