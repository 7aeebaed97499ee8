"""Rotary tables, computed once in float64 and rounded to float32.

Formulas: RoFormer (arXiv 2104.09864); the `llama3` frequency scaling as in Llama 3.1's reference code.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvd.model.spec import RopeSpec
from kvd_kernels.ops import RopeTable


def inverse_frequencies(rope: RopeSpec, rotary_dim: int) -> np.ndarray:
    """float64 [rotary_dim / 2]: radians per position of each pair."""
    frequencies = rope.theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if rope.kind == "default":
        return frequencies
    # Long wavelengths are stretched by `factor`, short ones stay, those in between are interpolated.
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def build_rope_table(rope: RopeSpec, rotary_dim: int, max_positions: int, device: torch.device) -> RopeTable:
    """cos and sin, float32 [max_positions, rotary_dim / 2]."""
    angles = np.outer(np.arange(max_positions, dtype=np.float64), inverse_frequencies(rope, rotary_dim))
    return RopeTable(
        torch.from_numpy(np.cos(angles).astype(np.float32)).to(device),
        torch.from_numpy(np.sin(angles).astype(np.float32)).to(device),
    )
