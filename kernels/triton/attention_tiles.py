"""Device functions of paged attention: one tile of keys and values, from the block layout to scores and sums.

Sizes
- ROWS      rows of queries of one thread block: row r is token r // G of the tile under head r % G of a KV head that
            G heads share
- TILE      token slots of one step of a loop, a multiple of 16; NUM_BLOCKS = TILE / 16 table entries
- PADDED    head_dim rounded up to a power of two; channels from HEAD_DIM on are zeros

Keys come first: scores are [TILE, ROWS] and sums [PADDED, ROWS]. The second side of a matrix product may be as small as
8, and the heads of a KV head are all the rows that one token has; and no warp unpacks what another one has unpacked.

A block is read in the order in which it lies, so that a thread's 16 bytes are 16 bytes of memory; what the layout means
is then said by reshape and permute, and the compiler moves the bytes, still packed, to where the products want them.

Scores are in units of log2: `row_factors` holds scale · log2(e), and the power of two that `prepare_queries` took out.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvd_kernels.triton.formats import round_to

BLOCK = tl.constexpr(16)
HIDDEN = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BIAS_PAIRS = tl.constexpr(16)


WEIGHT_BITS = tl.constexpr(15)
"""Weights of the softmax are held 2^15 times their size, as large as float16 allows: small ones keep their bits. Their
sum is as much too large."""
SMALLEST_SCALE = tl.constexpr(5.9604644775390625e-08)  # 2^-24; below it there is only 0, whose codes are 0

INT8_BITS = tl.constexpr("""
    { .reg .b32 biased;
      xor.b32 biased, $2, 0x80808080;
      prmt.b32 $0, biased, 0, 0x4140;
      prmt.b32 $1, biased, 0, 0x4342; }
""")
E5M2_BITS = tl.constexpr("""
    { prmt.b32 $0, $2, 0, 0x1404;
      prmt.b32 $1, $2, 0, 0x3424; }
""")
E4M3_BITS = tl.constexpr("""
    { .reg .b32 low, high, signs;
      prmt.b32 low, $2, 0, 0x1404;
      prmt.b32 high, $2, 0, 0x3424;
      and.b32 signs, low, 0x80008000;
      shr.u32 low, low, 1;
      and.b32 low, low, 0x3f803f80;
      or.b32 $0, low, signs;
      and.b32 signs, high, 0x80008000;
      shr.u32 high, high, 1;
      and.b32 high, high, 0x3f803f80;
      or.b32 $1, high, signs; }
""")


@triton.jit
def half_bits(elements, TYPE: tl.constexpr):
    """One-byte elements → float16 by moving bits; see `to_operand`.

    Written twice: element by element for the interpreter, and four at a time in a register for a card, which the
    compiler does not find by itself and which takes a quarter of the instructions. A test compares the two.
    """
    if INTERPRETED:
        if TYPE == "int8":
            return (elements.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16).to(tl.float16, bitcast=True)
        wide = elements.to(tl.uint16) << 8
        if TYPE == "fp8_e4m3":
            wide = (wide & 0x8000) | ((wide & 0x7F00) >> 1)
        return wide.to(tl.float16, bitcast=True)
    bits: tl.constexpr = INT8_BITS if TYPE == "int8" else E4M3_BITS if TYPE == "fp8_e4m3" else E5M2_BITS
    return tl.inline_asm_elementwise(bits, "=r,=r,r", [elements], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def to_operand(elements, TYPE: tl.constexpr, OPERAND: tl.constexpr):
    """Stored elements → the type of a product's operand, exactly, in units of `unit_of`.

    int8: a code c becomes the float16 with the bits of c + 128, a subnormal number: (c + 128) · 2^-24. fp8_e4m3:
    exponent and mantissa go where float16 has them, with a bias that is 8 too small: value · 2^-8. (Its NaN, which only
    a step whose own logits are NaN writes, becomes 480 · 2^-8.) The others are what they are.
    """
    if TYPE == "int8" or TYPE == "fp8_e4m3" or TYPE == "fp8_e5m2":
        return half_bits(elements, TYPE).to(OPERAND)
    return elements.to(OPERAND)


@triton.jit
def unit_of(TYPE: tl.constexpr):
    """What an operand of `to_operand` is to be multiplied by."""
    if TYPE == "int8":
        return 16777216.0
    if TYPE == "fp8_e4m3":
        return 256.0
    return 1.0


@triton.jit
def may_be_nan(TYPE: tl.constexpr):
    """Whether an operand of `to_operand` can be no number, whatever the stored bytes are."""
    result: tl.constexpr = TYPE != "int8" and TYPE != "fp8_e4m3"
    return result


@triton.jit
def product(left, right, sums):
    """sums + left · right in float32; operands float16, bfloat16, or float32 that holds no more than tf32 does."""
    if INTERPRETED and left.dtype == tl.bfloat16:
        # The interpreter keeps bfloat16 as bit patterns, and multiplies those.
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums, input_precision="tf32")


@triton.jit
def load_keys(
    keys, blocks, stride,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    TYPE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """K of whole blocks int64 [NUM_BLOCKS] → OPERAND [TILE, PADDED]. keys: of a head in block 0; stride: elements."""
    inner = tl.arange(0, BLOCK * PADDED)
    pointers = keys + blocks[:, None] * stride + inner[None, :]
    if HEAD_DIM == PADDED:
        elements = tl.load(pointers)
    else:
        elements = tl.load(pointers, mask=inner[None, :] < BLOCK * HEAD_DIM, other=0)
    elements = tl.reshape(elements, [NUM_BLOCKS, PADDED // 4, BLOCK, 4])
    elements = tl.reshape(tl.permute(elements, [0, 2, 1, 3]), [NUM_BLOCKS * BLOCK, PADDED])
    return to_operand(elements, TYPE, OPERAND)


@triton.jit
def load_values(
    values, blocks, stride,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    TYPE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """V of whole blocks → OPERAND [PADDED, TILE]; see `load_keys`."""
    inner = tl.arange(0, BLOCK * PADDED)
    if HEAD_DIM == PADDED:
        elements = tl.load(values + blocks[:, None] * stride + inner[None, :])
    else:
        quad, rest = inner // (4 * PADDED), inner % (4 * PADDED)
        pointers = values + blocks[:, None] * stride + (quad * 4 * HEAD_DIM + rest)[None, :]
        elements = tl.load(pointers, mask=rest[None, :] < 4 * HEAD_DIM, other=0)
    elements = tl.reshape(elements, [NUM_BLOCKS, BLOCK // 4, PADDED, 4])
    elements = tl.reshape(tl.permute(elements, [2, 0, 1, 3]), [PADDED, NUM_BLOCKS * BLOCK])
    return to_operand(elements, TYPE, OPERAND)


@triton.jit
def load_scales(scales, blocks, stride, TILE: tl.constexpr):
    """float16 scales of whole blocks → float32 [TILE]. scales: of one KV head of block 0; stride: in scales."""
    pointers = scales + blocks[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    return tl.reshape(tl.load(pointers), [TILE]).to(tl.float32)


@triton.jit
def load_entries(table, firsts, slot, num_slots, NUM_BLOCKS: tl.constexpr, PARTIAL: tl.constexpr):
    """(block ids int64 [NUM_BLOCKS], key positions int32 [TILE]) of the entries from slot // 16 on.

    PARTIAL: some slots may not exist; their blocks are 0 and their positions mean nothing.
    """
    entries = slot // BLOCK + tl.arange(0, NUM_BLOCKS)
    if PARTIAL:
        exists = entries * BLOCK < num_slots
        blocks = tl.load(table + entries, mask=exists, other=0)
        first = tl.load(firsts + entries, mask=exists, other=0)
    else:
        blocks = tl.load(table + entries)
        first = tl.load(firsts + entries)
    positions = tl.reshape(first[:, None] + tl.arange(0, BLOCK)[None, :], [NUM_BLOCKS * BLOCK])
    return blocks.to(tl.int64), positions


@triton.jit
def load_queries(
    q, tokens, heads, lives, num_heads, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, OPERAND: tl.constexpr
):
    """Rows of q [tokens, num_heads · HEAD_DIM] → OPERAND [PADDED, ROWS], 0 where the row does not live."""
    channels = tl.arange(0, PADDED)
    pointers = q + (tokens * num_heads + heads).to(tl.int64)[:, None] * HEAD_DIM + channels[None, :]
    mask = lives[:, None] if HEAD_DIM == PADDED else lives[:, None] & (channels < HEAD_DIM)[None, :]
    query = tl.load(pointers, mask=mask, other=0.0).to(OPERAND)
    return tl.trans(query)


@triton.jit
def bias_scores(
    coefficients, coefficient_rows, lives, cos, sin, positions, slots, num_slots, half,
    HALF: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """What the key bias adds to a score [TILE, ROWS], apart from what is the same for all keys of a query.

    See `reference/rope.py`. Three products of tf32 parts give the precision of float32, which scores of some hundreds
    need. The channels that RoPE leaves alone add the same number to every score of a query: softmax does not see it.
    A few pairs of channels at a time, in a loop of its own, since the parts of more do not fit into the registers.
    """
    scores = tl.zeros([TILE, ROWS], tl.float32)
    table_rows = positions.to(tl.int64)[:, None] * half
    for first in tl.range(0, HALF, BIAS_PAIRS, num_stages=1):
        pairs = first + tl.arange(0, BIAS_PAIRS)
        key_mask = (pairs < half)[None, :]
        if PARTIAL:
            key_mask = key_mask & (slots < num_slots)[:, None]
        row_mask = (pairs < half)[:, None] & lives[None, :]
        to_row = coefficients + coefficient_rows[None, :] + pairs[:, None]
        part = tl.load(to_row, mask=row_mask, other=0.0)
        rows = tl.load(cos + table_rows + pairs[None, :], mask=key_mask, other=0.0)
        scores = tl.dot(rows, part, scores, input_precision="tf32x3")
        part = tl.load(to_row + half, mask=row_mask, other=0.0)
        rows = tl.load(sin + table_rows + pairs[None, :], mask=key_mask, other=0.0)
        scores = tl.dot(rows, part, scores, input_precision="tf32x3")
    return scores


@triton.jit
def row_terms(query, row_factors, K_TYPE: tl.constexpr):
    """(factor, addend) float32 [ROWS] that make a score, before its key's scale, of a product of operands."""
    factors = row_factors * unit_of(K_TYPE)
    if K_TYPE == "int8":
        # Every product is too large by 128 · Σ query, in units of codes.
        return factors, tl.sum(query.to(tl.float32), 0) * row_factors * -128.0
    return factors, tl.zeros_like(factors)


@triton.jit
def tile_scores(
    query, factors, addends, score_scale, coefficients, coefficient_rows, lives, query_positions,
    keys, key_scales, cos, sin, blocks, positions, slot, num_slots, window, key_stride, scale_stride, half,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, NUM_BLOCKS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    K_TYPE: tl.constexpr, OPERAND: tl.constexpr, BIASED: tl.constexpr,
    PARTIAL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores float32 of a tile in units of log2; -inf where the query does not see the slot.

    factors, addends: of `row_terms`. CAUSAL: positions decide who sees what. PARTIAL: some slots may not exist. Without
    either every query sees every slot.
    """
    TILE: tl.constexpr = NUM_BLOCKS * BLOCK
    slots = slot + tl.arange(0, TILE)
    k = load_keys(keys, blocks, key_stride, HEAD_DIM, PADDED, NUM_BLOCKS, K_TYPE, OPERAND)
    exists = slots < num_slots
    if PARTIAL and may_be_nan(K_TYPE):
        # What lies behind the last slot is anything.
        k = tl.where(exists[:, None], k, tl.zeros_like(k))
    scores = product(k, query, tl.zeros([TILE, ROWS], tl.float32))
    scores = scores * factors[None, :]
    if K_TYPE == "int8":
        scales = load_scales(key_scales, blocks, scale_stride, TILE)
        if PARTIAL:
            scales = tl.where(exists, scales, 0.0)
        scores = (scores + addends[None, :]) * scales[:, None]
    if BIASED:
        added = bias_scores(
            coefficients, coefficient_rows, lives, cos, sin, positions, slots, num_slots, half,
            HALF, ROWS, TILE, PARTIAL,
        )  # fmt: skip
        scores += added * score_scale
    if CAUSAL:
        # One comparison for both ends: a key behind the query is a huge distance as an unsigned number.
        distance = query_positions[None, :] - positions[:, None]
        visible = distance.to(tl.uint32, bitcast=True) < window
        if PARTIAL:
            visible = visible & exists[:, None]
        scores = tl.where(visible, scores, HIDDEN)
    return scores


@triton.jit
def round_weights(weights, WEIGHT: tl.constexpr):
    """float32 of at most 2^15.1 → 16 bits, half to even."""
    # What cannot exceed float16 needs none of the comparisons of `round_to`.
    return weights.to(tl.float16) if WEIGHT == tl.float16 else round_to(weights, WEIGHT)  # noqa: SIM300


@triton.jit
def attend_tile(
    largest, total, sums,
    query, factors, addends, score_scale, coefficients, coefficient_rows, lives, query_positions,
    keys, values, key_scales, value_scales, cos, sin, table, firsts, slot, num_slots, window,
    key_stride, value_stride, scale_stride, half,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, NUM_BLOCKS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    K_TYPE: tl.constexpr, V_TYPE: tl.constexpr, OPERAND: tl.constexpr, BIASED: tl.constexpr,
    PARTIAL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax, all float32: largest score [ROWS], weights [TILE, ROWS] that are to be added up
    over the keys at the end (now that would cross warps), Σ weights · V [PADDED, ROWS].

    The scale of an int8 token's values belongs to its weight before that is rounded to 16 bits. So the running maximum
    is that of weight · scale, up to a factor of 1.07: what is rounded never leaves what float16 holds, whatever the
    scales are, and a weight itself is below 2^40 in float32.
    """
    TILE: tl.constexpr = NUM_BLOCKS * BLOCK
    blocks, positions = load_entries(table, firsts, slot, num_slots, NUM_BLOCKS, PARTIAL)
    scores = tile_scores(
        query, factors, addends, score_scale, coefficients, coefficient_rows, lives, query_positions,
        keys, key_scales, cos, sin, blocks, positions, slot, num_slots, window, key_stride, scale_stride, half,
        HEAD_DIM, PADDED, NUM_BLOCKS, HALF, ROWS, K_TYPE, OPERAND, BIASED, PARTIAL, CAUSAL,
    )  # fmt: skip
    exists = slot + tl.arange(0, TILE) < num_slots
    if V_TYPE == "int8":
        scales = load_scales(value_scales, blocks, scale_stride, TILE)
        if PARTIAL:
            scales = tl.where(exists, scales, 1.0)
        # The bits of a float, read as an integer, are its logarithm up to 0.09.
        bits = tl.where(scales < SMALLEST_SCALE, SMALLEST_SCALE, scales).to(tl.int32, bitcast=True)
        bounds = bits.to(tl.float32) * 1.1920928955078125e-07 - 127.0
        new_largest = tl.maximum(largest, tl.max(scores + bounds[:, None], 0))
    else:
        new_largest = tl.maximum(largest, tl.max(scores, 0))
    # A row that has seen nothing yet keeps weights of 0 instead of NaN.
    reference = tl.where(new_largest == HIDDEN, 0.0, new_largest)
    weights = tl.exp2(scores - (reference - WEIGHT_BITS)[None, :])
    shrink = tl.exp2(largest - reference)
    total = total * shrink[None, :] + weights
    if V_TYPE == "int8":
        weights = weights * scales[:, None]
    v = load_values(values, blocks, value_stride, HEAD_DIM, PADDED, NUM_BLOCKS, V_TYPE, OPERAND)
    if V_TYPE == "int8":
        v = (v - 7.62939453125e-06).to(OPERAND)  # 128 · 2^-24: exact
    if PARTIAL and may_be_nan(V_TYPE):
        # A weight of 0 would not silence a NaN.
        v = tl.where(exists[None, :], v, tl.zeros_like(v))
    sums = sums * shrink[None, :]
    # float16 for tf32 as well, which holds it as it does every bfloat16 value.
    WEIGHT: tl.constexpr = tl.bfloat16 if OPERAND == tl.bfloat16 else tl.float16  # noqa: SIM300
    return new_largest, total, product(v, round_weights(weights, WEIGHT).to(OPERAND), sums)
