"""Plan in, samples out: the only part of the engine that touches tensors. Engine thread only.

The runner remembers, per request, what sampling needs and the scheduler does not: the generator's key and the
token counts for penalties. It learns of a request from `StepPlan.new_requests` and forgets it on
`ended_request_ids`; a preempted request stays known, so that recomputation cannot change what it samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from kvd.cache.store import Arena, restore_blocks, save_blocks
from kvd.core import Logprobs, PlanItem, Sample, StepPlan, StepResult
from kvd.engine.batch_builder import BatchBuilder
from kvd.engine.sampling_rows import RequestSampling, SamplingRows
from kvd.model.decoder import Decoder
from kvd_kernels.ops import Batch, KVCache, SamplingBatch, SamplingResult


class RunnerObserver(Protocol):
    """Sees what was computed; tests count work and compare logits with it."""

    def computed(self, request_id: str, start: int, num_tokens: int) -> None: ...

    def logits(self, request_id: str, position: int, row: torch.Tensor) -> None:
        """`row` (float32 [vocab]) yields the token at `position`; it is overwritten by the next step."""
        ...


class Runner:
    """Runs plans on one decoder and one cache.

    draw_seed: gives a key to requests without a seed of their own. arena: the RAM tier's memory, where there is one.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_blocks_per_request: int,
        draw_seed: Callable[[], int],
        arena: Arena | None = None,
        observer: RunnerObserver | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._arena = arena
        self._builder = BatchBuilder(
            len(cache.format.groups),
            max_tokens=decoder.max_tokens,
            max_seqs=decoder.max_seqs,
            max_blocks=max_blocks_per_request,
        )
        self._program = decoder.ops.record(self._builder.batch, cache, partial(decoder.forward, cache=cache))
        self._mass_program: _MassProgram | None = None
        self._known: dict[str, RequestSampling] = {}
        self._sampling_rows = SamplingRows(decoder.max_seqs)
        self._newest_tokens = np.zeros(decoder.max_seqs, dtype=np.int64)
        self._draw_seed = draw_seed
        self._observer = observer

    def run(self, plan: StepPlan) -> StepResult:
        """Forget, register, save, copy, restore, compute, sample."""
        started = time.monotonic()
        for request_id in plan.ended_request_ids:
            self._known.pop(request_id, None)
        for request in plan.new_requests:
            seed = request.sampling.seed
            self._known[request.request_id] = RequestSampling(request, self._draw_seed() if seed is None else seed)
        save_seconds, restore_seconds = self._move_blocks(plan)
        samples: tuple[Sample, ...] = ()
        masses: tuple[tuple[float, ...], ...] = ()
        if plan.items:
            batch = self._builder.fill(plan, self._newest_tokens)
            items = [item for item in plan.items if item.samples]
            with_mass = self._with_mass() if any(item.wants_mass for item in plan.items) else None
            program = self._program if with_mass is None else with_mass.program
            result = program.run(batch, self._sampling_batch(items) if items else None)
            if self._observer is not None:
                self._report(self._observer, plan, program.logits)
            if result is not None:
                samples = self._accept(items, result)
            if with_mass is not None:
                masses = with_mass.masses(plan.items)
        return StepResult(plan.step_id, samples, time.monotonic() - started, save_seconds, restore_seconds, masses)

    def _move_blocks(self, plan: StepPlan) -> tuple[float, float]:
        """Saves, copies and restores, in this order; the seconds that saves and restores took."""
        ops, cache, arena = self._decoder.ops, self._cache, self._arena
        save_seconds = restore_seconds = 0.0
        if plan.saves:
            assert arena is not None, "a plan saves blocks where there is no RAM tier"
            started = time.monotonic()
            save_blocks(ops, cache, arena, plan.saves)
            save_seconds = time.monotonic() - started
        for copy in plan.copies:
            ops.copy_block(cache, copy.group_id, copy.source, copy.target, copy.num_tokens)
        if plan.restores:
            assert arena is not None, "a plan restores blocks where there is no RAM tier"
            started = time.monotonic()
            restore_blocks(ops, cache, arena, plan.restores)
            restore_seconds = time.monotonic() - started
        return save_seconds, restore_seconds

    def _with_mass(self) -> _MassProgram:
        if self._mass_program is None:
            self._mass_program = _MassProgram(self._decoder, self._cache, self._builder.batch)
        return self._mass_program

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


class _MassProgram:
    """The step program once more, with attention that reports its mass; made when it is first asked for."""

    def __init__(self, decoder: Decoder, cache: KVCache, batch: Batch) -> None:
        num_layers = len(cache.format.groups[0].layers)
        shape = (num_layers, *batch.groups[0].block_tables.shape)
        self._mass = torch.zeros(shape, dtype=torch.float32, device=decoder.ops.device)
        forward = partial(decoder.forward, cache=cache, block_mass=self._mass)
        self.program = decoder.ops.record(batch, cache, forward)

    def masses(self, items: Sequence[PlanItem]) -> tuple[tuple[float, ...], ...]:
        """Of the latest run: for each item that wants it, the mass of its table entries of group 0 over all layers."""
        rows = [row for row, item in enumerate(items) if item.wants_mass]
        lengths = [len(items[row].block_tables[0]) for row in rows]
        by_layer = self._mass[:, rows, : max(lengths)].double().cpu()
        total = torch.zeros_like(by_layer[0])
        for of_layer in by_layer:  # one after the other: a sum over a dimension has an order of torch's own
            total += of_layer
        return tuple(tuple(row[:length]) for row, length in zip(total.tolist(), lengths, strict=True))
