"""Functions whose result is the same bits everywhere: in any shape, at any place in a row, on any thread.

Vectorised library functions (exp, sigmoid, sum, softmax) may round differently in the vector body and in the
tail of a loop, and reductions take an order that depends on the shape. Here everything is built from operations
that IEEE 754 rounds correctly element by element (add, subtract, multiply, divide, compare, integer bits), so
that a value depends on its own inputs alone. Fused operations (addcmul, lerp, add with alpha) are not used.

Stateless; any thread. All tensors are float32 unless a docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

TILE_ELEMENTS = 1 << 17
"""Elements of one temporary that still lies in the caches while a chain of element-wise passes runs over it."""

_LOG2_E = 1.44269504088896341
# ln 2 in two parts (Cody and Waite): the first has 9 bits, so its product with the exponent is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
# 1.5 · 2^23: adding it rounds to an integer, which then stands in the low mantissa bits. 127 is the exponent bias.
_ROUND_AND_BIAS = 12582912.0 + 127.0
# (e^r - 1) / r on |r| ≤ ln 2 / 2, least relative error of e^r: 2e-9. Highest power first.
_EXP_COEFFICIENTS = (
    0.001384364441037178,
    0.008374162949621677,
    0.04166800156235695,
    0.16666431725025177,
    0.4999999403953552,
    1.0,
)
_EXP_FLUSH = -88.0


def row_tiles(num_rows: int, width: int, elements: int = TILE_ELEMENTS) -> Iterator[slice]:
    """Slices of rows whose temporaries have at most `elements` elements (but at least one row)."""
    step = max(1, elements // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(num_rows, start + step))


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis by halving: x[:h] + x[h:], h the power of two below the length.

    The tree is that of the row padded with zeros to a power of two, so zeros behind a row change nothing and
    the order never depends on other axes.

    x: [..., width ≥ 1]; returns [...].
    """
    width = x.shape[-1]
    if width & (width - 1):
        half = 1 << (width.bit_length() - 1)
        folded = x[..., :half].clone()
        folded[..., : width - half] += x[..., half:]
        x, width = folded, half
    while width > 1:
        width //= 2
        x = torch.add(*x.chunk(2, -1))
    return x.squeeze(-1)


def exp_nonpositive(x: torch.Tensor) -> torch.Tensor:
    """e^x for x ≤ 0 within 2 ulp; exactly 1 at 0, exactly 0 at -inf.

    Results below the smallest normal number (x < -87.3) may be flushed to 0. NaN stays NaN.
    """
    x = x.clamp(min=_EXP_FLUSH)
    shifted = x * _LOG2_E
    shifted += _ROUND_AND_BIAS
    # The low bits hold exponent + bias; shifted into the exponent field they are the float 2^exponent, and 0 for
    # a biased exponent of 0, which is how everything at the clamp becomes an exact zero.
    power_of_two = (shifted.view(torch.int32) << 23).view(torch.float32)
    exponent = shifted.sub_(_ROUND_AND_BIAS)
    x -= exponent * _LN2_HIGH
    x -= exponent.mul_(_LN2_LOW)
    result = x * _EXP_COEFFICIENTS[0]
    for coefficient in _EXP_COEFFICIENTS[1:]:
        result += coefficient
        result *= x
    result += 1.0
    result *= power_of_two
    return result


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x), computed from e^-|x| so that nothing overflows."""
    decayed = exp_nonpositive(-x.abs())
    numerator = torch.where(x >= 0, 1.0, decayed)
    numerator /= decayed.add_(1.0)
    return numerator.mul_(x)


def hadamard(x: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply consecutive blocks of `size` channels by the orthonormal Hadamard matrix (Sylvester's order).

    Butterflies of additions, then one multiplication by 1/√size; its own inverse up to rounding.

    x: [..., channels], size a power of two that divides channels; returns a new tensor of the same shape.
    """
    assert size & (size - 1) == 0
    assert x.shape[-1] % size == 0
    blocked = x.reshape(-1, size)
    current = blocked.t().contiguous()  # channels first: every butterfly then runs over contiguous rows
    # In this form of the butterflies every stage reads neighbours and writes halves; the order comes out natural.
    for _ in range(size.bit_length() - 1):
        even, odd = current[0::2], current[1::2]
        current = torch.cat((even + odd, even - odd))
    scale = 1.0 / math.sqrt(size)
    return (current * scale).t().reshape(x.shape)
