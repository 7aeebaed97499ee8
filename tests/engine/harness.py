"""Drives scheduler, cache and runner without threads or clocks, and writes down what they did."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvd.cache.manager import CacheManager
from kvd.cache.store import allocate_arena, allocate_cache
from kvd.core import BLOCK_SIZE, Request, SamplingParams, StepPlan, TokenEvent
from kvd.engine.disk_link import DiskLink
from kvd.engine.runner import Runner
from kvd.model.decoder import Decoder
from kvd.scheduler.scheduler import Rates, Scheduler, SchedulerConfig
from kvd.views import Counters

DISK_BYTES = 64 << 20
WAIT_SECONDS = 60.0
"""How long a disk thread may take for anything; no outcome depends on it unless it is exceeded."""

SWAP_IS_CHEAP = {
    "prefill_tokens_per_second": 1.0,
    "save_bytes_per_second": 1e12,
    "restore_bytes_per_second": 1e12,
    "disk_bytes_per_second": 1e12,
}
"""Rates under which everything that can be brought back is."""

COMPUTING_IS_CHEAP = {
    "prefill_tokens_per_second": 1e12,
    "save_bytes_per_second": 1.0,
    "restore_bytes_per_second": 1.0,
    "disk_bytes_per_second": 1.0,
}


def greedy(request_id: str, prompt: Sequence[int], max_tokens: int, **sampling: object) -> Request:
    """A greedy request that only its length ends."""
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Request(request_id, tuple(prompt), params, arrival_time=0.0)


def assert_same_bytes(rows: dict[int, bytes], expected: dict[int, bytes]) -> None:
    """Logits rows by position."""
    assert rows.keys() == expected.keys()
    for position in sorted(rows):
        if rows[position] != expected[position]:
            got, want = (np.frombuffer(r[position], dtype=np.float32) for r in (rows, expected))
            count, largest = np.count_nonzero(got != want), np.abs(got - want).max()
            raise AssertionError(f"position {position}: {count} logits differ, by up to {largest}")


@dataclass
class Recorder:
    """A RunnerObserver: logits as bytes by (request, position), and how often each position was computed."""

    rows: dict[tuple[str, int], bytes] = field(default_factory=dict)
    computed_times: Counter[tuple[str, int]] = field(default_factory=Counter)

    def computed(self, request_id: str, start: int, num_tokens: int) -> None:
        self.computed_times.update((request_id, position) for position in range(start, start + num_tokens))

    def logits(self, request_id: str, position: int, row: torch.Tensor) -> None:
        assert row.dtype == torch.float32
        self.rows[request_id, position] = row.numpy().tobytes()

    def rows_of(self, request_id: str) -> dict[int, bytes]:
        return {position: row for (owner, position), row in self.rows.items() if owner == request_id}

    def num_computed(self, request_id: str) -> int:
        return sum(times for (owner, _), times in self.computed_times.items() if owner == request_id)


class Harness:
    """One decoder with a cache and a scheduler of its own, stepped by hand.

    num_ram_slots  of every layer group; 0: no RAM tier
    disk_folder    for a disk tier, which needs a RAM tier; `close` ends it
    windows        what the manager is told of the layer groups' windows, if it is not the truth
    rates          by `RATE_NAMES`, fixed; else as measured
    depth          1: every step is planned before the one before it is committed
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 256,
        chunk: int = 512,
        max_seqs: int = 16,
        max_model_len: int = 2048,
        prefix_caching: bool = True,
        num_ram_slots: int = 0,
        disk_folder: Path | None = None,
        windows: Sequence[int] | None = None,
        rates: dict[str, float] | None = None,
        depth: int = 0,
        **scheduler_options: float,
    ) -> None:
        self.recorder = Recorder()
        self.now = 0.0
        self.log: list[str] = []
        self.ops = decoder.ops
        self._depth = depth
        self._ahead: StepPlan | None = None
        self._woken = threading.Event()
        kv_format, device = decoder.kv_format, decoder.ops.device
        block_bytes = [group.block_bytes for group in kv_format.groups]
        self.cache = allocate_cache(kv_format, num_blocks, device)
        self.arena = allocate_arena(kv_format, num_ram_slots, decoder.ops) if num_ram_slots else None
        self.disk: DiskLink | None = None
        if disk_folder is not None:
            assert self.arena is not None, "the disk tier works through the RAM tier"
            self.disk = DiskLink(
                str(disk_folder), DISK_BYTES, block_bytes,
                memory=self.arena.memory, wake=self._woken.set, log=self.log.append,
            )  # fmt: skip
        self.manager = CacheManager(
            num_blocks=(num_blocks,) * len(block_bytes),
            windows=tuple(group.window for group in kv_format.groups) if windows is None else windows,
            enable_prefix_caching=prefix_caching,
            key_seed=b"harness",
            num_ram_slots=(num_ram_slots,) * len(block_bytes),
            slow_tier=self.disk,
            block_bytes=block_bytes,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_seqs,
                max_num_batched_tokens=max(chunk, max_seqs),
                max_model_len=max_model_len,
                **scheduler_options,  # type: ignore[arg-type]
            ),
            self.manager,
            lambda: self.now,
            Rates(rates),
        )
        self.runner = Runner(
            decoder,
            self.cache,
            max_blocks_per_request=-(-max_model_len // BLOCK_SIZE),
            draw_seed=lambda: 1,
            arena=self.arena,
            observer=self.recorder,
        )
        self.plans: list[StepPlan] = []

    @property
    def counters(self) -> Counters:
        return self.scheduler.counters()

    def step(self) -> list[TokenEvent]:
        """Run one step; where there is nothing to run, wait for the disk if that is what is waited for."""
        self.now += 1.0
        plan = self._ahead or self.scheduler.plan()
        if plan is None:
            if self.manager.tiers.is_busy:
                assert self._woken.wait(WAIT_SECONDS), "the disk tier does not answer"
                self._woken.clear()
            return []
        self._ahead = self.scheduler.plan() if self._depth else None
        self.plans.append(plan)
        return self.scheduler.commit(plan, self.runner.run(plan))

    def run(self, requests: list[Request], max_steps: int = 4000) -> dict[str, list[TokenEvent]]:
        """Run requests that arrive together, to their end."""
        events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.scheduler.add(request)
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return events
            for event in self.step():
                events[event.request_id].append(event)
        raise AssertionError("the requests did not end")

    def settle(self) -> None:
        """Write through what has been published."""
        while self.scheduler.has_moves or self._ahead is not None:
            self.step()

    def wait_for_disk(self, num_blocks: int) -> None:
        """Until the disk tier has listed so many blocks of an earlier run."""
        assert self.disk is not None
        deadline = time.monotonic() + WAIT_SECONDS
        while self.disk.statistics().num_blocks < num_blocks:
            assert time.monotonic() < deadline, self.disk.statistics()
            time.sleep(0.005)

    def close(self) -> None:
        """Write through, and end the disk tier."""
        self.settle()
        if self.disk is not None:
            assert self.disk.close(WAIT_SECONDS)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]
