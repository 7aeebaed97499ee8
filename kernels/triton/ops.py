"""The Ops of the GPU. Each op is a thin call into the module that has its kernels. Engine thread only.

`device` is a CUDA device, or the CPU where Triton interprets. Everything that is launched is asynchronous on the
current stream, which is the default one; only `sample` waits. What `record` makes is in `program`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvd_kernels.ops import (
    AttentionSpec,
    Batch,
    KVCache,
    Ops,
    RopeTable,
    SamplingBatch,
    SamplingResult,
    StepProgram,
    Transfer,
)
from kvd_kernels.triton import attention, kv_writes, linear, rows, sampling
from kvd_kernels.triton.cards import Card
from kvd_kernels.triton.device import open_device
from kvd_kernels.triton.program import Programs
from kvd_kernels.triton.tuning import Tuned
from kvd_kernels.weights import Linear, WeightMatrix


class TritonOps(Ops):
    """See the module. activation_dtype: float16 or bfloat16."""

    name = "triton"
    arithmetic = "a16"
    default_step_tokens = 2048
    steps_ahead = 1

    def __init__(self, device: torch.device, card: Card, activation_dtype: torch.dtype = torch.float16) -> None:
        assert activation_dtype in (torch.float16, torch.bfloat16)
        self.device = device
        self.card = card
        self.activation_dtype = activation_dtype
        self.arithmetic_id = f"a16-{'fp16' if activation_dtype is torch.float16 else 'bf16'}-1"
        self._linears = linear.LinearKernels(device, card, activation_dtype)
        self._writes = kv_writes.KVWrites()
        self._attention = attention.AttentionKernels(device, card, activation_dtype)
        self._device, self.memory = open_device(device)
        self._sampler = sampling.Sampler(device, self._device)
        self._programs = Programs(self._device, self._sampler)

    @property
    def label(self) -> str:
        return f"triton sm_{self.card.architecture}, {self.card.name}"

    def use_tuning(self, tuned: Tuned) -> None:
        """Take the launch configurations that were measured on this card; what a program has recorded stays."""
        self._linears.use_tuning(tuned)

    def prepare_linear(self, linear_layer: Linear) -> linear.PackedLinear:
        return self._linears.prepare(linear_layer)

    def prepared_bytes(self, linear_layer: Linear) -> int:
        return self._linears.prepared_bytes(linear_layer)

    def linear(
        self, n: int, x: torch.Tensor, handle: Any, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        self._linears.apply(n, x, handle, out, residual)

    def prepare_embedding(self, weight: WeightMatrix) -> rows.PackedEmbedding:
        return rows.prepare_embedding(weight, self.device)

    def embed(self, batch: Batch, table: rows.PackedEmbedding, out: torch.Tensor) -> None:
        rows.embed(batch.num_tokens, batch.token_ids, table, out)

    def rms_norm(self, n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        rows.rms_norm(n, x, weight, eps, out)

    def silu_mul(self, n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        rows.silu_mul(n, gate_up, out)

    def gather(self, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
        rows.gather(batch.num_logit_rows, batch.logit_rows, x, out)

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        self._writes.rope_and_write(batch, qkv, rope, cache, spec, q_out)

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        self._programs.copy_block(self._writes.copy_block, cache, group_id, source, target, num_tokens)

    def attend(
        self,
        batch: Batch,
        q: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        out: torch.Tensor,
        block_mass: torch.Tensor | None = None,
    ) -> None:
        self._attention.attend(batch, q, rope, cache, spec, out, block_mass)

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> SamplingResult:
        return self._sampler.launch(logits, params).result()

    def copy_rows(
        self, source: torch.Tensor, source_rows: Sequence[int], target: torch.Tensor, target_rows: Sequence[int]
    ) -> Transfer:
        transfer = self._programs.copy_rows(source, source_rows, target, target_rows)
        return super().copy_rows(source, source_rows, target, target_rows) if transfer is None else transfer

    def settle(self) -> None:
        self._programs.settle()

    def allocate_host(self, num_rows: int, width: int) -> torch.Tensor:
        return self._device.pinned_bytes(num_rows * width).view(num_rows, width)

    def record(self, batch: Batch, cache: KVCache, forward: Callable[[Batch], torch.Tensor]) -> StepProgram:
        return self._programs.record(batch, cache, forward)
