"""The step program of the GPU: one upload, a graph or single launches, sampling, one wait. Engine thread only.

A step in which every sequence has one token and wants the next one is a decode step: padded to the next bucket, it is
one launch of a graph that was captured for that size (`prepare`). Every other step, and every step of a program that
was not prepared, is launched op by op with its own sizes. Either way Python is done before the device is, so the step
after may be launched before the tokens of this one are known: they stay on the device, by slot, where the next step's
metadata names them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvd_kernels.kv_format import BLOCK_TOKENS
from kvd_kernels.ops import (
    Batch,
    GroupTables,
    KVCache,
    PendingStep,
    SamplingBatch,
    SamplingResult,
    StepProgram,
    Transfer,
)
from kvd_kernels.triton.batch_mirror import BatchMirror, StepSize
from kvd_kernels.triton.device import Device, Event, Graph
from kvd_kernels.triton.rows import resolve_tokens
from kvd_kernels.triton.token_kernels import keep_tokens
from kvd_kernels.triton.transfers import Transfers

Forward = Callable[[Batch], torch.Tensor]
CopyBlock = Callable[[KVCache, int, int, int, int], None]
DENSE_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP, COARSE_BUCKET_STEP, FIRST_COARSE = 8, 16, 64
"""Buckets: so dense that padding wastes little, so few that capturing them all takes seconds."""


def buckets(max_seqs: int) -> list[int]:
    """Sizes of decode steps for which graphs are captured, ascending; the last is max_seqs."""
    sizes = {size for size in DENSE_BUCKETS if size < max_seqs}
    size = DENSE_BUCKETS[-1]
    while size < max_seqs:
        sizes.add(size)
        size += BUCKET_STEP if size < FIRST_COARSE else COARSE_BUCKET_STEP
    return sorted({*sizes, max_seqs})


class PendingTokens(Protocol):
    """Tokens that are being chosen. token_ids: int64 [rows] on the device, -1 where a row is not finite."""

    @property
    def token_ids(self) -> torch.Tensor: ...

    def result(self) -> SamplingResult:
        """Wait for them."""


class TokenSampler(Protocol):
    """Chooses tokens on the compute stream."""

    def launch(self, logits: torch.Tensor, params: SamplingBatch) -> PendingTokens:
        """params may be filled anew when this returns."""

    def warm_up(self, logits: torch.Tensor, max_rows: int) -> None:
        """Compile and allocate for steps of up to max_rows rows."""


class _LaunchedStep(PendingStep):
    def __init__(self, tokens: PendingTokens | None, end: Event) -> None:
        self._tokens, self._end = tokens, end

    def result(self) -> SamplingResult | None:
        self._end.wait()
        return None if self._tokens is None else self._tokens.result()


class GraphProgram(StepProgram):
    """A forward pass over the mirror of one batch and one cache."""

    def __init__(
        self,
        device: Device,
        mirror: BatchMirror,
        transfers: Transfers,
        sampler: TokenSampler,
        cache: KVCache,
        forward: Forward,
    ) -> None:
        self.logits = torch.empty(0, dtype=torch.float32)
        self._device = device
        self._mirror = mirror
        self._transfers = transfers
        self._sampler = sampler
        self._cache = cache
        self._forward = forward
        self._graphs: dict[int, Graph] = {}

    def run(self, batch: Batch, params: SamplingBatch | None) -> SamplingResult | None:
        return self.launch(batch, params).result()

    @torch.inference_mode()
    def launch(self, batch: Batch, params: SamplingBatch | None) -> PendingStep:
        mirror = self._mirror
        assert batch is mirror.source, "a program runs on the batch that it was made for"
        self._wait_for_readers(batch)
        bucket = self._bucket_of(batch)
        if bucket is not None:
            mirrored = mirror.upload(batch, StepSize(bucket, bucket, bucket))
            self._graphs[bucket].replay()
        else:
            mirrored = mirror.upload(batch, StepSize(batch.num_tokens, batch.num_seqs, batch.num_logit_rows))
            self._compute(mirrored)
        tokens = None
        if params is not None:
            assert params.num_rows == batch.num_logit_rows, "every logits row is sampled, or none"
            tokens = self._sampler.launch(self.logits, params)
            if batch.logit_slots is not None and mirrored.logit_slots is not None:
                self._device.launch(
                    keep_tokens, params.num_rows, mirrored.logit_slots, tokens.token_ids, mirror.newest_tokens
                )
        return _LaunchedStep(tokens, self._device.compute.mark())

    @torch.inference_mode()
    def prepare(self, report: Callable[[int, int], None]) -> None:
        """Compile what steps of all sizes need, and capture decode steps; no request pays for it later.

        report: called with (how many sizes are done, of how many). The largest come first, so that whatever grows with
        the size is allocated once, and has its place before a graph remembers it. No block of the cache is written.
        """
        mirror = self._mirror
        captured = buckets(min(mirror.max_seqs, mirror.max_tokens))[::-1]
        prefills = _powers_of_two(mirror.max_tokens)
        total = len(prefills) + len(captured)
        for done, num_tokens in enumerate(prefills):
            report(done, total)
            self._compute(mirror.upload(self._rehearsal([num_tokens]), StepSize(num_tokens, 1, 1)))
        mirror.keep([StepSize(bucket, bucket, bucket) for bucket in captured])
        self._sampler.warm_up(self.logits, mirror.max_seqs)
        latest: Graph | None = None
        for done, bucket in enumerate(captured, start=len(prefills)):
            report(done, total)
            mirrored = mirror.upload(self._rehearsal([1] * bucket), StepSize(bucket, bucket, bucket))
            self._compute(mirrored)  # what is compiled, loaded or allocated at first must not be so during capture
            latest = self._device.capture(lambda mirrored=mirrored: self._compute(mirrored), latest)  # type: ignore[misc]
            self._graphs[bucket] = latest
        self._device.compute.mark().wait()
        report(total, total)

    def _compute(self, mirrored: Batch) -> None:
        self._device.launch(resolve_tokens, mirrored.num_tokens, mirrored.token_ids, self._mirror.newest_tokens)
        self.logits = self._forward(mirrored)

    def _bucket_of(self, batch: Batch) -> int | None:
        """The captured size that a decode step runs at; None where it has to be launched op by op."""
        if not batch.num_tokens == batch.num_seqs == batch.num_logit_rows != 0:
            return None
        return min((bucket for bucket in self._graphs if bucket >= batch.num_tokens), default=None)

    def _wait_for_readers(self, batch: Batch) -> None:
        """Order the step behind copies that still read blocks which it writes to."""
        if not self._transfers.is_reading:
            return
        for pool, group in zip(self._cache.pools, batch.groups, strict=True):
            slots = group.write_slots[: batch.num_tokens].numpy()
            self._transfers.before_write(pool, set((slots // BLOCK_TOKENS).tolist()))

    def _rehearsal(self, lengths: Sequence[int]) -> Batch:
        """A batch of the host whose sequences have nothing in their tables and write nowhere."""
        num_seqs, num_tokens = len(lengths), sum(lengths)
        narrow = torch.zeros(max(num_tokens, num_seqs), dtype=torch.int32)
        wide = torch.zeros(num_tokens, dtype=torch.int64)
        table = torch.zeros((num_seqs, 1), dtype=torch.int32)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        group = GroupTables(table, table, narrow, torch.full_like(wide, -1))
        return Batch(
            wide, narrow, ends.int(), ends[1:] - 1, (group,) * len(self._cache.pools), num_tokens, num_seqs, num_seqs,
            max_query_tokens=max(lengths), max_slots=self._mirror.max_blocks * BLOCK_TOKENS,
        )  # fmt: skip


def _powers_of_two(largest: int) -> list[int]:
    """`largest`, then all powers of two below it, falling."""
    return [largest, *(1 << exponent for exponent in reversed(range(largest.bit_length())) if 1 << exponent < largest)]


class Programs:
    """Makes the programs of one device, and orders what else is done to the pools of their caches.

    Programs of the same batch share its mirror, and so the newest tokens.
    """

    def __init__(self, device: Device, sampler: TokenSampler) -> None:
        self._device = device
        self._sampler = sampler
        self._transfers = Transfers(device)
        self._mirrors: weakref.WeakValueDictionary[int, BatchMirror] = weakref.WeakValueDictionary()

    def record(self, batch: Batch, cache: KVCache, forward: Forward) -> GraphProgram:
        """See `Ops.record`."""
        mirror = self._mirrors.get(id(batch))  # which keeps the batch alive, so the id stays its own
        if mirror is None:
            mirror = self._mirrors[id(batch)] = BatchMirror(self._device, batch)
        return GraphProgram(self._device, mirror, self._transfers, self._sampler, cache, forward)

    def copy_rows(
        self, source: torch.Tensor, source_rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]
    ) -> Transfer | None:
        """See `Ops.copy_rows`; None, and nothing done, where both lie in host memory."""
        if self._device.holds(source) or self._device.holds(target):
            return self._transfers.copy_rows(source, source_rows, target, target_rows)
        return None

    def copy_block(
        self, copy: CopyBlock, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int
    ) -> None:
        """See `Ops.copy_block`; copy launches it."""
        self._transfers.before_write(cache.pools[group_id], (target,))
        self._device.launch(copy, cache, group_id, source, target, num_tokens)

    def settle(self) -> None:
        """See `Ops.settle`."""
        for stream in (self._device.compute, self._device.copies):
            stream.mark().wait()
