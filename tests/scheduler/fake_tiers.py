"""A slow tier of values instead of bytes, as late and as unreliable as a disk may be.

What a store keeps is read from the RAM slot when the store is carried out, not when it is asked for, and a load
writes to the slot as late: whoever gives a held slot to somebody else is found out by what is read afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvd.cache.tiers import NO_TOKEN, SlowDone
from kvd.core import BLOCK_SIZE

from .fake_runner import FakeRunner

MAX_CHILDREN = 64
_Job = tuple[bool, int, int, bytes, bytes, tuple[int, ...]]


class FakeSlowTier:
    """Implements `SlowTier`. `runner` must be set before the first store.

    failure_rate  share of loads and stores that go wrong, and chance per poll that a block is lost
    delay         chance that a job under way is not done yet when it is polled
    speed         bytes per second that it says it has read
    """

    def __init__(self, seed: int, *, failure_rate: float = 0.0, delay: float = 0.0, speed: float = 1e6) -> None:
        self.speed = speed
        self.runner: FakeRunner
        self.disk: dict[tuple[int, bytes], tuple[bytes, tuple[int, ...], tuple[int, ...]]] = {}
        self.jobs: list[_Job] = []
        self.withdrawn: list[SlowDone] = []  # stores that were taken back; to be told by the next poll
        self.is_stuck = False
        self.num_stored = self.num_loaded = self.num_failed_loads = 0
        self._failure_rate = failure_rate
        self._delay = delay
        self._random = random.Random(seed)

    def contains(self, group_id: int, key: bytes) -> bool:
        return (group_id, key) in self.disk

    def children(self, group_id: int, parent_key: bytes) -> Sequence[tuple[bytes, tuple[int, ...]]]:
        found = [
            (key, token_ids)
            for (of_group, key), (parent, token_ids, _) in self.disk.items()
            if of_group == group_id and parent == parent_key
        ]
        return found[:MAX_CHILDREN]

    def store(self, group_id: int, slot: int, key: bytes, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        self.jobs.append((False, group_id, slot, key, parent_key, token_ids))

    def load(self, group_id: int, slot: int, key: bytes) -> None:
        self.jobs.append((True, group_id, slot, key, b"", ()))
        # While it is under way the slot holds anything.
        self.runner.ram[group_id][slot] = [None] * BLOCK_SIZE

    def forget(self, group_id: int, key: bytes) -> None:
        self.disk.pop((group_id, key), None)
        for job in [job for job in self.jobs if not job[0] and job[1] == group_id and job[3] == key]:
            self.jobs.remove(job)
            self.withdrawn.append(SlowDone(False, group_id, job[2], key, False))

    def poll(self) -> list[SlowDone]:
        if self.is_stuck:
            return []
        rng = self._random
        if self.disk and rng.random() < self._failure_rate:
            del self.disk[rng.choice(list(self.disk))]
        waiting, done = [], self.withdrawn
        self.withdrawn = []
        for job in self.jobs:
            if rng.random() < self._delay:
                waiting.append(job)
                continue
            is_load, group_id, slot, key, parent_key, token_ids = job
            is_ok = rng.random() >= self._failure_rate
            if is_load:
                is_ok = is_ok and self._read(group_id, slot, key)
            elif is_ok:
                self._write(group_id, slot, key, parent_key, token_ids)
            self.num_failed_loads += is_load and not is_ok
            done.append(SlowDone(is_load, group_id, slot, key, is_ok))
        self.jobs = waiting
        rng.shuffle(done)
        return done

    @property
    def read_bytes_per_second(self) -> float | None:
        return self.speed if self.num_loaded else None

    def reset(self) -> int:
        number = len(self.disk)
        self.disk.clear()
        return number

    def _read(self, group_id: int, slot: int, key: bytes) -> bool:
        found = self.disk.get((group_id, key))
        if found is not None:
            self.runner.ram[group_id][slot] = list(found[2])
            self.num_loaded += 1
        return found is not None

    def _write(self, group_id: int, slot: int, key: bytes, parent_key: bytes, token_ids: tuple[int, ...]) -> None:
        content = []
        for value, token_id in zip(self.runner.ram[group_id][slot], token_ids, strict=True):
            is_filled = value is not None or token_id == NO_TOKEN
            assert is_filled, f"slot {slot} of group {group_id} goes to disk and is not filled"
            content.append(None if token_id == NO_TOKEN else value)
        known = self.disk.get((group_id, key))
        assert known is None or known[2] == tuple(content), "two contents under one key"
        self.disk[group_id, key] = parent_key, token_ids, tuple(content)
        self.num_stored += 1
