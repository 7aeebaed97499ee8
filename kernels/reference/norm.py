"""Root-mean-square norm and the gated activation: row by row, the same bits in every batch. Stateless."""

from __future__ import annotations

import torch

from kvd_kernels.reference.elementary import row_tiles, silu, tree_sum


def rms_norm(n: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight in float32, then rounded to out's type; rows 0 … n-1."""
    width = x.shape[1]
    for rows in row_tiles(n, width):
        values = x[rows].float()
        # By way of float64, whose root rounds to the correct float32: torch's own float32 root may be an ulp off.
        root = (tree_sum(values * values) / width + eps).double().sqrt_().float()
        out[rows] = (values / root[:, None]).mul_(weight).to(out.dtype)


def silu_mul(n: int, gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) · up in float32, then rounded to out's type; rows 0 … n-1."""
    width = out.shape[1]
    for rows in row_tiles(n, width):
        gate = gate_up[rows, :width].float()
        out[rows] = silu(gate).mul_(gate_up[rows, width:].float()).to(out.dtype)
