// Activations to int8 codes per row and group. Included inside namespace kvd::KVD_LEVEL.
//
// Byte for byte round_to_levels of kvd_kernels.reference.quantize: s = absmax / 127 (1 where that is 0),
// q = round-half-even(x / s) within ±127. A group with a NaN or an infinity has no meaningful codes: its scale becomes
// NaN, which is what its outputs are in the reference.

#include "tiles.h"

KVD_INLINE vi turn_int_lanes(vi x, int step) { return bits(turn_lanes(bits_to_float(x), step)); }
KVD_INLINE vi larger_int(vi a, vi b) { return a > b ? a : b; }
KVD_INLINE int32_t sum_of_lanes(vi x) {
#pragma GCC unroll 4
    for (int by = W / 2; by > 0; by /= 2) x += turn_int_lanes(x, by);
    return x[0];
}

// 32 codes from vectors of whole numbers within int8.
constexpr int CODE_VECTORS = 32 / W;
#if (defined(KVD_LEVEL_AVX2) || defined(KVD_LEVEL_AVXVNNI)) && !defined(KVD_EMULATE)
KVD_INLINE void store_codes(int8_t *codes, const vi (&x)[CODE_VECTORS]) {
    const __m256i low = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    const __m256i high = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works in halves of the register
    store_bytes(codes, (vi)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}
#else
KVD_INLINE void store_codes(int8_t *codes, const vi (&x)[CODE_VECTORS]) {
    for (int v = 0; v < CODE_VECTORS; ++v) store_low_bytes(codes + v * W, x[v]);
}
#endif

// Below this a scale is too coarse for quotients to end at 127 by themselves.
constexpr float SMALLEST_PLAIN = 1e-30f;

// One group of `length` channels, a multiple of 32.
KVD_INLINE void quantize_group(const float *x, int64_t length, int8_t *codes, float *scale, float *sum) {
    // Magnitudes of floats compare like their bits; infinities and NaN are the largest.
    vi largest = splat_int(0);
    for (int64_t i = 0; i < length; i += W) largest = larger_int(largest, bits(load(x + i)) & 0x7fffffff);
#pragma GCC unroll 4
    for (int by = W / 2; by > 0; by /= 2) largest = larger_int(largest, turn_int_lanes(largest, by));
    const float absmax = bits_to_float(largest)[0];
    if (largest[0] >= 0x7f800000) {
        *scale = __builtin_nanf("");
        *sum = 0.0f;
        memset(codes, 0, size_t(length));
        return;
    }
    const float step = absmax / 127.0f;
    *scale = step == 0.0f ? 1.0f : step;
    const vf divisor = splat(*scale);
    const bool is_plain = absmax >= SMALLEST_PLAIN;
    vi total = splat_int(0);
    for (int64_t i = 0; i < length; i += 32) {
        vi rounded[CODE_VECTORS];
        for (int v = 0; v < CODE_VECTORS; ++v) {
            vf ratio = load(x + i + v * W) / divisor;
            if (!is_plain) ratio = ratio > 127.0f ? splat(127.0f) : ratio < -127.0f ? splat(-127.0f) : ratio;
            // The sum's low mantissa bits are the rounded quotient, above the constant's own.
            rounded[v] = bits(ratio + ROUND) - bits(splat(ROUND));
            total += rounded[v];
        }
        store_codes(codes + i, rounded);
    }
    *sum = float(sum_of_lanes(total));
}

// One row: `width` channels at x in weight groups, each cut into groups of `length`, padded with zeros.
KVD_INLINE void quantize_row(const float *x, int64_t width, const KvdQuantized &out, int64_t row) {
    const int64_t pitch = codes_pitch(out.length);
    int8_t *codes = out.codes + row * out.stride;
    float *scales = out.scales + row * out.groups;
    float *sums = out.sums + row * out.groups;
    for (int64_t start = 0, group = 0; start < width; start += out.weight_group) {
        for (int64_t cut = 0; cut < out.cuts; ++cut, ++group, codes += pitch) {
            const int64_t first = cut * out.length, rest = out.weight_group - first;
            const int64_t channels = rest < out.length ? rest : out.length;
            const float *source = x + start + first;
            if (channels == pitch) {
                quantize_group(source, pitch, codes, scales + group, sums + group);
                continue;
            }
            float padded[ACTIVATION_GROUP] = {};
            memcpy(padded, source, size_t(channels) * 4);
            quantize_group(padded, pitch, codes, scales + group, sums + group);
        }
    }
}

static void quantize(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdQuantizeArgs *>(raw);
    const int64_t rows = live_rows(args.rows, batch), width = args.width;
    float *normalized = reinterpret_cast<float *>(worker.scratch);
    float *squares = normalized + round_up(width, W);
    for (int64_t row; (row = worker.claim()) < rows;) {
        const float *x = args.x + row * width;
        if (args.norm_weight != nullptr) {
            normalize_row(x, args.norm_weight, args.eps, width, squares, normalized);
            x = normalized;
        }
        quantize_row(x, width, args.out, row);
    }
}
