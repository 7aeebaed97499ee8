// One tile of 16 outputs of integer weights times some rows. Included inside namespace kvd::KVD_LEVEL.
//
// The arithmetic is that of kvd_kernels.reference.linear, every operation rounded on its own, groups ascending:
//     y ← y + s_x · (Σ q_w q_x · s_w + Σ q_x · o_w)        (no o_w term for int8 weights)
// and depends neither on R nor on which rows share a call.

// Rows that one pass over a tile serves: as many as the registers hold sums for.
#if defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
constexpr int ROWS_PER_PASS = 8;
#else
constexpr int ROWS_PER_PASS = 4;
#endif

// With few rows memory is the limit: its lines are asked for early. Tiles follow one another, so what lies ahead is the
// next tile of this piece of work or the first one of somebody else's.
constexpr int PREFETCHED_ROWS = 2;
constexpr int64_t PREFETCH_BYTES = 1024;

// Activations of some rows: code c of row r is codes[r · stride + c]; scales and sums are [rows, groups].
struct Rows {
    const int8_t *codes;
    const float *scales;
    const float *sums;
    int64_t stride, groups, length, pitch;

    KVD_ALWAYS_INLINE Rows(const KvdQuantized &q, int64_t row)
        : codes(q.codes + row * q.stride), scales(q.scales + row * q.groups), sums(q.sums + row * q.groups),
          stride(q.stride), groups(q.groups), length(q.length), pitch(codes_pitch(q.length)) {}

    KVD_ALWAYS_INLINE void advance(int64_t rows) {
        codes += rows * stride;
        scales += rows * groups;
        sums += rows * groups;
    }
};

// y[r][16] of R rows from row `x` on.
template <bool IS_U4, int R, int LINES>
static __attribute__((noinline)) void multiply_tile(const uint8_t *tile, const Rows &x, float *y) {
    const int64_t length = LINES == 0 ? x.length : LINES * (IS_U4 ? 8 : 4);
    const int64_t lines = IS_U4 ? u4_lines(length) : i8_lines(length);
    const int64_t step = IS_U4 ? u4_group_bytes(length) : lines * LINE;
    const int64_t pitch = codes_pitch(length);
    const uint16_t *i8_scales = reinterpret_cast<const uint16_t *>(tile + i8_scales_at(x.groups, length));
    const int8_t *codes = x.codes;
    vf total[R][VECS];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) total[r][v] = splat(0.0f);
    for (int64_t group = 0; group < x.groups; ++group, tile += step, codes += pitch) {
        if constexpr (R <= PREFETCHED_ROWS)
            for (int64_t ahead = 0; ahead < step; ahead += LINE) __builtin_prefetch(tile + PREFETCH_BYTES + ahead);
        vi sums[R][VECS];
        const uint16_t *scales;
        if constexpr (IS_U4) {
            dot_u4<R, LINES>(tile, lines, codes, x.stride, sums);
            scales = reinterpret_cast<const uint16_t *>(tile + step - LINE);
        } else {
            dot_i8<R, LINES>(tile, lines, codes, x.stride, x.sums + group, x.groups, sums);
            scales = i8_scales + group * TILE;
        }
        vf weight_scales[VECS], weight_offsets[VECS];
        for (int v = 0; v < VECS; ++v) {
            weight_scales[v] = load_halves(scales + v * W);
            if constexpr (IS_U4) weight_offsets[v] = load_halves(scales + TILE + v * W);
        }
        for (int r = 0; r < R; ++r) {
            const float scale = x.scales[r * x.groups + group];
            const float code_sum = x.sums[r * x.groups + group];
            for (int v = 0; v < VECS; ++v) {
                vf term = to_float(sums[r][v]) * weight_scales[v];
                if constexpr (IS_U4) term += weight_offsets[v] * code_sum;
                total[r][v] += term * scale;
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) store(y + r * TILE + v * W, total[r][v]);
}

template <bool IS_U4, int LINES>
static void multiply_rows_of(const uint8_t *tile, Rows x, int64_t rows, float *y) {
    for (; rows >= ROWS_PER_PASS; rows -= ROWS_PER_PASS, y += ROWS_PER_PASS * TILE) {
        multiply_tile<IS_U4, ROWS_PER_PASS, LINES>(tile, x, y);
        x.advance(ROWS_PER_PASS);
    }
    switch (rows) {
        case 1: return multiply_tile<IS_U4, 1, LINES>(tile, x, y);
        case 2: return multiply_tile<IS_U4, 2, LINES>(tile, x, y);
        case 3: return multiply_tile<IS_U4, 3, LINES>(tile, x, y);
    }
    if constexpr (ROWS_PER_PASS == 8) {
        switch (rows) {
            case 4: return multiply_tile<IS_U4, 4, LINES>(tile, x, y);
            case 5: return multiply_tile<IS_U4, 5, LINES>(tile, x, y);
            case 6: return multiply_tile<IS_U4, 6, LINES>(tile, x, y);
            case 7: return multiply_tile<IS_U4, 7, LINES>(tile, x, y);
        }
    }
}

// y[rows][16]. Groups of the usual lengths have code of their own.
template <bool IS_U4>
static void multiply_rows(const uint8_t *tile, const Rows &x, int64_t rows, float *y) {
    constexpr int CHANNELS = IS_U4 ? 8 : 4;  // of a line
    if (x.length == 32) return multiply_rows_of<IS_U4, 32 / CHANNELS>(tile, x, rows, y);
    if (x.length == 64) return multiply_rows_of<IS_U4, 64 / CHANNELS>(tile, x, rows, y);
    if (x.length == 128) return multiply_rows_of<IS_U4, 128 / CHANNELS>(tile, x, rows, y);
    multiply_rows_of<IS_U4, 0>(tile, x, rows, y);
}
