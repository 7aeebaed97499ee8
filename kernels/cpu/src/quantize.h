// Activations to int8 codes per row and group. Included inside namespace kvd::KVD_LEVEL.
//
// Byte for byte round_to_levels of kvd_kernels.reference.quantize: s = absmax / 127 (1 where that is 0),
// q = round-half-even(x / s) within ±127. A group with a NaN or an infinity has no meaningful codes: its scale becomes
// NaN, which is what its outputs are in the reference.

#include "tiles.h"

// One group of `length` channels, a multiple of W.
KVD_INLINE void quantize_group(const float *x, int64_t length, int8_t *codes, float *scale, float *sum) {
    vf largest = splat(0.0f);
    for (int64_t i = 0; i < length; i += W) largest = larger(largest, absolute(load(x + i)));
    const float absmax = largest_lane(largest);
    if (!(absmax <= 3.4028234663852886e38f)) {
        *scale = __builtin_nanf("");
        *sum = 0.0f;
        memset(codes, 0, size_t(length));
        return;
    }
    const float step = absmax / 127.0f;
    *scale = step == 0.0f ? 1.0f : step;
    const vf divisor = splat(*scale);
    vi total = splat_int(0);
    for (int64_t i = 0; i < length; i += W) {
        vf ratio = load(x + i) / divisor;
        ratio = ratio > 127.0f ? splat(127.0f) : ratio < -127.0f ? splat(-127.0f) : ratio;
        const vi code = truncate(ratio + ROUND - ROUND);
        total += code;
        store_low_bytes(codes + i, code);
    }
    int32_t lanes = 0;
    for (int i = 0; i < W; ++i) lanes += total[i];
    *sum = float(lanes);
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
