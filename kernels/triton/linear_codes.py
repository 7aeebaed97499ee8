"""Device functions for packed weights: from words to operands of the tensor cores. Inlined into the linear kernels.

Packed layout (made by `packing`). A line of 16 words of 32 bits holds one output's weights for one chunk of input
channels: 128 channels of 4 bits or 64 of 8 bits. Half h (0 low, 1 high) of word i holds, in its bits from p · BITS on,
the code of channel 32 · p + 2 · i + h of the chunk. So a shift and a mask of whole words give plane p, 32 channels in
their order, as pairs of 16-bit lanes, which is what the tensor cores take: nothing is moved between lanes.

Arithmetic. The tensor cores multiply activations by integer codes, exactly, and add up in float32; scales and offsets
come in once per group, in float32: acc += (s · c) · Σ q x + o · Σ x.
- float16: a code below 256 in the low bits of a lane is the subnormal number code · 2^-24, which tensor cores take as
  they take any other; c = 2^24. A 4-bit code left at bits 4-7 is 16 times that, and has its own accumulator.
- bfloat16: with the exponent of 128 set, the lane is 128 + code (7 bits of mantissa). For 4 bits -128 · Σ x goes into
  the offset; for 8 bits the bias is subtracted before, which is exact.
8-bit codes are stored plus 128. The numbers 16 (words of a line) and 32 (channels of a plane) are part of the layout
and stand as they are.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"
# ruff: noqa: SIM300 (compile-time constants are written in capitals; they stand on the left all the same)

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def pairs(words, BN: tl.constexpr):
    """int32 [BN, 16] → int16 [BN, 32]: both halves of every word, the low one first."""
    low = (words & 0xFFFF).to(tl.int16)
    high = (words >> 16).to(tl.int16)
    return tl.reshape(tl.join(low, high), (BN, 32))


@triton.jit
def plane(words, p: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, IN_PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Plane p as the 16-bit numbers that the module describes: [BN, 32] of DTYPE.

    IN_PLACE: odd planes of 4 bits stay at bits 4-7, 16 times as large; float16 only.
    """
    if DTYPE == tl.float16:
        if BITS == 8:
            codes = (words >> (8 * p)) & 0x00FF00FF
        elif IN_PLACE and p % 2 == 1:
            codes = (words >> (4 * (p - 1))) & 0x00F000F0
        else:
            codes = (words >> (4 * p)) & 0x000F000F
        # The sign bits are set and taken away again: that keeps LLVM from cutting the 32-bit mask into 16-bit ones, and
        # costs no instruction, since both fold into the mask.
        return tl.abs(pairs(codes | -0x7FFF8000, BN).to(DTYPE, bitcast=True))
    elif BITS == 8:
        shifted = words >> (8 * p)
        biased = pairs((shifted & 0x007F007F) | 0x43004300, BN).to(DTYPE, bitcast=True)
        # The code minus 128: 128 + (code & 127) loses 128 where bit 7 is set and 256 where it is not.
        bias = pairs((~shifted & 0x00800080) | 0x43004300, BN).to(DTYPE, bitcast=True)
        if INTERPRETED:  # which keeps bfloat16 as bit patterns, and subtracts those; the difference is exact either way
            return (biased.to(tl.float32) - bias.to(tl.float32)).to(DTYPE)
        return biased - bias
    else:
        return pairs(((words >> (4 * p)) & 0x000F000F) | 0x43004300, BN).to(DTYPE, bitcast=True)


@triton.jit
def scale_and_offset(packed, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Float32 factors of a group for Σ (code as `_plane` gives it) x and for Σ x; without the factor 2^24.

    packed: int32 with the float16 scale below and the float16 offset above (4 bits), or the float16 scale (8 bits).
    """
    if BITS == 8:
        scale = packed.to(tl.float32)
        offset = scale * -128.0
    else:
        scale = (packed & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        offset = (packed >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if DTYPE == tl.bfloat16:
            offset -= scale * 128.0
    return scale, offset


@triton.jit
def product(left, right, sums):
    """sums + left · right in float32, of 16-bit operands."""
    if INTERPRETED and left.dtype == tl.bfloat16:
        # The interpreter keeps bfloat16 as bit patterns, and multiplies those.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums)
