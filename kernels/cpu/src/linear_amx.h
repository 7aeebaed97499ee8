// Integer weights times 16 rows and more by AMX. Included inside namespace kvd::KVD_LEVEL; other levels get the plain
// path from here. Same sums, same float operations in the same order, hence the same bytes.
//
// The codes of 16 rows are the A tile, 16 or 8 code lines of a weight tile (unpacked from nibbles into scratch memory;
// int8 lines as they lie) the B tile, 16 x 16 sums of one activation group the C tile. Every thread keeps one
// configuration: 0 and 1: C; 2 and 3: A, 64 and 32 channels; 4 and 5: B, 64 and 32 channels.

constexpr int64_t AMX_UNPACKED_BYTES = 64 << 10;
constexpr int64_t AMX_ROWS = 16;

#if defined(KVD_LEVEL_AMX)
#include "linear_tiles.h"

KVD_INLINE void set_tile(TileConfig &config, int tile, int rows, int row_bytes) {
    config.rows[tile] = uint8_t(rows);
    config.row_bytes[tile] = uint16_t(row_bytes);
}

// Loads this thread's tile configuration unless it is there: other libraries in the process may have set their own.
static void enter_thread() {
    alignas(64) TileConfig wanted = {}, found = {};
    wanted.palette = 1;
    set_tile(wanted, 0, 16, 64);
    set_tile(wanted, 1, 16, 64);
    set_tile(wanted, 2, 16, 64);
    set_tile(wanted, 3, 16, 32);
    set_tile(wanted, 4, 16, 64);
    set_tile(wanted, 5, 8, 64);
    tile_config_store(&found);
    if (memcmp(&wanted, &found, sizeof wanted) != 0) tile_config_load(&wanted);
}

// C tile number C ← the sums of one group for 16 rows, stored to sums[row][output].
template <bool IS_U4, int C>
KVD_INLINE void multiply_group(
    const int8_t *codes, int64_t stride, const uint8_t *lines, int64_t channels, int32_t *sums) {
    if constexpr (C == 0)
        KVD_TILE_ZERO(0);
    else
        KVD_TILE_ZERO(1);
    for (; channels >= 64; channels -= 64, codes += 64, lines += 16 * LINE) {
        KVD_TILE_LOAD(2, codes, stride);
        KVD_TILE_LOAD(4, lines, LINE);
        if constexpr (C == 0 && IS_U4) KVD_TILE_DOT_S8_U8(0, 2, 4);
        if constexpr (C == 0 && !IS_U4) KVD_TILE_DOT_S8_S8(0, 2, 4);
        if constexpr (C == 1 && IS_U4) KVD_TILE_DOT_S8_U8(1, 2, 4);
        if constexpr (C == 1 && !IS_U4) KVD_TILE_DOT_S8_S8(1, 2, 4);
    }
    if (channels > 0) {
        KVD_TILE_LOAD(3, codes, stride);
        KVD_TILE_LOAD(5, lines, LINE);
        if constexpr (C == 0 && IS_U4) KVD_TILE_DOT_S8_U8(0, 3, 5);
        if constexpr (C == 0 && !IS_U4) KVD_TILE_DOT_S8_S8(0, 3, 5);
        if constexpr (C == 1 && IS_U4) KVD_TILE_DOT_S8_U8(1, 3, 5);
        if constexpr (C == 1 && !IS_U4) KVD_TILE_DOT_S8_S8(1, 3, 5);
    }
    if constexpr (C == 0)
        KVD_TILE_STORE(0, sums, TILE * 4);
    else
        KVD_TILE_STORE(1, sums, TILE * 4);
}

// total[row] ← total[row] + the float term of one group.
template <bool IS_U4>
KVD_INLINE void add_group(
    const int32_t *sums, const uint16_t *scales, const Rows &x, int64_t group, vf (&total)[AMX_ROWS]) {
    const vf weight_scales = load_halves(scales);
    vf weight_offsets;
    if constexpr (IS_U4) weight_offsets = load_halves(scales + TILE);
#pragma GCC unroll 16
    for (int r = 0; r < AMX_ROWS; ++r) {
        vf term = to_float(load_bytes(sums + r * TILE)) * weight_scales;
        if constexpr (IS_U4) term += weight_offsets * x.sums[r * x.groups + group];
        total[r] += term * x.scales[r * x.groups + group];
    }
}

// Groups first … last - 1 of one weight tile times 16 rows, added to y[16][16]. `lines`: code lines of group `first`.
template <bool IS_U4>
static void multiply_groups(
    const uint8_t *tile, const uint8_t *lines, const Rows &x, int64_t first, int64_t last, float *y) {
    alignas(64) int32_t sums[2][AMX_ROWS * TILE];
    const int64_t line_bytes = x.length / 4 * LINE;
    vf total[AMX_ROWS];
    for (int r = 0; r < AMX_ROWS; ++r) total[r] = load(y + r * TILE);
    const auto scales = [&](int64_t group) __attribute__((always_inline)) {
        const uint8_t *at = IS_U4 ? tile + (group + 1) * u4_group_bytes(x.length) - LINE
                                  : tile + i8_scales_at(x.groups, x.length) + group * TILE * 2;
        return reinterpret_cast<const uint16_t *>(at);
    };
    // A group's float work is done while the next group's sums are made, in the other C tile and the other half.
    for (int64_t group = first; group < last; group += 2) {
        multiply_group<IS_U4, 0>(
            x.codes + group * x.pitch, x.stride, lines + (group - first) * line_bytes, x.length, sums[0]);
        if (group > first) add_group<IS_U4>(sums[1], scales(group - 1), x, group - 1, total);
        if (group + 1 < last)
            multiply_group<IS_U4, 1>(
                x.codes + (group + 1) * x.pitch, x.stride, lines + (group + 1 - first) * line_bytes, x.length, sums[1]);
        add_group<IS_U4>(sums[0], scales(group), x, group, total);
    }
    if ((last - first) % 2 == 0) add_group<IS_U4>(sums[1], scales(last - 1), x, last - 1, total);
    for (int r = 0; r < AMX_ROWS; ++r) store(y + r * TILE, total[r]);
}

// Nibbles of groups first … last - 1 to bytes, a line per four channels.
KVD_INLINE void unpack_u4(const uint8_t *tile, int64_t length, int64_t first, int64_t last, uint8_t *out) {
    for (int64_t group = first; group < last; ++group) {
        const uint8_t *lines = tile + group * u4_group_bytes(length);
        for (int64_t line = 0; line < length / 8; ++line, out += 2 * LINE) {
            const vi both = load_bytes(lines + line * LINE);
            store_bytes(out, low_nibbles(both));
            store_bytes(out + LINE, high_nibbles(both));
        }
    }
}

template <bool IS_U4>
KVD_INLINE void multiply_integers(const uint8_t *tile, const Rows &x, int64_t rows, float *y, uint8_t *unpacked) {
    const int64_t whole = x.length % 32 == 0 ? rows / AMX_ROWS * AMX_ROWS : 0;
    if (whole > 0) {
        memset(y, 0, size_t(whole * TILE) * 4);
        const int64_t line_bytes = x.length / 4 * LINE;
        const int64_t at_once = IS_U4 ? AMX_UNPACKED_BYTES / line_bytes : x.groups;
        for (int64_t first = 0; first < x.groups; first += at_once) {
            const int64_t last = first + at_once < x.groups ? first + at_once : x.groups;
            const uint8_t *lines = tile;
            if constexpr (IS_U4) {
                unpack_u4(tile, x.length, first, last, unpacked);
                lines = unpacked;
            }
            Rows block = x;
            for (int64_t r = 0; r < whole; r += AMX_ROWS, block.advance(AMX_ROWS))
                multiply_groups<IS_U4>(tile, lines, block, first, last, y + r * TILE);
        }
    }
    Rows rest = x;
    rest.advance(whole);
    multiply_rows<IS_U4>(tile, rest, rows - whole, y + whole * TILE);
}

#else

static void enter_thread() {}

template <bool IS_U4>
KVD_INLINE void multiply_integers(const uint8_t *tile, const Rows &x, int64_t rows, float *y, uint8_t *unpacked) {
    if constexpr (IS_U4)
        if (multiply_unpacked(tile, x, rows, y, unpacked)) return;
    multiply_rows<IS_U4>(tile, x, rows, y);
}

#endif
