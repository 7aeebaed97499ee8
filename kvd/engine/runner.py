"""Plan in, samples out: the only part of the engine that touches tensors. Engine thread only.

The runner remembers, per request, what sampling needs and the scheduler does not: the generator's key and the
token counts for penalties. It learns of a request from `StepPlan.new_requests` and forgets it on
`ended_request_ids`; a preempted request stays known, so that recomputation cannot change what it samples.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch

from kvd.core import Logprobs, PlanItem, Request, Sample, StepPlan, StepResult
from kvd.engine.batch_builder import BatchBuilder
from kvd.model.decoder import Decoder
from kvd_kernels.ops import KVCache, SamplingBatch, SamplingResult

_MASK64 = (1 << 64) - 1


class RunnerObserver(Protocol):
    """Sees what was computed; tests count work and compare logits with it."""

    def computed(self, request_id: str, start: int, num_tokens: int) -> None: ...

    def logits(self, request_id: str, position: int, row: torch.Tensor) -> None:
        """`row` (float32 [vocab]) yields the token at `position`; it is overwritten by the next step."""
        ...


@dataclass(slots=True)
class _Known:
    """What the runner remembers of one request."""

    request: Request
    key: int
    wants_counts: bool
    prompt_counts: tuple[torch.Tensor, torch.Tensor] | None
    bias: tuple[torch.Tensor, torch.Tensor] | None
    stop_ids: torch.Tensor
    output_counts: Counter[int] = field(default_factory=Counter)


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
        self._known: dict[str, _Known] = {}
        self._newest_tokens = np.zeros(decoder.max_seqs, dtype=np.int64)
        self._draw_seed = draw_seed
        self._observer = observer

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Forget, register, copy, compute, sample."""
        started = time.monotonic()
        for request_id in plan.ended_request_ids:
            self._known.pop(request_id, None)
        for request in plan.new_requests:
            self._known[request.request_id] = self._register(request)
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

    def _register(self, request: Request) -> _Known:
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._draw_seed()
        wants_counts = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        )
        prompt_counts = None
        if sampling.repetition_penalty != 1.0:
            ids, counts = np.unique(np.asarray(request.prompt_token_ids, dtype=np.int64), return_counts=True)
            prompt_counts = (torch.from_numpy(ids), torch.from_numpy(counts))
        bias = None
        if sampling.logit_bias:
            token_ids, values = zip(*sampling.logit_bias, strict=True)
            bias = (torch.tensor(token_ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32))
        stop_ids = torch.tensor(sorted(sampling.stop_token_ids), dtype=torch.int64)
        return _Known(request, sampling_key(seed, request.choice_index), wants_counts, prompt_counts, bias, stop_ids)

    def _report(self, observer: RunnerObserver, plan: StepPlan, logits: torch.Tensor) -> None:
        row = 0
        for item in plan.items:
            observer.computed(item.request_id, item.start, item.num_tokens)
            if item.samples:
                observer.logits(item.request_id, item.start + item.num_tokens, logits[row])
                row += 1

    def _accept(self, items: list[PlanItem], result: SamplingResult) -> tuple[Sample, ...]:
        samples = []
        for item, token_id, logprobs in zip(items, result.token_ids, result.logprobs, strict=True):
            if token_id is None:
                samples.append(Sample(item.request_id, None))
                continue
            self._newest_tokens[item.slot] = token_id
            known = self._known[item.request_id]
            if known.wants_counts:
                known.output_counts[token_id] += 1
            wanted = None if logprobs is None else Logprobs(logprobs[0], tuple(logprobs[1]))
            samples.append(Sample(item.request_id, token_id, wanted))
        return tuple(samples)

    def _sampling_batch(self, items: list[PlanItem]) -> SamplingBatch:
        known = [self._known[item.request_id] for item in items]
        params = [entry.request.sampling for entry in known]
        positions = [item.start + item.num_tokens for item in items]

        def floats(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32)

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64)

        return SamplingBatch(
            temperature=floats([p.temperature for p in params]),
            top_k=integers([p.top_k for p in params]),
            top_p=floats([p.top_p for p in params]),
            min_p=floats([p.min_p for p in params]),
            presence=floats([p.presence_penalty for p in params]),
            frequency=floats([p.frequency_penalty for p in params]),
            repetition=floats([p.repetition_penalty for p in params]),
            seeds=integers([entry.key for entry in known]),
            positions=integers(positions),
            prompt_counts=[entry.prompt_counts for entry in known],
            output_counts=[_as_tensors(entry.output_counts) for entry in known],
            bias=[entry.bias for entry in known],
            banned=[
                entry.stop_ids if position - len(entry.request.prompt_token_ids) < p.min_tokens else None
                for entry, p, position in zip(known, params, positions, strict=True)
            ],
            num_logprobs=[-1 if p.num_logprobs is None else p.num_logprobs for p in params],
        )


def _as_tensors(counts: Counter[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not counts:
        return None
    return torch.tensor(list(counts), dtype=torch.int64), torch.tensor(list(counts.values()), dtype=torch.int64)


def sampling_key(seed: int, choice_index: int) -> int:
    """One int64 key from a seed and a choice index, well mixed (the finaliser of SplitMix64, Steele et al. 2014)."""
    value = (seed + 0x9E3779B97F4A7C15 * (choice_index + 1)) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    value ^= value >> 31
    return value - (1 << 64) if value >= 1 << 63 else value
