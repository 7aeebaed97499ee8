"""The a8 backend in plain torch: int8 activations, exact integer sums, float32 in between.

It states the arithmetic of the CPU and serves where no native kernels run. Every output row is the same bits
whatever shares its batch, however a prompt was cut, on any number of threads. Engine thread.
"""

from __future__ import annotations

import torch

from kvd_kernels.ops import AttentionSpec, Batch, KVCache, RopeTable
from kvd_kernels.reference import attention, linear
from kvd_kernels.reference.base import ReferenceBase
from kvd_kernels.reference.splits import refuse_unsupported
from kvd_kernels.weights import Linear


class ReferenceOps(ReferenceBase):
    """See the module. fp8 KV raises NotImplementedError."""

    name = "reference"
    arithmetic = "a8"
    arithmetic_id = "a8-1"
    activation_dtype = torch.float32

    def prepare_linear(self, linear_layer: Linear) -> linear.PreparedLinear:
        return linear.prepare(linear_layer)

    def prepared_bytes(self, linear_layer: Linear) -> int:
        return linear.prepared_bytes(linear_layer)

    def linear(
        self,
        n: int,
        x: torch.Tensor,
        handle: linear.PreparedLinear,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        linear.apply(n, x, handle, out, residual)

    def rope_and_write(
        self,
        batch: Batch,
        qkv: torch.Tensor,
        rope: RopeTable,
        cache: KVCache,
        spec: AttentionSpec,
        q_out: torch.Tensor,
    ) -> None:
        refuse_unsupported(self.views.of(cache, spec).format)
        super().rope_and_write(batch, qkv, rope, cache, spec, q_out)

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
        layer = self.views.of(cache, spec)
        refuse_unsupported(layer.format)
        attention.attend(batch, q, rope, layer, spec, out, block_mass)
