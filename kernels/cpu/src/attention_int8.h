// Scores and weighted sums over int8 keys and values. Included inside namespace kvd::KVD_LEVEL.

constexpr int SCORE_VECS = int(BLOCK_TOKENS) / W;

// Scores of R rows against B blocks from `entry` on.
template <int R, int B>
static __attribute__((noinline)) void score_blocks(const Tile &tile, int64_t row, int64_t entry) {
    const int64_t quads = tile.head_dim / 4;
    const uint8_t *lines[B];
    for (int b = 0; b < B; ++b) lines[b] = tile.sections[entry + b] + tile.kv_head * quads * 64;
    const int8_t *codes[R];
    vi sums[R][B][SCORE_VECS];
    for (int r = 0; r < R; ++r) {
        codes[r] = tile.codes + (row + r) * tile.pitch;
        for (int b = 0; b < B; ++b)
            for (int v = 0; v < SCORE_VECS; ++v) sums[r][b][v] = splat_int(tile.starts[row + r]);
    }
    for (int64_t quad = 0; quad < quads; ++quad) {
        Key keys[B][SCORE_VECS];
        for (int b = 0; b < B; ++b)
            for (int v = 0; v < SCORE_VECS; ++v) keys[b][v] = prepare_key(load_bytes(lines[b] + quad * 64 + v * 4 * W));
        for (int r = 0; r < R; ++r) {
            int32_t four;
            __builtin_memcpy(&four, codes[r] + quad * 4, 4);
            const vi q = splat_int(four);
            for (int b = 0; b < B; ++b)
                for (int v = 0; v < SCORE_VECS; ++v) sums[r][b][v] = dot_key(sums[r][b][v], keys[b][v], q);
        }
    }
    for (int r = 0; r < R; ++r) {
        const vf scale = splat(tile.query_scales[row + r]);
        for (int b = 0; b < B; ++b)
            for (int v = 0; v < SCORE_VECS; ++v) {
                const int64_t slot = (entry + b) * BLOCK_TOKENS + v * W;
                const vf score = to_float(sums[r][b][v]) * scale * load(tile.key_scales + slot);
                store(tile.scores + (row + r) * SPLIT_SLOTS + slot, score);
            }
    }
}

constexpr int SCORE_BLOCKS = W == 16 ? 2 : 1;  // enough independent sums to hide the latency of a dot product

template <int B>
KVD_INLINE void score_rows(const Tile &tile, int64_t entry) {
    int64_t row = 0;
    for (; row + 4 <= tile.rows; row += 4) score_blocks<4, B>(tile, row, entry);
    switch (tile.rows - row) {
        case 3: score_blocks<3, B>(tile, row, entry); break;
        case 2: score_blocks<2, B>(tile, row, entry); break;
        case 1: score_blocks<1, B>(tile, row, entry); break;
    }
}

static void score_int8(Tile &tile) {
    load_scales(tile, tile.layer->k_scale_offset, tile.key_scales);
    int64_t entry = tile.first_entry;
    for (; entry + SCORE_BLOCKS <= tile.last_entry; entry += SCORE_BLOCKS) score_rows<SCORE_BLOCKS>(tile, entry);
    for (; entry < tile.last_entry; ++entry) score_rows<1>(tile, entry);
}

// Scales of the values: 0 in slots that are not in use, and where a scale is NaN, which bad_values then tells.
static void load_value_scales(Tile &tile, int64_t split) {
    load_scales(tile, tile.layer->v_scale_offset, tile.value_scales);
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        float *scales = tile.value_scales + entry * BLOCK_TOKENS;
        for (int64_t i = used_slots(tile, split, entry); i < BLOCK_TOKENS; ++i) scales[i] = 0.0f;
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

// Weights are stored as the products below read them: slot by slot as int16, or low digits [256], then high digits.
KVD_INLINE void store_weights(uint8_t *weights, int64_t slot, vi codes) {
#if KVD_BYTE_DIGITS
    typedef uint8_t digits __attribute__((vector_size(W), aligned(1), may_alias));
    *reinterpret_cast<digits *>(weights + slot) = __builtin_convertvector(codes & 255, digits);
    *reinterpret_cast<digits *>(weights + SPLIT_SLOTS + slot) = __builtin_convertvector(codes >> 8, digits);
#else
    typedef int16_t words __attribute__((vector_size(2 * W), aligned(2), may_alias));
    *reinterpret_cast<words *>(weights + 2 * slot) = __builtin_convertvector(codes, words);
#endif
}

// out of R rows for W channels from `channel` on.
template <int R>
static __attribute__((noinline)) void sum_values(const Tile &tile, int64_t row, int64_t channel) {
    const int64_t quad_bytes = tile.head_dim * 4;
    const uint8_t *weights = tile.weights + row * SPLIT_SLOTS * 2;
    vi low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = splat_int(0);
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        const uint8_t *values =
            tile.sections[entry] + tile.layer->v_offset + tile.kv_head * 4 * quad_bytes + channel * 4;
        for (int64_t quad = 0; quad < 4; ++quad, values += quad_bytes) {
            const int64_t slot = entry * BLOCK_TOKENS + quad * 4;
#if KVD_BYTE_DIGITS
            const vi four_tokens = load_bytes(values);
            for (int r = 0; r < R; ++r) {
                int32_t digits[2];
                __builtin_memcpy(&digits[0], weights + r * SPLIT_SLOTS * 2 + slot, 4);
                __builtin_memcpy(&digits[1], weights + r * SPLIT_SLOTS * 2 + SPLIT_SLOTS + slot, 4);
                low[r] = dot_u8_s8(low[r], splat_int(digits[0]), four_tokens);
                high[r] = dot_u8_s8(high[r], splat_int(digits[1]), four_tokens);
            }
#else
            typedef int8_t half_line __attribute__((vector_size(2 * W), aligned(1), may_alias));
            typedef int64_t quads_of_words __attribute__((vector_size(4 * W)));
            const vh first = __builtin_convertvector(*reinterpret_cast<const half_line *>(values), vh);
            const vh second = __builtin_convertvector(*reinterpret_cast<const half_line *>(values + 2 * W), vh);
            for (int r = 0; r < R; ++r) {
                int64_t four;
                __builtin_memcpy(&four, weights + (r * SPLIT_SLOTS + slot) * 2, 8);
                const vh w = (vh)(quads_of_words{} + four);
                low[r] = dot_words(low[r], first, w);
                high[r] = dot_words(high[r], second, w);
            }
#endif
        }
    }
    for (int r = 0; r < R; ++r) {
#if KVD_BYTE_DIGITS
        const vi sums = low[r] + (high[r] << 8);
#else
        const vi sums = join_pairs(low[r], high[r]);
#endif
        store(tile.out + (row + r) * tile.pitch + channel, to_float(sums) * splat(tile.weight_scales[row + r]));
    }
}

// The last W channels may reach beyond head_dim: what is read there lies inside the block, since scales follow the
// values, and what is written there lies inside the row's pitch and is never looked at.
static void sum_int8(Tile &tile) {
    for (int64_t row = 0; row < tile.rows;) {
        const int64_t rest = tile.rows - row;
        for (int64_t channel = 0; channel < tile.head_dim; channel += W) {
            switch (rest) {
                case 1: sum_values<1>(tile, row, channel); break;
                case 2: sum_values<2>(tile, row, channel); break;
                case 3: sum_values<3>(tile, row, channel); break;
                default: sum_values<4>(tile, row, channel);
            }
        }
        row += rest < 4 ? rest : 4;
    }
}
