"""The kernels of linear layers: one tile kernel for every number of rows, a matrix-vector kernel, and their helpers.

Layout and arithmetic of packed weights are those of `linear_codes`; products are exact, sums are float32, and what is
written is rounded once. Rows beyond n and channels beyond K enter as zeros and cost no traffic.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from kvd_kernels.triton.formats import round_to
from kvd_kernels.triton.linear_codes import pairs, plane, product, scale_and_offset


@triton.jit(do_not_specialize=["n", "num_chunks", "split_chunks", "is_partial", "has_bias", "has_residual"])
def tile_kernel(
    x,
    words,
    scales,
    sums,
    bias,
    residual,
    out,
    partial,
    n,
    num_inputs,
    num_outputs,
    padded_outputs,
    num_chunks,
    split_chunks,
    x_stride,
    residual_stride,
    out_stride,
    sums_stride,
    is_partial,
    has_bias,
    has_residual,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SUMS_GIVEN: tl.constexpr,
):
    """BN outputs of BM rows over chunks from split · split_chunks on: grid (output tiles, row tiles, splits).

    words int32 [num_chunks, padded_outputs, 16]; scales [(num_chunks + 1) · groups per chunk, padded_outputs];
    sums float32 [num_chunks · groups per chunk, sums_stride]: Σ x of every group and row, as wide as the row tiles
    together (SUMS_GIVEN; else it comes from a product with ones); bias float32 [num_outputs]; residual and out by rows.
    is_partial: the sums go as they are to partial, float32 [splits, n, num_outputs], and out is left alone.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    planes: tl.constexpr = 16 // BITS
    channels: tl.constexpr = planes * 32
    planes_per_group: tl.constexpr = GROUP // 32
    groups: tl.constexpr = planes // planes_per_group
    is_exact8: tl.constexpr = BITS == 8 and dtype == tl.bfloat16
    # With many rows a second accumulator would cost more registers than the shift that it saves.
    in_place: tl.constexpr = BITS == 4 and dtype == tl.float16 and not SUMS_GIVEN
    second: tl.constexpr = in_place and planes_per_group > 1

    split = tl.program_id(2)
    first = split * split_chunks
    last = tl.minimum(first + split_chunks, num_chunks)
    rows_n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows_m = tl.program_id(1) * BM + tl.arange(0, BM)
    lane = tl.arange(0, 32)
    line = first.to(tl.int64) * padded_outputs + rows_n
    words_at = words + line[:, None] * 16 + tl.arange(0, 16)[None, :]
    scale_at = scales + first.to(tl.int64) * groups * padded_outputs + rows_n
    x_at = x + rows_m.to(tl.int64)[None, :] * x_stride + (first * channels + lane)[:, None]
    live = (rows_m < n)[None, :]
    # Made like the codes, so that the compiler gives both products the same order of channels, and x is loaded once.
    ones = pairs(tl.full((BN, 16), 0x3C003C00 if dtype == tl.float16 else 0x3F803F80, tl.int32), BN)
    ones = ones.to(dtype, bitcast=True)

    # Scales are fetched one chunk ahead, since the compiler pipelines only what feeds a product; behind the last chunk
    # there are some more.
    s0 = tl.load(scale_at)
    s1 = s0
    s2 = s0
    s3 = s0
    if groups > 1:
        s1 = tl.load(scale_at + padded_outputs)
    if groups > 2:
        s2 = tl.load(scale_at + 2 * padded_outputs)
        s3 = tl.load(scale_at + 3 * padded_outputs)
    acc = tl.zeros((BN, BM), tl.float32)
    for chunk in range(first, last):
        word = tl.load(words_at)
        words_at += padded_outputs * 16
        scale_at += groups * padded_outputs
        n0 = tl.load(scale_at)
        n1 = n0
        n2 = n0
        n3 = n0
        if groups > 1:
            n1 = tl.load(scale_at + padded_outputs)
        if groups > 2:
            n2 = tl.load(scale_at + 2 * padded_outputs)
            n3 = tl.load(scale_at + 3 * padded_outputs)
        part = tl.zeros((BN, BM), tl.float32)
        sixteenfold = tl.zeros((BN, BM), tl.float32)
        x_sum = tl.zeros((BN, BM), tl.float32)
        for p in tl.static_range(planes):
            inside = chunk * channels + p * 32 + lane < num_inputs
            x_tile = tl.load(x_at + p * 32, mask=live & inside[:, None], other=0.0)
            codes = plane(word, p, BN, BITS, in_place, dtype)
            if second and p % 2 == 1:
                sixteenfold = product(codes, x_tile, sixteenfold)
            else:
                part = product(codes, x_tile, part)
            if not SUMS_GIVEN and not is_exact8:
                x_sum = product(ones, x_tile, x_sum)
            if (p + 1) % planes_per_group == 0:
                if p // planes_per_group == 0:
                    packed = s0
                elif p // planes_per_group == 1:
                    packed = s1
                elif p // planes_per_group == 2:
                    packed = s2
                else:
                    packed = s3
                scale, offset = scale_and_offset(packed, BITS, dtype)
                if second:
                    part += sixteenfold * 0.0625
                if dtype == tl.float16:
                    if in_place and not second and p % 2 == 1:
                        scale *= 1048576.0
                    else:
                        scale *= 16777216.0
                acc += part * scale[:, None]
                if not is_exact8:
                    if SUMS_GIVEN:
                        x_sums = tl.load(sums + (chunk * groups + p // planes_per_group) * sums_stride + rows_m)
                        acc += x_sums[None, :] * offset[:, None]
                    else:
                        acc += x_sum * offset[:, None]
                if p + 1 < planes:
                    part = tl.zeros((BN, BM), tl.float32)
                    sixteenfold = tl.zeros((BN, BM), tl.float32)
                    x_sum = tl.zeros((BN, BM), tl.float32)
        x_at += channels
        s0 = n0
        s1 = n1
        s2 = n2
        s3 = n3

    is_output = live & (rows_n < num_outputs)[:, None]
    row = rows_m.to(tl.int64)[None, :]
    if is_partial != 0:
        tl.store(partial + (split * n + row) * num_outputs + rows_n[:, None], acc, mask=is_output)
    else:
        acc += tl.load(bias + rows_n, mask=rows_n < num_outputs * has_bias, other=0.0)[:, None]
        at = residual + row * residual_stride + rows_n[:, None]
        acc += tl.load(at, mask=live & (rows_n < num_outputs * has_residual)[:, None], other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + rows_n[:, None], round_to(acc, out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_chunks", "split_chunks", "is_partial", "has_bias", "has_residual"])
def vector_kernel(
    x,
    words,
    scales,
    bias,
    residual,
    out,
    partial,
    num_inputs,
    num_outputs,
    padded_outputs,
    num_chunks,
    split_chunks,
    is_partial,
    has_bias,
    has_residual,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
):
    """One row of x: BN outputs, products in float32 without tensor cores: grid (output tiles, 1, splits).

    Tensors as in `tile_kernel`. A code moves into the mantissa of a float32, which is 1 + code / 16 or 1 + code / 256
    then: no conversion is needed, and the 1 goes into the offset.
    """
    planes: tl.constexpr = 16 // BITS
    channels: tl.constexpr = planes * 32
    planes_per_group: tl.constexpr = GROUP // 32
    groups: tl.constexpr = planes // planes_per_group
    codes: tl.constexpr = 1 << BITS
    mask: tl.constexpr = (codes - 1) << (23 - BITS)

    split = tl.program_id(2)
    first = split * split_chunks
    last = tl.minimum(first + split_chunks, num_chunks)
    rows_n = tl.program_id(0) * BN + tl.arange(0, BN)
    pair = tl.arange(0, 16)
    line = first.to(tl.int64) * padded_outputs + rows_n
    words_at = words + line[:, None] * 16 + pair[None, :]
    scale_at = scales + first.to(tl.int64) * groups * padded_outputs + rows_n
    x_at = x + first * channels + 2 * pair
    acc = tl.zeros((BN, 16), tl.float32)
    for chunk in range(first, last):
        word = tl.load(words_at)
        part = tl.zeros((BN, 16), tl.float32)
        x_sum = tl.zeros((16,), tl.float32)
        for p in tl.static_range(planes):
            channel = chunk * channels + p * 32 + 2 * pair
            x_low = tl.load(x_at + p * 32, mask=channel < num_inputs, other=0.0).to(tl.float32)
            x_high = tl.load(x_at + p * 32 + 1, mask=channel + 1 < num_inputs, other=0.0).to(tl.float32)
            low = word << (23 - BITS - BITS * p)
            high = word << 3 if BITS * (p + 1) < 7 else word >> (BITS * (p + 1) - 7)
            part += ((low & mask) | 0x3F800000).to(tl.float32, bitcast=True) * x_low[None, :]
            part += ((high & mask) | 0x3F800000).to(tl.float32, bitcast=True) * x_high[None, :]
            x_sum += x_low + x_high
            if (p + 1) % planes_per_group == 0:
                packed = tl.load(scale_at + p // planes_per_group * padded_outputs)
                scale, offset = scale_and_offset(packed, BITS, tl.float16)
                scale *= codes
                offset -= scale
                acc += part * scale[:, None]
                acc += x_sum[None, :] * offset[:, None]
                if p + 1 < planes:
                    part = tl.zeros((BN, 16), tl.float32)
                    x_sum = tl.zeros((16,), tl.float32)
        words_at += padded_outputs * 16
        scale_at += groups * padded_outputs
        x_at += channels
    y = tl.sum(acc, axis=1)
    is_output = rows_n < num_outputs
    if is_partial != 0:
        tl.store(partial + split.to(tl.int64) * num_outputs + rows_n, y, mask=is_output)
    else:
        y += tl.load(bias + rows_n, mask=rows_n < num_outputs * has_bias, other=0.0)
        y += tl.load(residual + rows_n, mask=rows_n < num_outputs * has_residual, other=0.0).to(tl.float32)
        tl.store(out + rows_n, round_to(y, out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["n", "num_splits", "has_bias", "has_residual"])
def finish_splits_kernel(
    partial,
    bias,
    residual,
    out,
    n,
    num_outputs,
    num_splits,
    residual_stride,
    out_stride,
    has_bias,
    has_residual,
    MAX_SPLITS: tl.constexpr,
    BN: tl.constexpr,
):
    """out = Σ over splits + bias + residual, rounded once: grid (output tiles, n). The order of the sum is fixed.

    partial: float32 [num_splits, n, num_outputs]. All splits are loaded at once: one after the other each would wait.
    """
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    at = partial + (split.to(tl.int64) * n + row)[:, None] * num_outputs + columns[None, :]
    is_part = (split < num_splits)[:, None] & (columns < num_outputs)[None, :]
    y = tl.sum(tl.load(at, mask=is_part, other=0.0), axis=0)
    y += tl.load(bias + columns, mask=columns < num_outputs * has_bias, other=0.0)
    at = residual + row * residual_stride + columns
    y += tl.load(at, mask=columns < num_outputs * has_residual, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, round_to(y, out.dtype.element_ty), mask=columns < num_outputs)


@triton.jit(do_not_specialize=["n", "has_bias", "has_residual"])
def finish_rows_kernel(
    partial,
    bias,
    residual,
    out,
    n,
    num_outputs,
    residual_stride,
    out_stride,
    has_bias,
    has_residual,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """out = partial + bias + residual, rounded once: grid (output tiles, row tiles).

    partial: float32 [n, num_outputs].
    """
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    row = rows.to(tl.int64)[:, None]
    live = (rows < n)[:, None]
    is_output = live & (columns < num_outputs)[None, :]
    y = tl.load(partial + row * num_outputs + columns[None, :], mask=is_output, other=0.0)
    y += tl.load(bias + columns, mask=columns < num_outputs * has_bias, other=0.0)[None, :]
    at = residual + row * residual_stride + columns[None, :]
    is_added = live & (columns < num_outputs * has_residual)[None, :]
    y += tl.load(at, mask=is_added, other=0.0).to(tl.float32)
    at = out + row * out_stride + columns[None, :]
    tl.store(at, round_to(y, out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["n"])
def sums_kernel(x, sums, n, num_inputs, x_stride, sums_stride, GROUP: tl.constexpr, BM: tl.constexpr):
    """sums[g, m] = Σ of x over the channels of group g, float32, zero in rows from n on: grid (groups, row tiles)."""
    group = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    channel = group * GROUP + tl.arange(0, GROUP)
    inside = (rows < n)[:, None] & (channel < num_inputs)[None, :]
    at = x + rows.to(tl.int64)[:, None] * x_stride + channel[None, :]
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + group * sums_stride + rows, tl.sum(values, axis=1))


@triton.jit(do_not_specialize=["first_output", "planes_per_group"])
def dequantize_kernel(
    words,
    scales,
    out,
    first_output,
    num_inputs,
    padded_outputs,
    planes_per_group,
    BITS: tl.constexpr,
    BN: tl.constexpr,
):
    """out[r] = s · q + o of output first_output + r, rounded to 16 bits: grid (output tiles, chunks).

    out [rows of a multiple of BN, num_inputs]; its dtype is that of the activations.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    planes: tl.constexpr = 16 // BITS
    channels: tl.constexpr = planes * 32
    chunk = tl.program_id(1)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    outputs = first_output + rows
    line = chunk.to(tl.int64) * padded_outputs + outputs
    word = tl.load(words + line[:, None] * 16 + tl.arange(0, 16)[None, :])
    lane = tl.arange(0, 32)
    for p in tl.static_range(planes):
        scale_at = (
            scales
            + (chunk.to(tl.int64) * (planes // planes_per_group) + p // planes_per_group) * padded_outputs
            + outputs
        )
        scale, offset = scale_and_offset(tl.load(scale_at), BITS, tl.float16)
        codes = pairs((word >> (BITS * p)) & (0x00FF00FF if BITS == 8 else 0x000F000F), BN).to(tl.float32)
        values = codes * scale[:, None] + offset[:, None]
        channel = chunk * channels + p * 32 + lane
        at = out + rows.to(tl.int64)[:, None] * num_inputs + channel[None, :]
        tl.store(at, round_to(values, dtype), mask=(channel < num_inputs)[None, :])
