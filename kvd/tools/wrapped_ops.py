"""Backends that are wrapped to measure something: one that watches, one with linears in float32.

Purpose: activation statistics for scaling, taken from the arithmetic that serves; and a judge for cache formats whose
linears add no rounding noise of their own.
Owner thread: the one that runs the decoder.
Invariant: what a wrapper does not override is computed by the wrapped backend, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvd.tools.awq_scaling import BlockStatistics, InputStatistics
from kvd_kernels.ops import AttentionSpec, Batch, KVCache, Ops, RopeTable, SamplingBatch, SamplingResult
from kvd_kernels.weights import FloatWeight, Linear, WeightMatrix, dequantize

LINEARS_PER_BLOCK = 4  # qkv, output, gate_up, down: the order in which the decoder packs them


class WrappedOps(Ops):
    """Hands every op to `inner`."""

    def __init__(self, inner: Ops) -> None:
        self.name = inner.name
        self.arithmetic = inner.arithmetic
        self.arithmetic_id = inner.arithmetic_id
        self.device = inner.device
        self.activation_dtype = inner.activation_dtype
        self._inner = inner

    def prepare_linear(self, linear: Linear) -> Any:
        return self._inner.prepare_linear(linear)

    def linear(
        self, n: int, x: torch.Tensor, handle: Any, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        self._inner.linear(n, x, handle, out, residual)

    def prepare_embedding(self, weight: WeightMatrix) -> Any:
        return self._inner.prepare_embedding(weight)

    def prepared_bytes(self, linear: Linear) -> int:
        return self._inner.prepared_bytes(linear)

    def embed(self, batch: Batch, table: Any, out: torch.Tensor) -> None:
        self._inner.embed(batch, table, out)

    def rms_norm(self, n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self._inner.rms_norm(n, x, weight, eps, out)

    def silu_mul(self, n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.silu_mul(n, gate_up, out)

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        self._inner.rope_and_write(batch, qkv, rope, cache, spec, q_out)

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
        self._inner.attend(batch, q, rope, cache, spec, out, block_mass)

    def gather(self, batch: Batch, x: torch.Tensor, out: torch.Tensor) -> None:
        self._inner.gather(batch, x, out)

    def sample(self, logits: torch.Tensor, params: SamplingBatch) -> SamplingResult:
        return self._inner.sample(logits, params)

    def copy_block(self, cache: KVCache, group_id: int, source: int, target: int, num_tokens: int) -> None:
        self._inner.copy_block(cache, group_id, source, target, num_tokens)

    def settle(self) -> None:
        self._inner.settle()


class FloatLinearOps(WrappedOps):
    """Every linear computes with the exact values of its weights and unrounded activations, attention as ever.

    a8 rounds activations to int8, so that any small change of its input, a cache in bf16 instead of fp16 say, comes
    out with rounding noise of its own; that noise is larger than what a good cache format costs. Layers that
    several decoders have in common are prepared once, and kept while this object lives.
    """

    def __init__(self, inner: Ops) -> None:
        super().__init__(inner)
        self._prepared: dict[int, tuple[Linear, Any]] = {}

    def prepare_linear(self, linear: Linear) -> Any:
        # The Linear is kept beside its handle, since an id is unique among living objects only.
        if id(linear) not in self._prepared:
            self._prepared[id(linear)] = (linear, self._inner.prepare_linear(_floats(linear)))
        return self._prepared[id(linear)][1]

    def prepared_bytes(self, linear: Linear) -> int:
        return self._inner.prepared_bytes(_floats(linear))


def _floats(linear: Linear) -> Linear:
    return Linear(tuple(FloatWeight(dequantize(part)) for part in linear.parts), linear.bias)


@dataclass(slots=True)
class _Site:
    """A packed linear and what arrived at its input."""

    handle: Any
    sum_abs: torch.Tensor
    num_rows: int = 0
    samples: list[torch.Tensor] = field(default_factory=list)


class RecordingOps(WrappedOps):
    """Looks at the inputs of linears while `recording`.

    Every `sample_stride`-th row of an input is kept, and |x| of all rows is summed. Serves one decoder.
    """

    def __init__(self, inner: Ops, *, sample_stride: int) -> None:
        super().__init__(inner)
        self.recording = False
        self._sample_stride = sample_stride
        self._sites: list[_Site] = []

    def block_statistics(self, index: int) -> BlockStatistics:
        """What the linears of block `index` saw, and forget it."""
        first = index * LINEARS_PER_BLOCK
        taken = []
        for site in self._sites[first : first + LINEARS_PER_BLOCK]:
            assert site.num_rows, "nothing was recorded"
            taken.append(InputStatistics((site.sum_abs / site.num_rows).float(), torch.cat(site.samples)))
            site.samples = []
        return BlockStatistics(*taken)

    def prepare_linear(self, linear: Linear) -> Any:
        site = _Site(self._inner.prepare_linear(linear), torch.zeros(linear.num_inputs, dtype=torch.float64))
        self._sites.append(site)
        return site

    def linear(
        self, n: int, x: torch.Tensor, handle: Any, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> None:
        if self.recording:
            rows = x[:n].detach().float().cpu()
            handle.sum_abs += rows.abs().sum(dim=0, dtype=torch.float64)
            first = -handle.num_rows % self._sample_stride
            handle.samples.append(rows[first :: self._sample_stride].clone())
            handle.num_rows += n
        self._inner.linear(n, x, handle.handle, out, residual)
