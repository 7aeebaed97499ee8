"""Kernels that choose one token per row of logits, without sorting a row.

Probabilities relative to the best are integers: 2^44 · 2^x, cut off, with x = (logit - best) · log2(e) / temperature in
float32. Sums of integers do not depend on their order, so a token depends on its own row alone, and comparing two sums
is exact. Candidates fall by logit, then rise by id; a float's bits, read as an integer `key`, have the same order.
Every truncation leaves a beginning of that order, and the draw ends one: each is a search for the greatest key from
which on upwards there is enough, either of candidates or of mass.

  find_peaks     best (logit, id) of every tile of a row; says where a logit is not finite
  measure        number and mass of the candidates above each of a few levels of probability, per tile
  collect        ids of a row's candidates above the lowest level that the row's draw can need, by rising id
  choose         the searches over these, and the token
  choose_greedy  the token of rows whose temperature is 0, from find_peaks alone

Rows have VOCAB contiguous float32 logits. A row has one line of 8 int64 numbers, see `sampling_params.fill_numbers`.
A row may have a mask, 64 tokens to an int64 word of the same buffer: what it leaves out is no candidate, as if the row
were shorter. Whether a row is finite does not depend on it.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-redef"

from __future__ import annotations

import triton
import triton.language as tl

LOW_WORD = tl.constexpr(0xFFFFFFFF)
LARGEST_KEY = tl.constexpr(0x7F7FFFFF)  # of the largest finite number
NOT_FINITE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
UNIT_SHIFT = tl.constexpr(21)  # 2^44 over the 2^23 that a float32's mantissa counts
NUM_LEVELS = tl.constexpr(8)
MIN_P_LEVEL = tl.constexpr(6)
WHOLE = tl.constexpr(7)
NUM_NUMBERS = tl.constexpr(8)


@triton.jit
def key_of(values):
    """float32 → int32 of the same order; both zeros are equal. Finite values only."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """int32 → float32, the reverse of `key_of`."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def ranked(values, ids):
    """int64 that is greater for greater values, and among equal ones for lower ids."""
    return (key_of(values).to(tl.int64) << 32) | (LOW_WORD - ids.to(tl.int64))


@triton.jit
def is_finite(values):
    return (values.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def weigh(values, peak, factor, floor):
    """(x, 2^44 · 2^x cut off as int64) of float32 values ≤ peak.

    Halves cannot overflow where the values themselves would; `factor` is twice what it says above. `floor` < 0 bounds
    the halved difference so that x is about -200 at least.
    """
    x = tl.maximum(values * 0.5 - peak * 0.5, floor) * factor
    # From the float's own bits: conversions to 64 bits are slow on sm_86 and sm_89.
    bits = tl.exp2(x).to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << UNIT_SHIFT
    return x, mantissa >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64)


@triton.jit
def multiply(a, b):
    """(high, low) 64 bits of the product of two uint64."""
    a_high, a_low = a >> 32, a & LOW_WORD
    b_high, b_low = b >> 32, b & LOW_WORD
    lowest = a_low * b_low
    middle = a_high * b_low + (lowest >> 32)
    second = a_low * b_high + (middle & LOW_WORD)
    high = a_high * b_high + (middle >> 32) + (second >> 32)
    return high, ((second & LOW_WORD) << 32) | (lowest & LOW_WORD)


@triton.jit
def uniform_bits(seed, position):
    """uint64 whose 2^-64th is `reference.philox.uniform(seed, position)`, exactly: Philox-4x32-10 in 64-bit words."""
    key = seed.to(tl.uint64)
    counter = position.to(tl.uint64)
    k0, k1 = key & LOW_WORD, key >> 32
    c0, c1 = counter & LOW_WORD, counter >> 32
    c2, c3 = counter ^ counter, counter ^ counter
    for _ in tl.static_range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & LOW_WORD
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & LOW_WORD
        k0 = (k0 + 0x9E3779B9) & LOW_WORD
        k1 = (k1 + 0xBB67AE85) & LOW_WORD
    return ((c0 >> 5) << 37) | ((c1 >> 6) << 11)


@triton.jit
def load_floats(line):
    """(factor, floor, limit of min_p) of a row, which lie there as bits; a factor of 0 means greedy."""
    factor = tl.load(line + 4).to(tl.int32).to(tl.float32, bitcast=True)
    floor = tl.load(line + 5).to(tl.int32).to(tl.float32, bitcast=True)
    limit = tl.load(line + 6).to(tl.int32).to(tl.float32, bitcast=True)
    return factor, floor, limit


@triton.jit
def mask_of(line):
    """Where a row's mask begins among the int64 numbers of all rows; 0: it has none."""
    return tl.load(line + 7) >> 32


@triton.jit
def is_allowed(numbers, mask_start, ids, inside):
    """Which ids a row's mask allows; all where there is none."""
    word = tl.load(numbers + mask_start + (ids >> 6), mask=inside & (mask_start > 0), other=-1)
    return inside & ((word >> (ids & 63).to(tl.int64)) & 1 != 0)


@triton.jit
def row_peak(peaks, row, num_tiles, MAX_TILES: tl.constexpr):
    """(key, id, value) of the best of a row, int32, int64, float32; key > LARGEST_KEY where the row is not finite."""
    tile = tl.arange(0, MAX_TILES)
    best = tl.max(tl.load(peaks + row * MAX_TILES + tile, mask=tile < num_tiles, other=NOTHING), 0)
    key = (best >> 32).to(tl.int32)
    return key, LOW_WORD - (best & LOW_WORD), value_of(key)


@triton.jit(do_not_specialize=["num_tiles"])
def find_peaks(logits, peaks, numbers, vocab, num_tiles, TILE: tl.constexpr, MAX_TILES: tl.constexpr):
    """peaks int64 [rows, MAX_TILES]: `ranked` best of a tile; NOT_FINITE where a logit is not. Grid (rows, tiles)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    values = tl.load(logits + row * vocab + ids, mask=inside, other=0.0)
    allowed = is_allowed(numbers, mask_of(numbers + row * NUM_NUMBERS), ids, inside)
    best = tl.where(allowed, ranked(values, ids), NOTHING)
    best = tl.where(is_finite(values), best, NOT_FINITE)
    tl.store(peaks + row * MAX_TILES + tile, tl.max(best, 0))


@triton.jit(do_not_specialize=["num_tiles"])
def choose_greedy(peaks, token_ids, num_tiles, MAX_TILES: tl.constexpr):
    """token_ids int64 [rows]: the best of every row, -1 where it is not finite. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    key, token, _ = row_peak(peaks, row, num_tiles, MAX_TILES)
    tl.store(token_ids + row, tl.where(key > LARGEST_KEY, -1, token))


@triton.jit
def level_limit(level, min_p_limit):
    """The least x of a level: 2^-2, 2^-5, 2^-9, 2^-14, 2^-20, 2^-27 of the best, then min_p of it, then anything."""
    limit = tl.where(level == MIN_P_LEVEL, min_p_limit, -2.0 - (level * (level + 5)) // 2)
    return tl.where(level == WHOLE, -1e30, limit)


@triton.jit(do_not_specialize=["num_tiles"])
def measure(logits, peaks, numbers, counts, masses, vocab, num_tiles, TILE: tl.constexpr, MAX_TILES: tl.constexpr):
    """counts int32, masses int64 [rows, MAX_TILES, NUM_LEVELS] of what reaches each level. Grid (rows, tiles)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = numbers + row * NUM_NUMBERS
    factor, floor, limit = load_floats(line)
    peak_key, _, peak = row_peak(peaks, row, num_tiles, MAX_TILES)
    if (factor == 0.0) | (peak_key > LARGEST_KEY):
        return
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    values = tl.load(logits + row * vocab + ids, mask=inside, other=0.0)
    inside = is_allowed(numbers, mask_of(line), ids, inside)
    x, mass = weigh(tl.where(inside, values, peak), peak, factor, floor)
    cell = (row * MAX_TILES + tile) * NUM_LEVELS
    for level in range(NUM_LEVELS):
        reaches = inside & (x >= level_limit(level, limit))
        tl.store(counts + cell + level, tl.sum(reaches.to(tl.int32), 0))
        tl.store(masses + cell + level, tl.sum(tl.where(reaches, mass, 0), 0))


@triton.jit
def plan(line, fraction, counts, masses, row, num_tiles, MAX_TILES: tl.constexpr):
    """What a row's searches can need: (level of candidates that hold it all, their number, those of [MAX_TILES], total
    mass, mass of what min_p leaves, top_k or 0 where it leaves nothing out).
    """
    tile, level = tl.arange(0, MAX_TILES)[:, None], tl.arange(0, NUM_LEVELS)[None, :]
    cells = (row * MAX_TILES + tile) * NUM_LEVELS + level
    tile_counts = tl.load(counts + cells, mask=tile < num_tiles, other=0)
    level_masses = tl.sum(tl.load(masses + cells, mask=tile < num_tiles, other=0), 0)
    level_counts = tl.sum(tile_counts, 0)
    levels = tl.arange(0, NUM_LEVELS)
    total = tl.max(level_masses, 0)
    min_p_mass = tl.sum(tl.where(levels == MIN_P_LEVEL, level_masses, 0), 0)
    top_k = tl.load(line)
    top_k = tl.where(top_k < tl.max(level_counts, 0), top_k, 0)
    if top_k > 0:
        enough = level_counts >= top_k  # whatever is drawn is among these
    else:
        bound = top_p_mass(line, total)
        if min_p_mass <= bound:  # top_p leaves no less than min_p does, so the draw is known already
            bound = drawn_mass(fraction, min_p_mass) + 1
        enough = level_masses >= bound
    chosen = tl.min(tl.where(enough & (levels != MIN_P_LEVEL), levels, WHOLE), 0)
    own = tl.sum(tl.where(level == chosen, tile_counts, 0), 1)
    return chosen, tl.sum(own, 0), own, total, min_p_mass, top_k


@triton.jit
def top_p_mass(line, mass):
    """The least mass that top_p asks for: ⌈top_p · mass⌉, exactly; all of it where top_p is 1."""
    fraction = tl.load(line + 1).to(tl.uint64)
    high, low = multiply(fraction, mass.to(tl.uint64))
    return tl.where(fraction == 0, mass, high.to(tl.int64) + (low != 0).to(tl.int64))


@triton.jit
def drawn_mass(fraction, mass):
    """⌊fraction · 2^-64 · mass⌋, exactly: the candidate in whose share of the mass this lies is drawn."""
    high, _ = multiply(fraction, mass.to(tl.uint64))
    return high.to(tl.int64)


@triton.jit(do_not_specialize=["num_tiles", "capacity"])
def collect(
    logits, peaks, numbers, counts, masses, candidates, vocab, num_tiles, capacity,
    TILE: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    """candidates int32 [rows, capacity]: rising ids; nothing where there are more than that. Grid (rows, tiles)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = numbers + row * NUM_NUMBERS
    factor, floor, limit = load_floats(line)
    peak_key, _, peak = row_peak(peaks, row, num_tiles, MAX_TILES)
    if (factor == 0.0) | (peak_key > LARGEST_KEY):
        return
    fraction = uniform_bits(tl.load(line + 2), tl.load(line + 3))
    chosen, num_candidates, tile_counts, _total, _min_p_mass, _top_k = plan(
        line, fraction, counts, masses, row, num_tiles, MAX_TILES
    )
    if num_candidates > capacity:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    values = tl.load(logits + row * vocab + ids, mask=inside, other=0.0)
    inside = is_allowed(numbers, mask_of(line), ids, inside)
    x, _mass = weigh(tl.where(inside, values, peak), peak, factor, floor)
    reaches = inside & (x >= level_limit(chosen, limit))
    before = tl.sum(tl.where(tl.arange(0, MAX_TILES) < tile, tile_counts, 0), 0)
    places = before + tl.cumsum(reaches.to(tl.int32), 0) - 1
    tl.store(candidates + row * capacity + places, ids, mask=reaches)


@triton.jit
def load_block(
    values_of_row, numbers, mask_start, listed, start, num, num_listed, peak, factor, floor, BLOCK: tl.constexpr
):  # fmt: skip
    """(ids, keys, masses, which exist) of BLOCK candidates from `start` on.

    Of a list, where num_listed = num; of the whole row where it is 0.
    """
    index = start + tl.arange(0, BLOCK)
    exists = index < num
    ids = tl.where(index < num_listed, tl.load(listed + index, mask=index < num_listed, other=0), index)
    exists = is_allowed(numbers, mask_start, ids, exists)
    values = tl.load(values_of_row + ids, mask=exists, other=0.0)
    values = tl.where(exists, values, peak)
    _x, mass = weigh(values, peak, factor, floor)
    return ids, key_of(values).to(tl.int64), tl.where(exists, mass, 0), exists


@triton.jit
def search(
    values_of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, high, need,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The greatest key that is reached by candidates of `need` together, in mass or in number.

    low, high (int64): keys from low on upwards are enough, and from high on upwards there are none. Every pass tries
    WAYS keys between them, and draws both close to the keys that there are.
    """
    ways = tl.arange(0, WAYS).to(tl.int64)
    above = need - need
    while high - low > 1:
        tried = low + (high - low) * ways // WAYS
        sums = tl.zeros((WAYS, BLOCK), tl.int64)
        least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int64)
        greatest = tl.full((BLOCK,), -0x7FFFFFFF, tl.int64)
        for start in range(0, num, BLOCK):
            _ids, keys, mass, exists = load_block(
                values_of_row, numbers, mask_start, listed, start, num, num_listed, peak, factor, floor, BLOCK
            )  # fmt: skip
            if not BY_MASS:
                mass = exists.to(tl.int64)
            sums += tl.where(keys[None, :] >= tried[:, None], mass[None, :], 0)
            between = exists & (keys >= low) & (keys < high)
            least = tl.minimum(least, tl.where(between, keys, 0x7FFFFFFF))
            greatest = tl.maximum(greatest, tl.where(between, keys, -0x7FFFFFFF))
        reached = tl.sum(sums, 1)
        is_enough = reached >= need
        above = tl.maximum(above, tl.max(tl.where(is_enough, 0, reached), 0))
        low = tl.maximum(tl.max(tl.where(is_enough, tried, low), 0), tl.min(least, 0))
        high = tl.minimum(tl.min(tl.where(is_enough, high, tried), 0), tl.max(greatest, 0) + 1)
    return low, above


@triton.jit
def share(
    values_of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, key, BLOCK: tl.constexpr
):  # fmt: skip
    """(mass above a key, mass of one candidate that has it)."""
    sums = tl.zeros((BLOCK,), tl.int64)
    single = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, num, BLOCK):
        _ids, keys, mass, _exists = load_block(
            values_of_row, numbers, mask_start, listed, start, num, num_listed, peak, factor, floor, BLOCK
        )
        sums += tl.where(keys > key, mass, 0)
        single = tl.maximum(single, tl.where(keys == key, mass, 0))
    return tl.sum(sums, 0), tl.max(single, 0)


@triton.jit
def pick(
    values_of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, key, place, BLOCK: tl.constexpr
):  # fmt: skip
    """The id of number `place` among the candidates that have a key, by rising id."""
    token = tl.full((BLOCK,), -1, tl.int32)
    seen = place - place
    for start in range(0, num, BLOCK):
        ids, keys, _mass, exists = load_block(
            values_of_row, numbers, mask_start, listed, start, num, num_listed, peak, factor, floor, BLOCK
        )
        fits = exists & (keys == key)
        places = seen + tl.cumsum(fits.to(tl.int32), 0) - 1
        token = tl.maximum(token, tl.where(fits & (places <= place), ids, -1))
        seen += tl.sum(fits.to(tl.int32), 0)
    return tl.max(token, 0)


@triton.jit(do_not_specialize=["num_tiles", "capacity"])
def choose(
    logits, peaks, numbers, counts, masses, candidates, token_ids, vocab, num_tiles, capacity,
    BLOCK: tl.constexpr, WAYS: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    """token_ids int64 [rows]; -1 where a row is not finite. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    line = numbers + row * NUM_NUMBERS
    factor, floor, _limit = load_floats(line)
    peak_key, peak_id, peak = row_peak(peaks, row, num_tiles, MAX_TILES)
    if (factor == 0.0) | (peak_key > LARGEST_KEY):
        tl.store(token_ids + row, tl.where(peak_key > LARGEST_KEY, -1, peak_id))
        return
    fraction = uniform_bits(tl.load(line + 2), tl.load(line + 3))
    _level, num, _tile_counts, kept, min_p_mass, top_k = plan(line, fraction, counts, masses, row, num_tiles, MAX_TILES)
    num_listed = tl.where(num <= capacity, num, 0)
    num = tl.where(num <= capacity, num, vocab)
    of_row, listed = logits + row * vocab, candidates + row * capacity
    mask_start = mask_of(line)
    low, high = (peak_key - peak_key).to(tl.int64) - 0x7FFFFFFF, peak_key.to(tl.int64) + 1
    if top_k > 0:
        low, above = search(
            of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, high, top_k, False,
            BLOCK, WAYS,
        )  # fmt: skip
        mass_above, single = share(
            of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, BLOCK
        )
        kept = mass_above + (top_k - above) * single
    bound = top_p_mass(line, kept)
    if bound < tl.minimum(kept, min_p_mass):
        low, above = search(
            of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, high, bound, True,
            BLOCK, WAYS,
        )  # fmt: skip
        mass_above, single = share(
            of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, BLOCK
        )
        single = tl.maximum(single, 1)
        kept = tl.minimum(kept, above + (bound - above + single - 1) // single * single)
    target = drawn_mass(fraction, tl.minimum(kept, min_p_mass))
    low, above = search(
        of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, high, target + 1, True,
        BLOCK, WAYS,
    )  # fmt: skip
    mass_above, single = share(of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, BLOCK)
    place = ((target - above) // tl.maximum(single, 1)).to(tl.int32)
    token = pick(of_row, numbers, mask_start, listed, num, num_listed, peak, factor, floor, low, place, BLOCK)
    tl.store(token_ids + row, token.to(tl.int64))
