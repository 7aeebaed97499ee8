// Scores and weighted sums over int8 keys and values. Included inside namespace kvd::KVD_LEVEL.

constexpr int SCORE_VECS = int(BLOCK_TOKENS) / W;

// Scores of R rows against B blocks from `entry` on; what `fetch` names is brought near meanwhile, a line per quad.
template <int R, int B>
KVD_INLINE void score_blocks(
    const int8_t *codes, int64_t pitch, int64_t quads, const uint8_t *const *keys, const int32_t *starts,
    const uint8_t *const *fetch, vi (*sums)[B][SCORE_VECS]) {
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b)
            for (int v = 0; v < SCORE_VECS; ++v) sums[r][b][v] = splat_int(starts[r]);
    for (int64_t quad = 0; quad < quads; ++quad) {
        Key lines[B][SCORE_VECS];
        for (int b = 0; b < B; ++b) {
            __builtin_prefetch(fetch[b] + quad * 64);
            for (int v = 0; v < SCORE_VECS; ++v)
                lines[b][v] = prepare_key(load_bytes(keys[b] + quad * 64 + v * 4 * W));
        }
        for (int r = 0; r < R; ++r) {
            int32_t four;
            __builtin_memcpy(&four, codes + r * pitch + quad * 4, 4);
            const vi q = splat_int(four);
            for (int b = 0; b < B; ++b)
                for (int v = 0; v < SCORE_VECS; ++v) sums[r][b][v] = dot_key(sums[r][b][v], lines[b][v], q);
        }
    }
}

// Scores of R rows against B blocks at a time, while so many are left of those up to last_entry.
template <int R, int B>
KVD_INLINE int64_t score_entries(const Tile &tile, int64_t row, int64_t entry) {
    const int64_t quads = tile.head_dim / 4, at = tile.kv_head * quads * 64, last = tile.last_entry;
    const int64_t pitch = tile.pitch, to_values = tile.layer->v_offset;
    const int8_t *codes = tile.codes + row * pitch;
    float *scores = tile.scores + row * SPLIT_SLOTS;
    const float *key_scales = tile.key_scales, *scales = tile.query_scales + row;
    for (; entry + B <= last; entry += B) {
        const uint8_t *keys[B], *values[B];
        for (int b = 0; b < B; ++b) {
            keys[b] = tile.sections[entry + b] + at;
            values[b] = keys[b] + to_values;  // as many lines as the keys
        }
        vi sums[R][B][SCORE_VECS];
        score_blocks<R, B>(codes, pitch, quads, keys, tile.starts + row, values, sums);
        for (int r = 0; r < R; ++r)
            for (int b = 0; b < B; ++b)
                for (int v = 0; v < SCORE_VECS; ++v) {
                    const int64_t slot = (entry + b) * BLOCK_TOKENS + v * W;
                    const vf score = to_float(sums[r][b][v]) * splat(scales[r]) * load(key_scales + slot);
                    store(scores + r * SPLIT_SLOTS + slot, score);
                }
    }
    return entry;
}

template <int R>
static __attribute__((noinline)) void score_rows(const Tile &tile, int64_t row) {
    constexpr int AT_ONCE = W == 16 ? (R <= 2 ? 4 : 2) : 1;  // enough sums to hide the latency of a dot product
    const int64_t entry = score_entries<R, AT_ONCE>(tile, row, tile.first_entry);
    if (AT_ONCE > 1) score_entries<R, 1>(tile, row, entry);
}

static void score_int8(Tile &tile) {
    load_scales(tile, tile.layer->k_scale_offset, tile.key_scales);
    int64_t row = 0;
    for (; row + 4 <= tile.rows; row += 4) score_rows<4>(tile, row);
    switch (tile.rows - row) {
        case 3: score_rows<3>(tile, row); break;
        case 2: score_rows<2>(tile, row); break;
        case 1: score_rows<1>(tile, row); break;
    }
}

// Scales of the values: 0 in slots that are not in use, and where a scale is NaN, which bad_values then tells.
static void load_value_scales(Tile &tile) {
    load_scales(tile, tile.layer->v_scale_offset, tile.value_scales);
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        float *scales = tile.value_scales + entry * BLOCK_TOKENS;
        for (int64_t i = tile.used[entry]; i < BLOCK_TOKENS; ++i) scales[i] = 0.0f;
        vi is_bad = splat_int(0);
        for (int64_t i = 0; i < BLOCK_TOKENS; i += W) is_bad |= load(scales + i) != load(scales + i);
        int32_t any = 0;
        for (int i = 0; i < W; ++i) any |= is_bad[i];
        if (!any) continue;
        if (!tile.has_bad_values) memset(tile.bad_values, 0, SPLIT_SLOTS);
        tile.has_bad_values = true;
        for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
            if (scales[i] == scales[i]) continue;
            tile.bad_values[entry * BLOCK_TOKENS + i] = 1;
            scales[i] = 0.0f;
        }
    }
}

// Weights are stored as the products below read them: [row][low digits 256 | high digits 256], or [row][256] int16 with
// the tokens of a quad in the order 0, 2, 1, 3.
KVD_INLINE void store_weights(uint8_t *weights, int64_t slot, vi codes) {
#if KVD_BYTE_DIGITS
    store_low_bytes(weights + slot, codes);
    store_low_bytes(weights + SPLIT_SLOTS + slot, codes >> 8);
#else
    store_words_by_pairs(weights + 2 * slot, codes);
#endif
}

KVD_INLINE vi repeat_word(const uint8_t *p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return splat_int(word);
}

constexpr int VALUE_VECS = W == 8 ? 2 : 1;  // vectors of channels that share the loads of weights
constexpr int64_t CHANNELS_AT_ONCE = VALUE_VECS * W;

// out of R rows for CHANNELS_AT_ONCE channels from `channel` on. `next_keys`, where set, are the K lines of this head in
// the blocks of the split to come: the part of them that belongs to this call is brought near.
template <int R>
static __attribute__((noinline)) void sum_values(
    const Tile &tile, int64_t row, int64_t channel, const uint8_t *const *next_keys) {
    const int64_t quad_bytes = tile.head_dim * 4, last = tile.last_entry;
    const int64_t at = tile.layer->v_offset + tile.kv_head * 4 * quad_bytes + channel * 4;
    const uint8_t *const *sections = tile.sections;
    const uint8_t *weights = tile.weights + row * SPLIT_SLOTS * 2;
    vi sums[R][VALUE_VECS], high[R][VALUE_VECS];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VALUE_VECS; ++v) sums[r][v] = high[r][v] = splat_int(0);
    for (int64_t entry = tile.first_entry; entry < last; ++entry) {
        const uint8_t *values = sections[entry] + at;
        if (next_keys != nullptr)
            for (int i = 0; i < CHANNELS_AT_ONCE / 4; ++i) __builtin_prefetch(next_keys[entry] + channel * 16 + i * 64);
#pragma GCC unroll 1
        for (int64_t slot = entry * BLOCK_TOKENS; slot < (entry + 1) * BLOCK_TOKENS; slot += 4, values += quad_bytes) {
#if KVD_BYTE_DIGITS
            vi lines[VALUE_VECS];
            for (int v = 0; v < VALUE_VECS; ++v) lines[v] = load_bytes(values + v * 4 * W);
            for (int r = 0; r < R; ++r) {
                const uint8_t *digits = weights + r * SPLIT_SLOTS * 2 + slot;
                const vi low_digits = repeat_word(digits), high_digits = repeat_word(digits + SPLIT_SLOTS);
                for (int v = 0; v < VALUE_VECS; ++v) {
                    sums[r][v] = dot_u8_s8(sums[r][v], low_digits, lines[v]);
                    high[r][v] = dot_u8_s8(high[r][v], high_digits, lines[v]);
                }
            }
#else
            vh even[VALUE_VECS], odd[VALUE_VECS];
            for (int v = 0; v < VALUE_VECS; ++v) {
                const vi line = load_bytes(values + v * 4 * W);
                even[v] = even_tokens(line);
                odd[v] = odd_tokens(line);
            }
            for (int r = 0; r < R; ++r) {
                const uint8_t *quad = weights + (r * SPLIT_SLOTS + slot) * 2;
                const vh even_weights = (vh)repeat_word(quad), odd_weights = (vh)repeat_word(quad + 4);
                for (int v = 0; v < VALUE_VECS; ++v)
                    sums[r][v] = dot_words(dot_words(sums[r][v], even[v], even_weights), odd[v], odd_weights);
            }
#endif
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VALUE_VECS; ++v) {
            const vf sum = to_float(sums[r][v] + (high[r][v] << 8));
            store(tile.out + (row + r) * tile.pitch + channel + v * W, sum * splat(tile.weight_scales[row + r]));
        }
}

// The last channels may reach beyond head_dim: what is read there lies inside the block, since scales follow the
// values, and what is written there lies inside the row's pitch and is never looked at.
static void sum_int8(Tile &tile) {
    const uint8_t *const *next_keys = tile.has_next ? tile.next_keys : nullptr;
    for (int64_t row = 0; row < tile.rows; row += 4, next_keys = nullptr) {
        const int64_t rest = tile.rows - row;
        for (int64_t channel = 0; channel < tile.head_dim; channel += CHANNELS_AT_ONCE) {
            switch (rest) {
                case 1: sum_values<1>(tile, row, channel, next_keys); break;
                case 2: sum_values<2>(tile, row, channel, next_keys); break;
                case 3: sum_values<3>(tile, row, channel, next_keys); break;
                default: sum_values<4>(tile, row, channel, next_keys);
            }
        }
    }
}
