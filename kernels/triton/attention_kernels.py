"""The kernels of paged attention: queries made ready, decoding in splits and their merging, prompts, block mass.

All take the tensors of one layer; what the arguments mean is said once, in `attention.py`, which launches them.
`attention_tiles.py` has the work on one tile of keys and the meaning of ROWS, TILE and PADDED.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvd_kernels.triton.attention_tiles import (
    BLOCK,
    HIDDEN,
    WEIGHT_BITS,
    attend_tile,
    load_entries,
    load_queries,
    row_terms,
    tile_scores,
    unit_of,
)
from kvd_kernels.triton.formats import absmax, hadamard, round_to

SEARCH_WIDTH = tl.constexpr(128)
MERGE_WIDTH = tl.constexpr(16)

INTEGERS = (
    "num_seqs", "num_rows", "num_heads", "group_heads", "num_kv_heads", "half", "window", "table_stride",
    "min_tokens", "max_tokens", "num_splits", "table_width", "mass_stride",
)  # fmt: skip
"""Never specialised by value: one form serves every batch and every model."""


@triton.jit(do_not_specialize=INTEGERS)
def prepare_queries(
    q, key_bias, prepared, row_units, coefficients, num_rows, num_heads, group_heads, half,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, ROTATION: tl.constexpr, ROTATION_SCALE: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Rotate queries as the keys are, and bring them into the operand's 16 bits; coefficients of the key bias.

    prepared · row_units = q rotated, where row_units float32 [rows] is a power of two that brings the largest channel
    of a float16 row between 1 and 2, and is 1 for bfloat16. coefficients float32 [rows, 2, half]: cos part, sin part.
    Grid: rows of (token, head) / ROWS.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lives = rows < num_rows
    channels = tl.arange(0, PADDED)
    at = rows.to(tl.int64)[:, None] * HEAD_DIM + channels[None, :]
    mask = lives[:, None] & (channels < HEAD_DIM)[None, :]
    x = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
    if ROTATION > 1:
        x = hadamard(x, ROTATION, ROTATION_SCALE, ROWS, PADDED)
    if prepared.dtype.element_ty == tl.float16:
        exponent = absmax(x, 1).to(tl.int32, bitcast=True) & 0x7F800000
        unit = tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))
        x = tl.div_rn(x, tl.broadcast_to(unit[:, None], x.shape))
    else:
        unit = tl.full([ROWS], 1.0, tl.float32)
    tl.store(prepared + at, round_to(x, prepared.dtype.element_ty), mask=mask)
    tl.store(row_units + rows, unit, mask=lives)
    if BIASED:
        pairs = tl.arange(0, HALF)
        mask = lives[:, None] & (pairs < half)[None, :]
        at = rows.to(tl.int64)[:, None] * HEAD_DIM + pairs[None, :]
        bias_at = ((rows % num_heads) // group_heads)[:, None] * HEAD_DIM + pairs[None, :]
        q1 = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
        q2 = tl.load(q + at + half, mask=mask, other=0.0).to(tl.float32)
        b1 = tl.load(key_bias + bias_at, mask=mask, other=0.0)
        b2 = tl.load(key_bias + bias_at + half, mask=mask, other=0.0)
        to = coefficients + rows.to(tl.int64)[:, None] * (2 * half) + pairs[None, :]
        tl.store(to, q1 * b1 + q2 * b2, mask=mask)
        tl.store(to + half, q2 * b1 - q1 * b2, mask=mask)


@triton.jit
def split_length(num_slots, num_splits, MIN_LENGTH: tl.constexpr):
    """Slots of one split: a multiple of MIN_LENGTH, from what the sequence holds and not from what a table could."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_slots, num_splits), MIN_LENGTH), 1) * MIN_LENGTH


@triton.jit
def store_rows(
    out, lse, largest, total, sums, tokens, heads, lives, num_heads,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, KEEPS_LSE: tl.constexpr,
):  # fmt: skip
    """Finished rows: out = sums / total, 0 where nothing was seen; lse = log2 Σ 2^score, +inf there."""
    row = tokens * num_heads + heads
    sees = total > 0.0
    # Not `sees`: a total of NaN must come through.
    result = tl.where((total == 0.0)[:, None], 0.0, sums / tl.where(total == 0.0, 1.0, total)[:, None])
    channels = tl.arange(0, PADDED)
    at = row.to(tl.int64)[:, None] * HEAD_DIM + channels[None, :]
    mask = lives[:, None] if HEAD_DIM == PADDED else lives[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(out + at, round_to(result, out.dtype.element_ty), mask=mask)
    if KEEPS_LSE:
        kept = tl.where(sees, largest - WEIGHT_BITS + tl.log2(tl.where(sees, total, 1.0)), float("inf"))
        tl.store(lse + row, kept, mask=lives)


@triton.jit
def load_row_factors(row_units, score_scale, tokens, heads, lives, num_heads, PREPARED: tl.constexpr):
    if PREPARED:
        return tl.load(row_units + tokens * num_heads + heads, mask=lives, other=0.0) * score_scale
    return tl.where(lives, score_scale, 0.0)


@triton.jit(do_not_specialize=INTEGERS)
def decode(
    q, row_units, coefficients, keys, values, key_scales, value_scales, cos, sin,
    block_tables, first_positions, num_slots, query_starts, positions,
    out, lse, partial_sums, partial_stats,
    key_stride, value_stride, scale_stride, table_stride, num_heads, group_heads, half, window, max_tokens, score_scale,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    K_TYPE: tl.constexpr, V_TYPE: tl.constexpr, OPERAND: tl.constexpr,
    PREPARED: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr, KEEPS_LSE: tl.constexpr,
    MIN_LENGTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All query tokens of one sequence at once, against one split of its slots; sequences with more are left alone.

    Grid: sequences, KV heads, splits. Splits that a sequence does not need end at once, so that one grid serves a graph
    at every length of its sequences.
    """
    TILE: tl.constexpr = NUM_BLOCKS * BLOCK
    s, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_starts + s)
    count = tl.load(query_starts + s + 1) - begin
    slots = tl.load(num_slots + s)
    length = split_length(slots, tl.num_programs(2), MIN_LENGTH)
    start = split * length
    if count > max_tokens or (split > 0 and start >= slots):
        return
    stop = tl.minimum(start + length, slots)

    row = tl.arange(0, ROWS)
    lives = row < count * group_heads
    tokens = begin + row // group_heads
    heads = kv_head * group_heads + row % group_heads
    query_positions = tl.load(positions + tokens, mask=lives, other=-1)
    query = load_queries(q, tokens, heads, lives, num_heads, HEAD_DIM, PADDED, OPERAND)
    factors, addends = row_terms(
        query, load_row_factors(row_units, score_scale, tokens, heads, lives, num_heads, PREPARED), K_TYPE
    )
    coefficient_rows = (tokens * num_heads + heads).to(tl.int64) * (2 * half)

    table = block_tables + s.to(tl.int64) * table_stride
    firsts = first_positions + s.to(tl.int64) * table_stride
    keys += kv_head * (BLOCK * HEAD_DIM)
    values += kv_head * (BLOCK * HEAD_DIM)
    key_scales += kv_head * BLOCK
    value_scales += kv_head * BLOCK
    largest = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([TILE, ROWS], tl.float32)
    sums = tl.zeros([PADDED, ROWS], tl.float32)
    whole = start + (stop - start) // TILE * TILE
    for slot in tl.range(start, whole, TILE, num_stages=STAGES):
        largest, total, sums = attend_tile(
            largest, total, sums, query, factors, addends, score_scale, coefficients, coefficient_rows, lives,
            query_positions, keys, values, key_scales, value_scales, cos, sin, table, firsts, slot, slots, window,
            key_stride, value_stride, scale_stride, half,
            HEAD_DIM, PADDED, NUM_BLOCKS, HALF, ROWS, K_TYPE, V_TYPE, OPERAND, BIASED, False, True,
        )  # fmt: skip
    if whole < stop:
        largest, total, sums = attend_tile(
            largest, total, sums, query, factors, addends, score_scale, coefficients, coefficient_rows, lives,
            query_positions, keys, values, key_scales, value_scales, cos, sin, table, firsts, whole, slots, window,
            key_stride, value_stride, scale_stride, half,
            HEAD_DIM, PADDED, NUM_BLOCKS, HALF, ROWS, K_TYPE, V_TYPE, OPERAND, BIASED, True, True,
        )  # fmt: skip
    total = tl.sum(total, 0)
    sums = tl.trans(sums) * unit_of(V_TYPE)
    if SPLIT:
        at = ((split * tl.num_programs(0) + s) * max_tokens + row // group_heads) * num_heads + heads
        to = partial_sums + at.to(tl.int64)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
        tl.store(to, sums, mask=lives[:, None])
        tl.store(partial_stats + 2 * at, largest, mask=lives)
        tl.store(partial_stats + 2 * at + 1, total, mask=lives)
    else:
        store_rows(out, lse, largest, total, sums, tokens, heads, lives, num_heads, HEAD_DIM, PADDED, KEEPS_LSE)


@triton.jit(do_not_specialize=INTEGERS)
def merge(
    partial_sums, partial_stats, num_slots, query_starts, out, lse,
    num_heads, max_tokens, num_splits,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, KEEPS_LSE: tl.constexpr, MIN_LENGTH: tl.constexpr,
):  # fmt: skip
    """Add the splits of one row, always in the same order. Grid: sequences, heads, max_tokens."""
    s, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_starts + s)
    count = tl.load(query_starts + s + 1) - begin
    if count > max_tokens or tl.program_id(2) >= count:
        return
    slots = tl.load(num_slots + s)
    live_splits = tl.maximum(tl.cdiv(slots, split_length(slots, num_splits, MIN_LENGTH)), 1)
    token = begin + tl.program_id(2)
    channels = tl.arange(0, PADDED)
    largest = tl.full([1], HIDDEN, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, PADDED], tl.float32)
    for first in range(0, live_splits, MERGE_WIDTH):
        splits = first + tl.arange(0, MERGE_WIDTH)
        exists = splits < live_splits
        at = ((splits * tl.num_programs(0) + s) * max_tokens + tl.program_id(2)) * num_heads + head
        their_largest = tl.load(partial_stats + 2 * at, mask=exists, other=HIDDEN)
        their_total = tl.load(partial_stats + 2 * at + 1, mask=exists, other=0.0)
        pointers = partial_sums + at.to(tl.int64)[:, None] * PADDED + channels[None, :]
        their_sums = tl.load(pointers, mask=exists[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(their_largest, 0))
        reference = tl.where(new_largest == HIDDEN, 0.0, new_largest)
        factors = tl.exp2(their_largest - reference)
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(their_total * factors, 0)
        sums = sums * shrink[:, None] + tl.sum(their_sums * factors[:, None], 0)[None, :]
        largest = new_largest
    rows = tl.zeros([1], tl.int32)
    store_rows(
        out, lse, largest, total, sums, token + rows, head + rows, rows == 0, num_heads, HEAD_DIM, PADDED, KEEPS_LSE
    )


@triton.jit
def find_sequence(query_starts, num_seqs, tile, tile_tokens):
    """(sequence, tile within it) of one tile in a numbering in which sequence s begins at starts[s] // tile_tokens + s.

    Some numbers belong to no tile: the tile within the sequence lies behind its end then.
    """
    found = 0
    for first in range(0, num_seqs, SEARCH_WIDTH):
        s = first + tl.arange(0, SEARCH_WIDTH)
        begins = tl.load(query_starts + s, mask=s < num_seqs, other=0) // tile_tokens + s
        found += tl.sum(((s < num_seqs) & (begins <= tile)).to(tl.int32), 0)
    s = found - 1
    return s, tile - (tl.load(query_starts + s) // tile_tokens + s)


@triton.jit
def count_entries(firsts, num_entries, last_position):
    """How many table entries begin at or before a position; they ascend."""
    low, high = 0, num_entries
    while low < high:
        middle = (low + high) // 2
        if tl.load(firsts + middle) <= last_position:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=INTEGERS)
def prefill(
    q, row_units, coefficients, keys, values, key_scales, value_scales, cos, sin,
    block_tables, first_positions, num_slots, query_starts, positions, out, lse,
    key_stride, value_stride, scale_stride, table_stride, num_seqs, num_heads, group_heads, half, window,
    min_tokens, score_scale,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    K_TYPE: tl.constexpr, V_TYPE: tl.constexpr, OPERAND: tl.constexpr,
    PREPARED: tl.constexpr, BIASED: tl.constexpr, KEEPS_LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS // group_heads query tokens of one sequence against all slots that one of them sees.

    Sequences with less than min_tokens are left alone. Grid: tiles as `find_sequence` numbers them, KV heads.
    """
    TILE: tl.constexpr = NUM_BLOCKS * BLOCK
    tile_tokens = ROWS // group_heads
    # The last tiles of a prompt see the most keys: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    s, tile = find_sequence(query_starts, num_seqs, tile, tile_tokens)
    begin = tl.load(query_starts + s)
    count = tl.load(query_starts + s + 1) - begin
    if count < min_tokens or tile * tile_tokens >= count:
        return
    slots = tl.load(num_slots + s)

    row = tl.arange(0, ROWS)
    token = tile * tile_tokens + row // group_heads
    lives = (row < tile_tokens * group_heads) & (token < count)
    tokens = begin + token
    heads = kv_head * group_heads + row % group_heads
    query_positions = tl.load(positions + tokens, mask=lives, other=-1)
    query = load_queries(q, tokens, heads, lives, num_heads, HEAD_DIM, PADDED, OPERAND)
    factors, addends = row_terms(
        query, load_row_factors(row_units, score_scale, tokens, heads, lives, num_heads, PREPARED), K_TYPE
    )
    coefficient_rows = (tokens * num_heads + heads).to(tl.int64) * (2 * half)

    table = block_tables + s.to(tl.int64) * table_stride
    firsts = first_positions + s.to(tl.int64) * table_stride
    keys += kv_head * (BLOCK * HEAD_DIM)
    values += kv_head * (BLOCK * HEAD_DIM)
    key_scales += kv_head * BLOCK
    value_scales += kv_head * BLOCK

    lowest = tl.min(tl.where(lives, query_positions, 2147483647), 0)
    num_entries = tl.cdiv(slots, BLOCK)
    stop = tl.minimum(count_entries(firsts, num_entries, tl.max(query_positions, 0)) * BLOCK, slots)
    start = count_entries(firsts, num_entries, lowest - window - (BLOCK - 1)) * BLOCK
    whole = start
    if lowest - window < 0:
        # No query's window ends within the table: entries that lie before all queries need no mask.
        seen_by_all = tl.minimum(count_entries(firsts, num_entries, lowest - (BLOCK - 1)), slots // BLOCK)
        whole = seen_by_all * BLOCK // TILE * TILE
    largest = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([TILE, ROWS], tl.float32)
    sums = tl.zeros([PADDED, ROWS], tl.float32)
    for slot in tl.range(start, whole, TILE, num_stages=STAGES):
        largest, total, sums = attend_tile(
            largest, total, sums, query, factors, addends, score_scale, coefficients, coefficient_rows, lives,
            query_positions, keys, values, key_scales, value_scales, cos, sin, table, firsts, slot, slots, window,
            key_stride, value_stride, scale_stride, half,
            HEAD_DIM, PADDED, NUM_BLOCKS, HALF, ROWS, K_TYPE, V_TYPE, OPERAND, BIASED, False, False,
        )  # fmt: skip
    for slot in tl.range(whole, stop, TILE, num_stages=1):
        largest, total, sums = attend_tile(
            largest, total, sums, query, factors, addends, score_scale, coefficients, coefficient_rows, lives,
            query_positions, keys, values, key_scales, value_scales, cos, sin, table, firsts, slot, slots, window,
            key_stride, value_stride, scale_stride, half,
            HEAD_DIM, PADDED, NUM_BLOCKS, HALF, ROWS, K_TYPE, V_TYPE, OPERAND, BIASED, True, True,
        )  # fmt: skip
    total = tl.sum(total, 0)
    sums = tl.trans(sums) * unit_of(V_TYPE)
    store_rows(out, lse, largest, total, sums, tokens, heads, lives, num_heads, HEAD_DIM, PADDED, KEEPS_LSE)


@triton.jit(do_not_specialize=INTEGERS)
def weigh_blocks(
    q, row_units, coefficients, keys, key_scales, cos, sin,
    block_tables, first_positions, num_slots, query_starts, positions, lse, mass,
    key_stride, scale_stride, table_stride, mass_stride, table_width, num_heads, num_kv_heads, group_heads, half,
    window, score_scale,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    K_TYPE: tl.constexpr, OPERAND: tl.constexpr, PREPARED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Softmax weights of NUM_BLOCKS table entries, over all query tokens and heads, with the sums of the pass before.

    Grid: sequences, groups of entries of the whole table; entries that do not exist get 0.
    """
    TILE: tl.constexpr = NUM_BLOCKS * BLOCK
    s, slot = tl.program_id(0), tl.program_id(1) * TILE
    slots = tl.load(num_slots + s)
    begin = tl.load(query_starts + s)
    count = tl.load(query_starts + s + 1) - begin
    weights = tl.zeros([TILE], tl.float32)
    if slot < slots:
        table = block_tables + s.to(tl.int64) * table_stride
        firsts = first_positions + s.to(tl.int64) * table_stride
        blocks, key_positions = load_entries(table, firsts, slot, slots, NUM_BLOCKS, True)
        for kv_head in range(num_kv_heads):
            for first in range(0, count * group_heads, ROWS):
                row = first + tl.arange(0, ROWS)
                lives = row < count * group_heads
                tokens = begin + row // group_heads
                heads = kv_head * group_heads + row % group_heads
                query_positions = tl.load(positions + tokens, mask=lives, other=-1)
                query = load_queries(q, tokens, heads, lives, num_heads, HEAD_DIM, PADDED, OPERAND)
                row_factors = load_row_factors(row_units, score_scale, tokens, heads, lives, num_heads, PREPARED)
                factors, addends = row_terms(query, row_factors, K_TYPE)
                coefficient_rows = (tokens * num_heads + heads).to(tl.int64) * (2 * half)
                scores = tile_scores(
                    query, factors, addends, score_scale, coefficients, coefficient_rows, lives, query_positions,
                    keys + kv_head * (BLOCK * HEAD_DIM), key_scales + kv_head * BLOCK, cos, sin,
                    blocks, key_positions, slot, slots, window, key_stride, scale_stride, half,
                    HEAD_DIM, PADDED, NUM_BLOCKS, HALF, ROWS, K_TYPE, OPERAND, BIASED, True, True,
                )  # fmt: skip
                kept = tl.load(lse + tokens * num_heads + heads, mask=lives, other=float("inf"))
                weights += tl.sum(tl.exp2(scores - kept[None, :]), 1)
    entries = slot // BLOCK + tl.arange(0, NUM_BLOCKS)
    per_block = tl.sum(tl.reshape(weights, [NUM_BLOCKS, BLOCK]), 1)
    tl.store(mass + s.to(tl.int64) * mass_stride + entries, per_block, mask=entries < table_width)
