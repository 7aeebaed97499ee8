"""The a16 backend in plain torch: 16-bit activations, float32 accumulation.

The oracle of the GPU kernels; too slow to serve from and without the promise on bits. Engine thread.
"""

from __future__ import annotations

import torch

from kvd_kernels.ops import AttentionSpec, Batch, KVCache, RopeTable
from kvd_kernels.reference import linear
from kvd_kernels.reference.attention16 import attend_dense
from kvd_kernels.reference.base import ReferenceBase
from kvd_kernels.weights import Linear

DenseLinear = tuple[torch.Tensor, torch.Tensor | None]


class ReferenceOps16(ReferenceBase):
    """See the module. `activation_dtype` is float16 or bfloat16."""

    name = "reference-a16"
    arithmetic = "a16"

    def __init__(self, activation_dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        assert activation_dtype in (torch.float16, torch.bfloat16)
        self.activation_dtype = activation_dtype
        self.arithmetic_id = f"a16-{'fp16' if activation_dtype is torch.float16 else 'bf16'}-1"

    def prepare_linear(self, linear_layer: Linear) -> DenseLinear:
        return linear.prepare_dense(linear_layer)

    def prepared_bytes(self, linear_layer: Linear) -> int:
        has_bias = linear_layer.bias is not None
        return 4 * linear_layer.num_outputs * (linear_layer.num_inputs + has_bias)

    def linear(
        self,
        n: int,
        x: torch.Tensor,
        handle: DenseLinear,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        linear.apply_dense(n, x, handle, out, residual)

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
        attend_dense(batch, q, rope, self.views.of(cache, spec), spec, out, block_mass)
