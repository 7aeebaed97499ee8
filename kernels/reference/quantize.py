"""Turning floats into integer codes, and the 8-bit float formats, all by operations that round correctly.

Codes are held as float32 or float64: products and sums of integers below 2^24 or 2^53 are exact there in any
order, which is what makes a matmul over codes independent of its shape, its tiling and its threads.

Stateless; any thread.
"""

from __future__ import annotations

import torch

KV_LEVELS = 127.0
_LARGEST_HALF = 65504.0


def round_to_levels(x: torch.Tensor, levels: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric rounding per row: s = absmax / levels (1 where that is 0), q = round-half-even(x / s) in ±levels.

    x: float32 [..., width]; returns (codes float32 [..., width], scales float32 [...]).
    """
    scales = x.abs().amax(-1).div_(levels)
    scales = torch.where(scales == 0, 1.0, scales)
    codes = torch.div(x, scales.unsqueeze(-1)).round_()
    return codes.clamp_(-levels, levels), scales


def exact_bits(num_terms: int) -> tuple[int, int]:
    """Bits of two fixed-point operands whose dot product over num_terms terms stays exact in float64."""
    total = 53 - (num_terms - 1).bit_length()
    first = min(22, (total + 1) // 2)
    return first, min(22, total - first)


def fixed_point(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the nearest integers after scaling by a power of two: |q| ≤ 2^bits, x ≈ s · q.

    The error is at most 2^-bits of the row's absmax; numbers of few bits near the absmax come out exact.

    x: float32 [..., width], bits ≤ 22; returns (codes float32 [..., width], scales float32 [...]).
    """
    assert 1 <= bits <= 22
    biased_exponent = x.abs().amax(-1).view(torch.int32) >> 23  # absmax < 2^(biased_exponent - 126)
    scales = ((biased_exponent + (1 - bits)).clamp_(1, 254) << 23).view(torch.float32)
    return torch.div(x, scales.unsqueeze(-1)).round_(), scales


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 per row with a 16-bit scale, as the cache stores it.

    s = float16(absmax / 127), at most the largest float16; q = round-half-even(x / s) clamped to ±127, 0 where
    s is 0 (a row too small for a float16 scale is a row of zeros).

    x: float32 [..., head_dim]; returns (codes int8 [..., head_dim], scales float16 [...]).
    """
    scales = x.abs().amax(-1).div_(KV_LEVELS).clamp_(max=_LARGEST_HALF).to(torch.float16)
    divisor = scales.float()
    divisor = torch.where(divisor == 0, torch.inf, divisor)
    codes = torch.div(x, divisor.unsqueeze(-1)).round_().clamp_(-KV_LEVELS, KV_LEVELS)
    return codes.to(torch.int8), scales


class MiniFloat:
    """An 8-bit float format, converted through the bits of float32: e4m3 (no infinities) or e5m2.

    Encoding rounds half to even and saturates at the largest finite number; NaN becomes 0x7f.
    """

    def __init__(self, exponent_bits: int, largest: float, *, has_infinity: bool) -> None:
        self.mantissa_bits = 7 - exponent_bits
        self.bias = (1 << (exponent_bits - 1)) - 1
        self.largest = largest
        self.has_infinity = has_infinity
        self.smallest_normal = 2.0 ** (1 - self.bias)
        self.smallest = 2.0 ** (1 - self.bias - self.mantissa_bits)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """float32 → uint8 of the same shape."""
        magnitude = x.abs().clamp(max=self.largest)
        dropped_bits = 23 - self.mantissa_bits
        bits = magnitude.contiguous().view(torch.int32)
        bits = bits + ((bits >> dropped_bits) & 1) + ((1 << (dropped_bits - 1)) - 1)
        normal = (bits >> dropped_bits) - ((127 - self.bias) << self.mantissa_bits)
        # Below the normal range codes are multiples of the smallest number; rounding up into it fits as it is.
        subnormal = torch.nan_to_num(magnitude / self.smallest).round_().clamp_(max=127.0).to(torch.int32)
        codes = torch.where(magnitude < self.smallest_normal, subnormal, normal)
        codes = torch.where(x.isnan(), 0x7F, codes)
        return (codes | (x.signbit().to(torch.int32) << 7)).to(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 → float32 of the same shape, exactly."""
        wide = codes.to(torch.int32)
        magnitude = wide & 0x7F
        normal_bits = (magnitude << (23 - self.mantissa_bits)) + ((127 - self.bias) << 23)
        normal = normal_bits.view(torch.float32)
        subnormal = magnitude.float() * self.smallest
        values = torch.where(magnitude < (1 << self.mantissa_bits), subnormal, normal)
        if self.has_infinity:
            infinity = ((1 << (7 - self.mantissa_bits)) - 1) << self.mantissa_bits
            values = torch.where(magnitude == infinity, torch.inf, values)
            values = torch.where(magnitude > infinity, torch.nan, values)
        else:
            values = torch.where(magnitude == 0x7F, torch.nan, values)
        return torch.where(wide > 127, -values, values)


MINI_FLOATS = {
    "fp8_e4m3": MiniFloat(4, 448.0, has_infinity=False),
    "fp8_e5m2": MiniFloat(5, 57344.0, has_infinity=True),
}
