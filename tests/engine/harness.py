"""Drives scheduler, cache and runner without threads or clocks, and writes down what they did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from kvd.cache.manager import CacheManager
from kvd.cache.store import allocate_cache
from kvd.core import BLOCK_SIZE, Request, SamplingParams, StepPlan, TokenEvent
from kvd.engine.runner import Runner
from kvd.model.decoder import Decoder
from kvd.scheduler.scheduler import Scheduler, SchedulerConfig


def greedy(request_id: str, prompt: list[int], max_tokens: int, **sampling: object) -> Request:
    """A greedy request that only its length ends."""
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Request(request_id, tuple(prompt), params, arrival_time=0.0)


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
    """One decoder with a cache and a scheduler of its own, stepped by hand."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 256,
        chunk: int = 512,
        max_seqs: int = 16,
        max_model_len: int = 2048,
        prefix_caching: bool = True,
        **scheduler_options: float,
    ) -> None:
        self.recorder = Recorder()
        self.now = 0.0
        groups = decoder.kv_format.groups
        self.manager = CacheManager(
            num_blocks=(num_blocks,) * len(groups),
            windows=tuple(group.window for group in groups),
            enable_prefix_caching=prefix_caching,
            key_seed=b"harness",
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
        )
        self.runner = Runner(
            decoder,
            allocate_cache(decoder.kv_format, num_blocks, decoder.ops.device),
            max_blocks_per_request=-(-max_model_len // BLOCK_SIZE),
            draw_seed=lambda: 1,
            observer=self.recorder,
        )
        self.plans: list[StepPlan] = []

    def step(self) -> list[TokenEvent]:
        self.now += 1.0
        plan = self.scheduler.plan()
        if plan is None:
            return []
        self.plans.append(plan)
        return self.scheduler.commit(plan, self.runner.run(plan))

    def run(self, requests: list[Request], max_steps: int = 2000) -> dict[str, list[TokenEvent]]:
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


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]
