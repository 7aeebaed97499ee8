// Int4 weights times many rows, without AMX. Included inside namespace kvd::KVD_LEVEL.
//
// From UNPACK_FROM_ROWS on it pays to take a tile's nibbles apart once, into scratch memory that stays in the nearest
// cache, instead of once per pass over rows. A record per group, as much of them at a time as UNPACKED_BYTES holds:
//
//     code lines, byte 4 n + c: output n, channel 4 line + c  | float32 scale [16] | float32 offset [16]
//
// The sums and the float operations are those of multiply_tile in the same order, hence the same bytes.

constexpr int64_t UNPACK_FROM_ROWS = 24;
constexpr int64_t UNPACKED_BYTES = 16 << 10;

KVD_INLINE int64_t record_bytes(int64_t length) { return length / 4 * LINE + 2 * TILE * 4; }

static void unpack_u4_groups(const uint8_t *tile, int64_t length, int64_t count, uint8_t *record) {
    for (int64_t group = 0; group < count; ++group) {
        for (int64_t line = 0; line < length / 8; ++line, tile += LINE, record += 2 * LINE)
            for (int v = 0; v < VECS; ++v) {
                const vi both = load_bytes(tile + v * 4 * W);
                store_bytes(record + v * 4 * W, low_nibbles(both));
                store_bytes(record + LINE + v * 4 * W, high_nibbles(both));
            }
        const uint16_t *scales = reinterpret_cast<const uint16_t *>(tile);
        float *out = reinterpret_cast<float *>(record);
        for (int i = 0; i < 2 * TILE; i += W) store(out + i, load_halves(scales + i));
        tile += LINE;
        record += 2 * TILE * 4;
    }
}

// acc[r][v] ← the sums of BLOCKS times 32 channels.
template <int R, int BLOCKS>
KVD_INLINE void dot_unpacked(const uint8_t *lines, const int8_t *x, int64_t stride, vi (&acc)[R][VECS]) {
#if defined(KVD_LEVEL_AVX2)
    for (int block = 0; block < BLOCKS; ++block) {
        vh sums[R][VECS];  // eight products per int16 lane fit: 8 · 15 · 2 · 127 < 32767
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; ++quad) {
            const int64_t at = block * 8 + quad;
            vi weights[VECS];
            for (int v = 0; v < VECS; ++v) weights[v] = load_bytes(lines + at * LINE + v * 4 * W);
            for (int r = 0; r < R; ++r) {
                const vi codes = broadcast_quad(x + r * stride + at * 4);
                for (int v = 0; v < VECS; ++v) {
                    const vh products = multiply_pairs(weights[v], codes);
                    sums[r][v] = quad == 0 ? products : sums[r][v] + products;
                    KVD_KEEP(sums[r][v]);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECS; ++v)
                acc[r][v] = block == 0 ? sum_pairs(sums[r][v]) : acc[r][v] + sum_pairs(sums[r][v]);
    }
#else
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat_int(0);
#pragma GCC unroll 8
    for (int64_t quad = 0; quad < 8 * BLOCKS; ++quad) {
#if defined(KVD_HAS_VNNI)
        vi weights[VECS];
        for (int v = 0; v < VECS; ++v) weights[v] = load_bytes(lines + quad * LINE + v * 4 * W);
        for (int r = 0; r < R; ++r) {
            const vi codes = broadcast_quad(x + r * stride + quad * 4);
            for (int v = 0; v < VECS; ++v) {
                acc[r][v] = dot_u8_s8(acc[r][v], weights[v], codes);
                KVD_KEEP(acc[r][v]);
            }
        }
#else
        for (int r = 0; r < R; ++r)
            add_quad(reinterpret_cast<const int8_t *>(lines + quad * LINE), x + r * stride + quad * 4, acc[r]);
#endif
    }
#endif
}

// Adds `count` groups from group `first` on to y[R][16].
template <int R, int BLOCKS>
static __attribute__((noinline)) void multiply_records(
    const uint8_t *record, const Rows &x, int64_t first, int64_t count, float *y) {
    constexpr int64_t LINES_BYTES = BLOCKS * 8 * LINE;
    const int8_t *codes = x.codes + first * BLOCKS * 32;
    const float *row_scales = x.scales + first, *row_sums = x.sums + first;
    for (int64_t group = 0; group < count; ++group) {
        vi sums[R][VECS];
        dot_unpacked<R, BLOCKS>(record, codes, x.stride, sums);
        const float *scales = reinterpret_cast<const float *>(record + LINES_BYTES);
        for (int r = 0; r < R; ++r) {
            const float scale = row_scales[r * x.groups + group], code_sum = row_sums[r * x.groups + group];
            for (int v = 0; v < VECS; ++v) {
                const vf term = to_float(sums[r][v]) * load(scales + v * W) + load(scales + TILE + v * W) * code_sum;
                store(y + r * TILE + v * W, load(y + r * TILE + v * W) + term * scale);
            }
        }
        record += LINES_BYTES + 2 * TILE * 4;
        codes += BLOCKS * 32;
    }
}

template <int BLOCKS>
static void multiply_unpacked_of(const uint8_t *tile, const Rows &x, int64_t rows, float *y, uint8_t *unpacked) {
    memset(y, 0, size_t(rows * TILE) * 4);
    const int64_t at_once = UNPACKED_BYTES / record_bytes(x.length);
    for (int64_t first = 0; first < x.groups; first += at_once) {
        const int64_t count = x.groups - first < at_once ? x.groups - first : at_once;
        unpack_u4_groups(tile + first * u4_group_bytes(x.length), x.length, count, unpacked);
        Rows block = x;
        int64_t r = 0;
        for (; r + ROWS_PER_PASS <= rows; r += ROWS_PER_PASS, block.advance(ROWS_PER_PASS))
            multiply_records<ROWS_PER_PASS, BLOCKS>(unpacked, block, first, count, y + r * TILE);
        for (; r < rows; ++r, block.advance(1)) multiply_records<1, BLOCKS>(unpacked, block, first, count, y + r * TILE);
    }
}

// y[rows][16]; false where these rows or groups are none of this path's.
KVD_INLINE bool multiply_unpacked(const uint8_t *tile, const Rows &x, int64_t rows, float *y, uint8_t *unpacked) {
    if (rows < UNPACK_FROM_ROWS) return false;
    if (x.length == 32) return multiply_unpacked_of<1>(tile, x, rows, y, unpacked), true;
    if (x.length == 64) return multiply_unpacked_of<2>(tile, x, rows, y, unpacked), true;
    if (x.length == 128) return multiply_unpacked_of<4>(tile, x, rows, y, unpacked), true;
    return false;
}
