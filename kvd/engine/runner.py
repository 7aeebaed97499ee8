"""Plan in, samples out: the only part of the engine that touches tensors. Engine thread only.

The runner remembers, per request, what sampling needs and the scheduler does not: the generator's key and the
token counts for penalties. It learns of a request from `StepPlan.new_requests` and forgets it on
`ended_request_ids`; a preempted request stays known, so that recomputation cannot change what it samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch

from kvd.core import Logprobs, PlanItem, Sample, StepPlan, StepResult
from kvd.engine.batch_builder import BatchBuilder
from kvd.engine.sampling_rows import RequestSampling, SamplingRows
from kvd.model.decoder import Decoder
from kvd_kernels.ops import KVCache, SamplingBatch, SamplingResult


class RunnerObserver(Protocol):
    """Sees what was computed; tests count work and compare logits with it."""

    def computed(self, request_id: str, start: int, num_tokens: int) -> None: ...

    def logits(self, request_id: str, position: int, row: torch.Tensor) -> None:
        """`row` (float32 [vocab]) yields the token at `position`; it is overwritten by the next step."""
        ...


class Runner:
    """Runs plans on one decoder and one cache.

    draw_seed: gives a key to requests without a seed of their own.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_blocks_per_request: int,
        draw_seed: Callable[[], int],
        observer: RunnerObserver | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._builder = BatchBuilder(
            len(cache.format.groups),
            max_tokens=decoder.max_tokens,
            max_seqs=decoder.max_seqs,
            max_blocks=max_blocks_per_request,
        )
        self._program = decoder.ops.record(self._builder.batch, cache, partial(decoder.forward, cache=cache))
        self._known: dict[str, RequestSampling] = {}
        self._sampling_rows = SamplingRows(decoder.max_seqs)
        self._newest_tokens = np.zeros(decoder.max_seqs, dtype=np.int64)
        self._draw_seed = draw_seed
        self._observer = observer

    def run(self, plan: StepPlan) -> StepResult:
        """Forget, register, copy, compute, sample."""
        started = time.monotonic()
        for request_id in plan.ended_request_ids:
            self._known.pop(request_id, None)
        for request in plan.new_requests:
            seed = request.sampling.seed
            self._known[request.request_id] = RequestSampling(request, self._draw_seed() if seed is None else seed)
        for copy in plan.copies:
            self._decoder.ops.copy_block(self._cache, copy.group_id, copy.source, copy.target, copy.num_tokens)
        samples: tuple[Sample, ...] = ()
        if plan.items:
            batch = self._builder.fill(plan, self._newest_tokens)
            items = [item for item in plan.items if item.samples]
            result = self._program.run(batch, self._sampling_batch(items) if items else None)
            if self._observer is not None:
                self._report(self._observer, plan, self._program.logits)
            if result is not None:
                samples = self._accept(items, result)
        return StepResult(plan.step_id, samples, time.monotonic() - started)

    def _sampling_batch(self, items: list[PlanItem]) -> SamplingBatch:
        known = self._known
        return self._sampling_rows.fill(
            [known[item.request_id] for item in items], [item.start + len(item.token_ids) for item in items]
        )

    def _report(self, observer: RunnerObserver, plan: StepPlan, logits: torch.Tensor) -> None:
        row = 0
        for item in plan.items:
            observer.computed(item.request_id, item.start, item.num_tokens)
            if item.samples:
                observer.logits(item.request_id, item.start + item.num_tokens, logits[row])
                row += 1

    def _accept(self, items: list[PlanItem], result: SamplingResult) -> tuple[Sample, ...]:
        """Note what was sampled, for the steps to come, and report it."""
        samples = []
        for item, token_id, logprobs in zip(items, result.token_ids, result.logprobs, strict=True):
            request_id = item.request_id
            if token_id is None:
                samples.append(Sample(request_id, None))
                continue
            self._newest_tokens[item.slot] = token_id
            counts = self._known[request_id].output_counts
            if counts is not None:
                counts.add(token_id)
            samples.append(Sample(request_id, token_id, logprobs and Logprobs(logprobs[0], tuple(logprobs[1]))))
        return tuple(samples)
