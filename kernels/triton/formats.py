"""Device functions for the number formats of the KV cache and the rotation of its heads. Inlined into other kernels.

Everything here is made of integer operations, additions and multiplications that round correctly, so that a card, the
interpreter and `reference/quantize.py` agree in every bit (where multiplications and additions are not fused: only
`hadamard` and `quantize_int8` have more than one rounding, and neither multiplies before it adds).

The 8-bit floats never appear as a Triton type: there is none for e4m3 below sm_89.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-redef"

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_HALF = tl.constexpr(65504.0)
# 1.5 · 2^23: a float32 within ±2^22 that is added to it is rounded half to even, and stands in the low mantissa bits.
ROUNDING_BIAS = tl.constexpr(12582912.0)
# 2^23, which does the same for numbers from 0 on.
SUBNORMAL_BIAS = tl.constexpr(8388608.0)
SUBNORMAL_BIAS_BITS = tl.constexpr(0x4B000000)


@triton.jit
def saturate_half(x):
    """float32 held within what float16 can hold; NaN stays."""
    x = tl.where(x > LARGEST_HALF, LARGEST_HALF, x)
    return tl.where(x < -LARGEST_HALF, -LARGEST_HALF, x)


@triton.jit
def round_to(x, element: tl.constexpr):
    """float32 → float16 or bfloat16, half to even; float16 saturates instead of becoming infinite. float32 passes."""
    if element == tl.bfloat16:
        # By integers: Triton's interpreter cuts the lower half off where a card rounds.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif element == tl.float16:
        return saturate_half(x).to(tl.float16)
    else:
        return x


@triton.jit
def absmax(x, AXIS: tl.constexpr):
    """max |x| along an axis of float32; NaN where there is one (a maximum of floats would drop it)."""
    # Non-negative floats are ordered like their bits, NaN above all.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def int8_scale(largest):
    """The stored scale of a head whose absmax is `largest`, float32 → float16: absmax / 127, saturated; NaN stays."""
    return saturate_half(tl.div_rn(largest, 127.0)).to(tl.float16)


@triton.jit
def quantize_int8(x, scale):
    """float32 → int8 codes under float16 scales that broadcast to x: half to even, within ±127; 0 for a scale of 0."""
    divisor = scale.to(tl.float32)
    # A scale of 0 belongs to numbers far below 1/2, which dividing by 1 rounds to the zeros that they are to become.
    quotient = tl.div_rn(x, tl.broadcast_to(tl.where(divisor == 0.0, 1.0, divisor), x.shape))
    quotient = tl.minimum(tl.maximum(quotient, -127.0), 127.0)
    return (quotient + ROUNDING_BIAS).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def encode_fp8(x, E4M3: tl.constexpr):
    """float32 → uint8: e4m3 (no infinities) or e5m2. Half to even, saturates, NaN becomes 0x7f with its sign."""
    if E4M3:
        mantissa_bits: tl.constexpr = 3
        bias: tl.constexpr = 7
        largest: tl.constexpr = 448.0
        smallest_normal: tl.constexpr = 0.015625  # 2^-6
        per_subnormal: tl.constexpr = 512.0  # 1 / 2^-9
    else:
        mantissa_bits: tl.constexpr = 2
        bias: tl.constexpr = 15
        largest: tl.constexpr = 57344.0
        smallest_normal: tl.constexpr = 6.103515625e-05  # 2^-14
        per_subnormal: tl.constexpr = 65536.0  # 1 / 2^-16
    dropped: tl.constexpr = 23 - mantissa_bits
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > largest, largest, magnitude)
    rounded = magnitude.to(tl.int32, bitcast=True)
    rounded += ((rounded >> dropped) & 1) + ((1 << (dropped - 1)) - 1)
    normal = (rounded >> dropped) - ((127 - bias) << mantissa_bits)
    # Below the normal range codes are multiples of the smallest number; rounding up into it fits as it is.
    subnormal = (magnitude * per_subnormal + SUBNORMAL_BIAS).to(tl.int32, bitcast=True) - SUBNORMAL_BIAS_BITS
    codes = tl.where(magnitude < smallest_normal, subnormal, normal)
    return (tl.where(is_nan, 0x7F, codes) | sign).to(tl.uint8)


@triton.jit
def decode_fp8(codes, E4M3: tl.constexpr):
    """uint8 → float16 of the same shape, exactly: float16 holds every number of both formats."""
    wide = codes.to(tl.uint16)
    if E4M3:
        magnitude = wide & 0x7F
        # Seven bits up, exponent and mantissa stand where float16 has them, with a bias that is 8 too small.
        value = ((magnitude << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(tl.float16)
    # e5m2 is float16 without its lower byte.
    return (wide << 8).to(tl.float16, bitcast=True)


@triton.jit
def hadamard(x, SIZE: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply consecutive blocks of SIZE channels by the orthonormal Hadamard matrix (Sylvester's order).

    The same butterflies in the same order as `reference/elementary.py`, and one multiplication behind them.

    x: float32 [ROWS, WIDTH]; SIZE: a power of two up to WIDTH; SCALE: 1 / √SIZE.
    """
    channels = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (ROWS, WIDTH))
    for bit in tl.static_range(8):
        if (1 << bit) < SIZE:
            partner = tl.gather(x, channels ^ (1 << bit), 1)
            x = tl.where((channels & (1 << bit)) == 0, x + partner, partner - x)
    return x * SCALE
