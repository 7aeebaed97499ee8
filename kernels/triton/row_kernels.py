"""Kernels over rows of activations: embedding, gather, norm, gated activation. One program per row, or per part of it.

Sums and products are float32 whatever the activations are; results are rounded once (`formats.round_to`). Rows are
contiguous. Offsets of rows are int64: a table of embeddings has more than 2^31 elements.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvd_kernels.triton.formats import round_to


@triton.jit(do_not_specialize=["n"])
def resolve_tokens(token_ids, newest_tokens, n, BLOCK: tl.constexpr):
    """token_ids int64 [≥ n], in place: -1 - slot becomes newest_tokens[slot].

    A row of logits that was not finite has no token, which shows as a negative one; its sequence is about to end, and
    token 0 stands in for it.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    ids = tl.load(token_ids + index, mask=inside, other=0)
    newest = tl.load(newest_tokens + (-1 - ids), mask=inside & (ids < 0), other=0).to(tl.int64)
    tl.store(token_ids + index, tl.maximum(newest, 0), mask=inside & (ids < 0))


@triton.jit
def take_rows(ids, values, out, width, BLOCK: tl.constexpr):
    """out[r] = values[ids[r]], rounded to out's type. ids int64; values [any, width] of a float type."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    taken = tl.load(values + tl.load(ids + row) * width + column, mask=inside)
    if values.dtype.element_ty != out.dtype.element_ty:
        taken = round_to(taken.to(tl.float32), out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * width + column, taken, mask=inside)


@triton.jit
def take_int8_rows(ids, codes, scales, out, width, group_size, BLOCK: tl.constexpr):
    """The same of an Int8Weight: a product of 8 and 11 bits, which float32 holds exactly."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(ids + row)
    code = tl.load(codes + token * width + column, mask=inside, other=0)
    scale = tl.load(scales + token * (width // group_size) + column // group_size, mask=inside, other=0.0)
    value = code.to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + column, round_to(value, out.dtype.element_ty), mask=inside)


@triton.jit
def take_int4_rows(ids, codes, scales, offsets, out, width, group_size, BLOCK: tl.constexpr):
    """The same of an Int4Weight. s·q is exact in float32 (4 and 11 bits), so fusing it with + o changes no bit.

    width, the number of channels, is even: two of them share a byte.
    """
    row = tl.program_id(0)
    start = tl.program_id(1) * BLOCK
    pair = start // 2 + tl.arange(0, BLOCK // 2)
    column = start + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(ids + row)
    byte = tl.load(codes + token * (width // 2) + pair, mask=pair < width // 2, other=0)
    code = tl.interleave(byte & 15, byte >> 4).to(tl.float32)
    group = token * (width // group_size) + column // group_size
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(offsets + group, mask=inside, other=0.0).to(tl.float32)
    value = code * scale + offset
    tl.store(out + row.to(tl.int64) * width + column, round_to(value, out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm(x, weight, out, width, eps, BLOCK: tl.constexpr, IS_LOOPED: tl.constexpr):
    """out = x / sqrt(mean(x²) + eps) · weight of one row; out may be x; weight float32 [width].

    IS_LOOPED: a row of more than BLOCK channels, which is gone through twice.
    """
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    if IS_LOOPED:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            values = tl.load(x + row + start + column, mask=start + column < width, other=0.0).to(tl.float32)
            squares += values * values
        inverse = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        for start in range(0, width, BLOCK):
            inside = start + column < width
            values = tl.load(x + row + start + column, mask=inside, other=0.0).to(tl.float32)
            scaled = values * inverse * tl.load(weight + start + column, mask=inside, other=0.0)
            tl.store(out + row + start + column, round_to(scaled, out.dtype.element_ty), mask=inside)
    else:
        inside = column < width
        values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(weight + column, mask=inside, other=0.0)
        inverse = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
        tl.store(out + row + column, round_to(values * inverse * weights, out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    """out = silu(gate) · up; gate_up [rows, 2 · width] holds gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    # From e^-|gate|, so that nothing overflows.
    decayed = tl.exp(-tl.abs(gate))
    silu = gate * tl.where(gate >= 0.0, 1.0, decayed) / (1.0 + decayed)
    tl.store(out + row * width + column, round_to(silu * up, out.dtype.element_ty), mask=inside)
