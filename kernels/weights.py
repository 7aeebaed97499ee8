"""The forms that a weight matrix can have in memory, before a backend packs it for itself.

Every 4-bit checkpoint format becomes `Int4Weight`: w = s·q + o with o = −z·s, per group of input channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Unsigned 4-bit codes with a scale and an offset per output and group of input channels.

    codes    uint8 [num_outputs, num_inputs / 2]; the low nibble is the even input channel
    scales   float16 [num_outputs, num_inputs / group_size]
    offsets  float16, same shape; w[n, k] = scales[n, k // group_size] · q[n, k] + offsets[n, k // group_size]
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    group_size: int

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1] * 2


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Signed 8-bit codes, symmetric, a scale per output and group.

    codes   int8 [num_outputs, num_inputs]
    scales  float16 [num_outputs, num_inputs / group_size]; w[n, k] = scales[n, k // group_size] · q[n, k]
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """values: float16, bfloat16 or float32 [num_outputs, num_inputs]."""

    values: torch.Tensor

    @property
    def num_outputs(self) -> int:
        return self.values.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.values.shape[1]


WeightMatrix = Int4Weight | Int8Weight | FloatWeight


@dataclass(frozen=True, slots=True)
class Linear:
    """One or several matrices over the same input, outputs side by side (q, k, v; or gate, up).

    `parts` keep their own form, since a checkpoint may leave one of them in 16 bits.
    bias: float32 [sum of num_outputs] or None.
    """

    parts: tuple[WeightMatrix, ...]
    bias: torch.Tensor | None = None

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs


def stored_bytes(weight: WeightMatrix) -> int:
    """Bytes of a matrix in the form that it has here."""
    if isinstance(weight, FloatWeight):
        return weight.values.nbytes
    if isinstance(weight, Int8Weight):
        return weight.codes.nbytes + weight.scales.nbytes
    return weight.codes.nbytes + weight.scales.nbytes + weight.offsets.nbytes


def dequantize(weight: WeightMatrix) -> torch.Tensor:
    """The exact values as float32 [num_outputs, num_inputs] (float32 holds s·q + o only up to rounding)."""
    if isinstance(weight, FloatWeight):
        return weight.values.float()
    if isinstance(weight, Int8Weight):
        return weight.codes.float() * weight.scales.float().repeat_interleave(weight.group_size, dim=1)
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=2).flatten(1).float()
    scales = weight.scales.float().repeat_interleave(weight.group_size, dim=1)
    offsets = weight.offsets.float().repeat_interleave(weight.group_size, dim=1)
    return codes * scales + offsets


def quantize_int8(values: torch.Tensor, group_size: int) -> Int8Weight:
    """Symmetric rounding to int8 per group: s = absmax / 127 in float16.

    values: [num_outputs, num_inputs] of any float type; group_size must divide num_inputs.
    """
    num_outputs, num_inputs = values.shape
    grouped = values.float().view(num_outputs, num_inputs // group_size, group_size)
    scales = (grouped.abs().amax(dim=2) / 127).to(torch.float16)
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    codes = torch.round(grouped / divisor[:, :, None]).clamp_(-127, 127).to(torch.int8)
    return Int8Weight(codes.view(num_outputs, num_inputs), scales, group_size)
