"""The disk tier of a server that has just started."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvd.engine.disk_link import DiskLink

BLOCK_BYTES = 4096
WAIT_SECONDS = 30.0


def open_link(folder: Path, slots: list[bytearray]) -> DiskLink:
    return DiskLink(
        str(folder), 64 << 20, [BLOCK_BYTES],
        memory=lambda group_id, slot: memoryview(slots[slot]), wake=lambda: None, log=lambda line: None,
    )  # fmt: skip


def test_a_reset_before_the_blocks_were_listed_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [bytearray(BLOCK_BYTES) for _ in range(2)]
    key = bytes(16)
    first = open_link(tmp_path, slots)
    first.store(0, 0, key, b"r" * 16, tuple(range(16)))
    assert first.close(WAIT_SECONDS)
    assert [done.ok for done in first.poll()] == [True]

    may_list, has_listed, may_empty = threading.Event(), threading.Event(), threading.Event()
    list_blocks, empty_files = DiskLink._list_blocks, DiskLink._empty_files

    def list_late(link: DiskLink) -> None:
        assert may_list.wait(WAIT_SECONDS)
        list_blocks(link)
        has_listed.set()

    def empty_late(link: DiskLink) -> None:
        assert may_empty.wait(WAIT_SECONDS)
        empty_files(link)

    monkeypatch.setattr(DiskLink, "_list_blocks", list_late)
    monkeypatch.setattr(DiskLink, "_empty_files", empty_late)
    later = open_link(tmp_path, slots)
    try:
        later.reset()
        may_list.set()
        assert has_listed.wait(WAIT_SECONDS)
        assert not later.contains(0, key)
        later.load(0, 1, key)
        deadline = time.monotonic() + WAIT_SECONDS
        while not (done := later.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert not done[0].ok
    finally:
        may_list.set()
        may_empty.set()
        assert later.close(WAIT_SECONDS)
