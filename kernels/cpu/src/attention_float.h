// 16-bit keys and values, and the key bias: fixed-point numbers whose dot products float64 holds exactly, in any order.
// Included inside namespace kvd::KVD_LEVEL.
//
// A block is turned into integers once for all rows of a tile, in the order in which it is stored: K as
// [D/4][16 tokens][4 channels], V as [4 quads][D][4 tokens]. A vector of doubles holds one such group of four, or two.

constexpr int32_t INFINITY_BITS = 0x7f800000;
constexpr int GROUPS_D = WD / 4;               // groups of four in a vector of doubles
constexpr int KEY_VECS = int(BLOCK_TOKENS) / GROUPS_D;  // vectors of one quad of channels of a block

#if defined(KVD_EMULATE) || defined(KVD_LEVEL_PORTABLE)
KVD_INLINE vd fused(vd a, vd b, vd c) { return a * b + c; }
KVD_INLINE vd load_wide(const float *p) {
    typedef float half_vf __attribute__((vector_size(4 * WD), aligned(4), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const half_vf *>(p), vd);
}
#elif defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
KVD_INLINE vd fused(vd a, vd b, vd c) { return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
KVD_INLINE vd load_wide(const float *p) { return (vd)_mm512_cvtps_pd(_mm256_loadu_ps(p)); }
#else
KVD_INLINE vd fused(vd a, vd b, vd c) { return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
KVD_INLINE vd load_wide(const float *p) { return (vd)_mm256_cvtps_pd(_mm_loadu_ps(p)); }
#endif

KVD_INLINE vd load_wide(const double *p) { return *reinterpret_cast<const vd_unaligned *>(p); }

// Four numbers, repeated to fill a vector.
KVD_INLINE vd repeat_four(const float *p) {
    vd out;
    for (int i = 0; i < WD; ++i) out[i] = double(p[i % 4]);
    return out;
}

KVD_INLINE vf load_16bit(const uint8_t *p, int32_t type) {
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(p);
    return type == KVD_F16 ? load_halves(halves) : load_bf16(halves);
}

KVD_INLINE int32_t largest_of_four(const int32_t *x) {
    const int32_t a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}

// Scales and their reciprocals from the largest magnitudes of 16 tokens, as bit patterns.
KVD_INLINE void scales_of_tokens(const int32_t *largest, int bits, float *scales, float *inverses) {
    for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
        const uint32_t scale = fixed_point_scale_bits(uint32_t(largest[i]), bits), inverse = reciprocal_bits(scale);
        __builtin_memcpy(scales + i, &scale, 4);
        __builtin_memcpy(inverses + i, &inverse, 4);
    }
}

// K of one block as integers [D/4][16][4] in block_floats; the scales of its 16 tokens in key_scales.
static void decode_keys(Tile &tile, int64_t entry) {
    constexpr int64_t VECS_OF_QUAD = BLOCK_TOKENS * 4 / W;
    const int64_t quads = tile.head_dim / 4;
    const uint8_t *source = tile.sections[entry] + tile.kv_head * quads * 128;
    vi largest[VECS_OF_QUAD];
    for (int64_t v = 0; v < VECS_OF_QUAD; ++v) largest[v] = splat_int(0);
    // As many lines as the keys: the values of this block, and the keys of the next.
    const uint8_t *values = source + tile.layer->v_offset;
    const uint8_t *next = tile.sections[entry + 1 < tile.last_entry ? entry + 1 : entry] + tile.kv_head * quads * 128;
    for (int64_t quad = 0; quad < quads; ++quad) {
        for (int64_t line = quad * 128; line < (quad + 1) * 128; line += 64) {
            __builtin_prefetch(values + line);
            __builtin_prefetch(next + line);
        }
        for (int64_t v = 0; v < VECS_OF_QUAD; ++v) {
            const vf x = load_16bit(source + (quad * 64 + v * W) * 2, tile.layer->k_type);
            store(tile.block_floats + quad * 64 + v * W, x);
            largest[v] = larger_magnitude(largest[v], x);
        }
    }
    alignas(64) int32_t of_channels[BLOCK_TOKENS * 4], of_tokens[BLOCK_TOKENS];
    alignas(64) float inverses[BLOCK_TOKENS], spread[64];
    for (int64_t v = 0; v < VECS_OF_QUAD; ++v) store_bytes(of_channels + v * W, largest[v]);
    for (int64_t i = 0; i < BLOCK_TOKENS; ++i) of_tokens[i] = largest_of_four(of_channels + 4 * i);
    scales_of_tokens(of_tokens, tile.key_bits, tile.key_scales + entry * BLOCK_TOKENS, inverses);
    for (int64_t i = 0; i < 64; ++i) spread[i] = inverses[i / 4];
    for (int64_t quad = 0; quad < quads; ++quad)
        for (int64_t v = 0; v < 64; v += W) {
            float *x = tile.block_floats + quad * 64 + v;
            store(x, load(x) * load(spread + v) + ROUND - ROUND);
        }
}

// Sums of four neighbouring doubles, rounded to float32 once.
KVD_INLINE void store_sums(const vd *sums, int count, float *out) {
    for (int v = 0; v < count; ++v)
        for (int g = 0; g < GROUPS_D; ++g) {
            const vd x = sums[v];
            out[v * GROUPS_D + g] = float(x[4 * g] + x[4 * g + 1] + x[4 * g + 2] + x[4 * g + 3]);
        }
}

// Scores of R rows against the decoded block.
template <int R>
static __attribute__((noinline)) void score_wide(const Tile &tile, int64_t row, int64_t entry) {
    constexpr int AT_ONCE = R == 4 ? 2 : 4;  // vectors of keys
    const int64_t quads = tile.head_dim / 4;
    const double *codes = tile.wide_codes + row * quads * WD;
    for (int64_t first = 0; first < KEY_VECS; first += AT_ONCE) {
        const float *lines = tile.block_floats + first * WD;
        vd sums[R][AT_ONCE];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < AT_ONCE; ++v) sums[r][v] = vd{};
        for (int64_t quad = 0; quad < quads; ++quad)
            for (int v = 0; v < AT_ONCE; ++v) {
                const vd keys = load_wide(lines + quad * 64 + v * WD);
                for (int r = 0; r < R; ++r)
                    sums[r][v] = fused(keys, load_wide(codes + (r * quads + quad) * WD), sums[r][v]);
            }
        for (int r = 0; r < R; ++r)
            store_sums(
                sums[r], AT_ONCE, tile.scores + (row + r) * SPLIT_SLOTS + entry * BLOCK_TOKENS + first * GROUPS_D);
    }
    for (int r = 0; r < R; ++r) {
        const vf scale = splat(tile.query_scales[row + r]);
        for (int64_t i = entry * BLOCK_TOKENS; i < (entry + 1) * BLOCK_TOKENS; i += W) {
            float *score = tile.scores + (row + r) * SPLIT_SLOTS + i;
            store(score, load(score) * scale * load(tile.key_scales + i));
        }
    }
}

static void score_float(Tile &tile) {
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        decode_keys(tile, entry);
        int64_t row = 0;
        for (; row + 4 <= tile.rows; row += 4) score_wide<4>(tile, row, entry);
        switch (tile.rows - row) {
            case 3: score_wide<3>(tile, row, entry); break;
            case 2: score_wide<2>(tile, row, entry); break;
            case 1: score_wide<1>(tile, row, entry); break;
        }
    }
}

// One rope row as integers: cos, sin, and ones for passing channels. Returns the scale.
KVD_INLINE float decode_position(const Tile &tile, int64_t position, float *row) {
    const int64_t half = tile.args->half;
    const float *cos = tile.args->cos + position * half, *sin = tile.args->sin + position * half;
    if (half % W || 2 * half != tile.pitch) {
        memcpy(row, cos, size_t(half) * 4);
        memcpy(row + half, sin, size_t(half) * 4);
        for (int64_t c = 2 * half; c < tile.pitch; ++c) row[c] = c < tile.head_dim ? 1.0f : 0.0f;
        return to_fixed_point(row, tile.pitch, tile.key_bits, row);
    }
    vi largest = splat_int(0);
    for (int64_t c = 0; c < half; c += W)
        largest = larger_magnitude(larger_magnitude(largest, load(cos + c)), load(sin + c));
    float inverse;
    const float scale = fixed_point_scale(largest_lane(bits_to_float(largest)), tile.key_bits, &inverse);
    for (int64_t c = 0; c < half; c += W) {
        store(row + c, load(cos + c) * splat(inverse) + ROUND - ROUND);
        store(row + half + c, load(sin + c) * splat(inverse) + ROUND - ROUND);
    }
    return scale;
}

// Rope rows of 16 key positions as integers [16][pitch] in block_floats.
static void decode_positions(Tile &tile, int64_t entry, float *scales) {
    const int64_t last = tile.args->max_positions - 1;
    for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
        const int64_t position = tile.key_positions[entry * BLOCK_TOKENS + i];
        scales[i] = decode_position(tile, position < last ? position : last, tile.block_floats + i * tile.pitch);
    }
}

// Add what the key bias brings to the scores of R rows.
template <int R>
static __attribute__((noinline)) void add_bias(const Tile &tile, int64_t row, int64_t entry, const float *scales) {
    alignas(64) float from_bias[R][BLOCK_TOKENS];
    constexpr int AT_ONCE = R == 4 ? 2 : 4;  // positions
    const int64_t pitch = tile.pitch;
    const double *codes = tile.bias_codes + row * pitch;
    for (int64_t i = 0; i < BLOCK_TOKENS; i += AT_ONCE) {
        vd sums[R][AT_ONCE];
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < AT_ONCE; ++k) sums[r][k] = vd{};
        for (int64_t c = 0; c < pitch; c += WD)
            for (int k = 0; k < AT_ONCE; ++k) {
                const vd turns = load_wide(tile.block_floats + (i + k) * pitch + c);
                for (int r = 0; r < R; ++r) sums[r][k] = fused(turns, load_wide(codes + r * pitch + c), sums[r][k]);
            }
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < AT_ONCE; ++k) {
                const vd x = sums[r][k];
                double sum = x[0] + x[1] + x[2] + x[3];
                if constexpr (WD == 8) sum += x[4 % WD] + x[5 % WD] + x[6 % WD] + x[7 % WD];
                from_bias[r][i + k] = float(sum);
            }
    }
    for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < BLOCK_TOKENS; i += W) {
            float *score = tile.scores + (row + r) * SPLIT_SLOTS + entry * BLOCK_TOKENS + i;
            const vf more = load(from_bias[r] + i) * splat(tile.bias_scales[row + r]) * load(scales + i);
            store(score, load(score) + more);
        }
}

static void add_key_bias(Tile &tile) {
    alignas(64) float scales[BLOCK_TOKENS];
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        decode_positions(tile, entry, scales);
        int64_t row = 0;
        for (; row + 4 <= tile.rows; row += 4) add_bias<4>(tile, row, entry, scales);
        switch (tile.rows - row) {
            case 3: add_bias<3>(tile, row, entry, scales); break;
            case 2: add_bias<2>(tile, row, entry, scales); break;
            case 1: add_bias<1>(tile, row, entry, scales); break;
        }
    }
}

KVD_INLINE const uint8_t *values_of(const Tile &tile, int64_t entry) {
    return tile.sections[entry] + tile.layer->v_offset + tile.kv_head * BLOCK_TOKENS * tile.head_dim * 2;
}

// Fixed-point scales of 16-bit values: 0 in slots that are not in use. A token with an element that is not finite is
// told by bad_values; it is left out of the sums that all rows share, since it would spoil rows that do not see it.
static void load_float_value_scales(Tile &tile) {
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        alignas(64) int32_t largest[BLOCK_TOKENS], lanes[W];
        alignas(64) float inverses[BLOCK_TOKENS];
        const uint8_t *source = values_of(tile, entry);
        for (int64_t quad = 0; quad < 4; ++quad, source += tile.head_dim * 8) {
            vi most = splat_int(0);
            for (int64_t i = 0; i < tile.head_dim * 4; i += W)
                most = larger_magnitude(most, load_16bit(source + i * 2, tile.layer->v_type));
            store_bytes(lanes, most);
            for (int64_t t = 0; t < 4; ++t) {
                int32_t best = lanes[t];
                for (int64_t i = t + 4; i < W; i += 4) best = lanes[i] > best ? lanes[i] : best;
                largest[quad * 4 + t] = best;
            }
        }
        float *scales = tile.value_scales + entry * BLOCK_TOKENS;
        scales_of_tokens(largest, tile.value_bits, scales, inverses);
        for (int64_t i = tile.used[entry]; i < BLOCK_TOKENS; ++i) scales[i] = 0.0f;
        for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
            const bool is_bad = scales[i] != 0.0f && largest[i] >= INFINITY_BITS;
            if (is_bad && !tile.has_bad_values) {
                memset(tile.bad_values, 0, SPLIT_SLOTS);
                tile.has_bad_values = true;
            }
            if (is_bad) tile.bad_values[entry * BLOCK_TOKENS + i] = 1;
        }
    }
}

// V of one block as integers [4][D][4] in block_floats; zeros for tokens that are not in use, or bad.
static void decode_values(Tile &tile, int64_t entry) {
    const uint8_t *source = values_of(tile, entry);
    for (int64_t quad = 0; quad < 4; ++quad) {
        alignas(64) float inverse[W];
        alignas(64) int32_t keep[W];
        for (int64_t i = 0; i < W; ++i) {
            const int64_t slot = entry * BLOCK_TOKENS + quad * 4 + i % 4;
            uint32_t word;
            __builtin_memcpy(&word, tile.value_scales + slot, 4);
            word = reciprocal_bits(word);
            __builtin_memcpy(inverse + i, &word, 4);
            const bool is_bad = tile.has_bad_values && tile.bad_values[slot];
            keep[i] = tile.value_scales[slot] != 0.0f && !is_bad ? -1 : 0;
        }
        const vi mask = load_bytes(keep);
        for (int64_t i = 0; i < tile.head_dim * 4; i += W) {
            const int64_t at = quad * tile.head_dim * 4 + i;
            const vf code = load_16bit(source + at * 2, tile.layer->v_type) * load(inverse) + ROUND - ROUND;
            store(tile.block_floats + at, bits_to_float(bits(code) & mask));
        }
    }
}

// Add one decoded block to the sums of R rows: four partial sums per channel, one for each token of a quad.
template <int R>
static __attribute__((noinline)) void sum_wide(const Tile &tile, int64_t row, int64_t entry) {
    vd weights[R][4];
    for (int r = 0; r < R; ++r)
        for (int64_t quad = 0; quad < 4; ++quad)
            weights[r][quad] = repeat_four(tile.scores + (row + r) * SPLIT_SLOTS + entry * BLOCK_TOKENS + quad * 4);
    const int64_t width = tile.head_dim * 4;
    for (int64_t i = 0; i < width; i += WD) {
        vd values[4];
        for (int64_t quad = 0; quad < 4; ++quad) values[quad] = load_wide(tile.block_floats + quad * width + i);
        for (int r = 0; r < R; ++r) {
            vd_unaligned *sum = reinterpret_cast<vd_unaligned *>(tile.wide_out + (row + r) * width + i);
            vd x = *sum;
            for (int64_t quad = 0; quad < 4; ++quad) x = fused(values[quad], weights[r][quad], x);
            *sum = x;
        }
    }
}

// Infinities and NaN of a token, for the rows that give it a weight.
static void add_bad_values(Tile &tile, int64_t slot) {
    const int64_t width = tile.head_dim * 4, entry = slot / BLOCK_TOKENS, token = slot % BLOCK_TOKENS;
    const uint8_t *source = values_of(tile, entry) + (token / 4 * width + token % 4) * 2;
    for (int64_t row = 0; row < tile.rows; ++row) {
        const float weight = tile.scores[row * SPLIT_SLOTS + slot];
        if (weight == 0.0f) continue;
        for (int64_t c = 0; c < tile.head_dim; ++c) {
            uint16_t half;
            memcpy(&half, source + c * 8, 2);
            const float x = tile.layer->v_type == KVD_F16 ? half_to_float(half) : bf16_to_float(half);
            if (!(__builtin_fabsf(x) <= -LOWEST)) tile.wide_out[row * width + c * 4] += double(x) * double(weight);
        }
    }
}

static void sum_float(Tile &tile) {
    const int64_t width = tile.head_dim * 4;
    memset(tile.wide_out, 0, size_t(tile.rows * width) * 8);
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        decode_values(tile, entry);
        int64_t row = 0;
        for (; row + 3 <= tile.rows; row += 3) sum_wide<3>(tile, row, entry);
        if (tile.rows - row == 2) sum_wide<2>(tile, row, entry);
        if (tile.rows - row == 1) sum_wide<1>(tile, row, entry);
    }
    if (tile.has_bad_values)
        for (int64_t slot = tile.first_entry * BLOCK_TOKENS; slot < tile.last_entry * BLOCK_TOKENS; ++slot)
            if (tile.bad_values[slot]) add_bad_values(tile, slot);
    for (int64_t row = 0; row < tile.rows; ++row)
        for (int64_t c = 0; c < tile.head_dim; ++c) {
            const double *four = tile.wide_out + row * width + c * 4;
            tile.out[row * tile.pitch + c] = float(four[0] + four[1] + four[2] + four[3]) * tile.weight_scales[row];
        }
}
