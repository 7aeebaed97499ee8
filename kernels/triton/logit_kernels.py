"""Kernels around the choice of a token: what bias, penalties and bans do to a row before it, and logprobs after it.

Penalties work on the logits themselves, whose touched entries are kept aside and put back: a row is up to a megabyte,
and what is touched of it a few kilobytes. Between `adjust` and `restore` the stream does nothing but choose.

`words` int32 holds one line of 16 per adjusted row (see `sampling_params.Adjustments`), token ids and values.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvd_kernels.triton.sampling_kernels import (
    NOTHING,
    NUM_NUMBERS,
    is_finite,
    ranked,
    value_of,
    weigh,
)

LARGEST = tl.constexpr(3.4028234663852886e38)
NUM_WORDS = tl.constexpr(16)
LOG2_E_TWICE = tl.constexpr(2.8853900817779268)
LOWEST_HALF_DIFFERENCE = tl.constexpr(-69.3)  # x = -200
UNIT = tl.constexpr(1.0 / (1 << 44))


@triton.jit
def held(changed, before):
    """float64 → float32, rounded once and kept finite. What was not finite before becomes NaN, and its row shows it."""
    rounded = tl.minimum(tl.maximum(changed, -LARGEST), LARGEST).to(tl.float32)
    return tl.where(is_finite(before), rounded, float("nan"))


@triton.jit
def load_listed(row_logits, words, index, inside, vocab):
    """(ids, which are valid, their logits now, the same as float64 with 0 for what is not finite)."""
    ids = tl.load(words + index, mask=inside, other=0)
    valid = inside & (ids >= 0) & (ids < vocab)
    now = tl.load(row_logits + ids, mask=valid, other=0.0)
    return ids, valid, now, tl.where(is_finite(now), now, 0.0).to(tl.float64)


@triton.jit(do_not_specialize=["first_line", "num_seen_words"])
def adjust(logits, words, saved, seen, first_line, num_seen_words, vocab, BLOCK: tl.constexpr):
    """Bias, repetition, presence and frequency penalties, ban, in this order; float64, rounded after each.

    saved float32: by number of the id among all ids of the batch, the logit before. seen int32 [rows, num_seen_words]:
    one bit per token, so that repetition meets a token of prompt and output once. Grid (adjusted rows,).
    """
    line = words + first_line + tl.program_id(0) * NUM_WORDS
    row = tl.load(line).to(tl.int64)
    ids_start, saved_start = tl.load(line + 1), tl.load(line + 2)
    num_biased, num_prompt = tl.load(line + 3), tl.load(line + 4)
    num_output, num_banned = tl.load(line + 5), tl.load(line + 6)
    values_start = tl.load(line + 7)
    presence = tl.load(line + 8).to(tl.float32, bitcast=True).to(tl.float64)
    frequency = tl.load(line + 9).to(tl.float32, bitcast=True).to(tl.float64)
    repetition = tl.load(line + 10).to(tl.float32, bitcast=True).to(tl.float64)
    of_row = logits + row * vocab
    bits = seen + tl.program_id(0) * num_seen_words
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_seen_words, BLOCK):
        tl.store(bits + start + lane, tl.zeros((BLOCK,), tl.int32), mask=start + lane < num_seen_words)
    for start in range(0, num_biased + num_prompt + num_output + num_banned, BLOCK):
        index = start + lane
        _, valid, now, _ = load_listed(
            of_row, words + ids_start, index, index < num_biased + num_prompt + num_output + num_banned, vocab
        )
        tl.store(saved + saved_start + index, now, mask=valid)
    tl.debug_barrier()
    for start in range(0, num_biased, BLOCK):
        index = start + lane
        ids, valid, now, exact = load_listed(of_row, words + ids_start, index, index < num_biased, vocab)
        bias = tl.load(words + values_start + index, mask=valid, other=0).to(tl.float32, bitcast=True)
        tl.store(of_row + ids, held(exact + bias.to(tl.float64), now), mask=valid)
    tl.debug_barrier()
    ids_start += num_biased
    values_start += num_biased
    if repetition != 1.0:
        for start in range(0, num_prompt + num_output, BLOCK):
            index = start + lane
            ids, valid, now, exact = load_listed(
                of_row, words + ids_start, index, index < num_prompt + num_output, vocab
            )  # fmt: skip
            bit = tl.full((BLOCK,), 1, tl.int32) << (ids & 31)
            is_first = (tl.atomic_or(bits + (ids >> 5), bit, mask=valid) & bit) == 0
            changed = tl.where(exact > 0, exact / repetition, exact * repetition)
            tl.store(of_row + ids, held(changed, now), mask=valid & is_first)
        tl.debug_barrier()
    ids_start += num_prompt
    for start in range(0, num_output, BLOCK):
        index = start + lane
        ids, valid, now, exact = load_listed(of_row, words + ids_start, index, index < num_output, vocab)
        count = tl.load(words + values_start + index, mask=valid, other=0).to(tl.float64)
        changed = exact - (tl.where(count > 0, presence, 0.0) + frequency * count)
        tl.store(of_row + ids, held(changed, now), mask=valid)
    tl.debug_barrier()
    ids_start += num_output
    for start in range(0, num_banned, BLOCK):
        index = start + lane
        ids, valid, now, exact = load_listed(of_row, words + ids_start, index, index < num_banned, vocab)
        tl.store(of_row + ids, held(exact * 0.0 - LARGEST, now), mask=valid)


@triton.jit(do_not_specialize=["first_line"])
def restore(logits, words, saved, first_line, vocab, BLOCK: tl.constexpr):
    """Undo `adjust`. Grid (adjusted rows,)."""
    line = words + first_line + tl.program_id(0) * NUM_WORDS
    row = tl.load(line).to(tl.int64)
    ids_start, saved_start = tl.load(line + 1), tl.load(line + 2)
    num = tl.load(line + 3) + tl.load(line + 4) + tl.load(line + 5) + tl.load(line + 6)
    for start in range(0, num, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = tl.load(words + ids_start + index, mask=index < num, other=0)
        valid = (index < num) & (ids >= 0) & (ids < vocab)
        before = tl.load(saved + saved_start + index, mask=valid, other=0.0)
        tl.store(logits + row * vocab + ids, before, mask=valid)


@triton.jit(do_not_specialize=["num_slots"])
def best_of_tiles(
    logits, numbers, token_ids, tile_best, tile_masses, vocab, num_slots,
    TILE: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    """tile_best int64 [rows, MAX_TILES, num_slots]: `ranked` best of a tile; tile_masses int64 [rows, MAX_TILES]:
    its probabilities, relative to its own best. For rows that want logprobs and have a token. Grid (rows, tiles).
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_wanted = tl.load(numbers + row * NUM_NUMBERS + 7).to(tl.int32)
    if (num_wanted < 0) | (tl.load(token_ids + row) < 0):
        return
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    values = tl.load(logits + row * vocab + ids, mask=inside, other=0.0)
    left = tl.where(inside, ranked(values, ids), NOTHING)
    best = tl.max(left, 0)
    peak = value_of((best >> 32).to(tl.int32))
    _, mass = weigh(tl.where(inside, values, peak), peak, LOG2_E_TWICE, LOWEST_HALF_DIFFERENCE)
    tl.store(tile_masses + row * MAX_TILES + tile, tl.sum(tl.where(inside, mass, 0), 0))
    slots = tile_best + (row * MAX_TILES + tile) * num_slots
    for slot in range(tl.maximum(num_wanted, 1)):
        best = tl.max(left, 0)
        tl.store(slots + slot, best)
        left = tl.where(left == best, NOTHING, left)


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "width"])
def merge_best(
    logits, numbers, token_ids, tile_best, tile_masses, sums, chosen, best, vocab, num_slots, num_tiles, width,
    MAX_TILES: tl.constexpr,
):  # fmt: skip
    """sums float64 [rows]: log Σ exp of the logits; chosen float32 [rows]: the token's logit; best int64 [rows, width]:
    the `ranked` best, falling. For the same rows as `best_of_tiles`. Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    num_wanted = tl.load(numbers + row * NUM_NUMBERS + 7).to(tl.int32)
    token = tl.load(token_ids + row)
    if (num_wanted < 0) | (token < 0):
        return
    tile = tl.arange(0, MAX_TILES)
    lists = tile_best + (row * MAX_TILES + tile) * num_slots
    heads = tl.load(lists, mask=tile < num_tiles, other=NOTHING)
    peak = value_of((tl.max(heads, 0) >> 32).to(tl.int32)).to(tl.float64)
    mass = tl.load(tile_masses + row * MAX_TILES + tile, mask=tile < num_tiles, other=0).to(tl.float64) * UNIT
    tile_peak = tl.where(tile < num_tiles, value_of((heads >> 32).to(tl.int32)).to(tl.float64), peak)
    total = tl.sum(mass * tl.exp(tl.maximum(tile_peak - peak, -700.0)), 0)
    tl.store(sums + row, peak + tl.log(total))
    tl.store(chosen + row, tl.load(logits + row * vocab + token))
    taken = tl.zeros((MAX_TILES,), tl.int32)
    for place in range(num_wanted):
        head = tl.max(heads, 0)
        tl.store(best + row * width + place, head)
        taken += (heads == head).to(tl.int32)
        refill = (heads == head) & (taken < num_wanted) & (tile < num_tiles)
        heads = tl.where(heads == head, tl.load(lists + taken, mask=refill, other=NOTHING), heads)
