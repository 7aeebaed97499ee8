// Functions built from operations that IEEE 754 rounds correctly, in one stated order: byte for byte those of
// kvd_kernels.reference.elementary, at every level and in every lane. Included inside namespace kvd::KVD_LEVEL.

constexpr float EXP_FLUSH = -88.0f;
constexpr float ROUND_AND_BIAS = 12582912.0f + 127.0f;
constexpr float ROUND = 12582912.0f;  // 1.5 · 2^23: adding and subtracting it rounds |x| < 2^22 half to even

// e^x for x <= 0; NaN stays NaN, below EXP_FLUSH exactly 0.
KVD_INLINE vf exp_nonpositive(vf x) {
    x = x < EXP_FLUSH ? splat(EXP_FLUSH) : x;
    const vf shifted = x * 1.44269504088896341f + ROUND_AND_BIAS;
    const vf power_of_two = bits_to_float(bits(shifted) << 23);
    const vf exponent = shifted - ROUND_AND_BIAS;
    x -= exponent * 0.693359375f;
    x -= exponent * -2.12194440e-4f;
    vf result = x * 0.001384364441037178f;
    result = (result + 0.008374162949621677f) * x;
    result = (result + 0.04166800156235695f) * x;
    result = (result + 0.16666431725025177f) * x;
    result = (result + 0.4999999403953552f) * x;
    result = (result + 1.0f) * x;
    result += 1.0f;
    return result * power_of_two;
}

KVD_INLINE vf silu(vf x) {
    const vf decayed = exp_nonpositive(-absolute(x));
    const vf numerator = x >= 0.0f ? splat(1.0f) : decayed;
    return numerator / (decayed + 1.0f) * x;
}

KVD_INLINE float largest_lane(vf x) {
    float best = x[0];
    for (int i = 1; i < W; ++i) best = (x[i] > best) || x[i] != x[i] ? x[i] : best;
    return best;
}

// Sum of the `width` numbers at x by halving, the tree of the row padded with zeros to a power of two; x is destroyed.
// x has room for `width` rounded up to a power of two, and to W at least.
KVD_INLINE float tree_sum(float *x, int64_t width) {
    int64_t half = 1;
    while (half * 2 <= width) half *= 2;
    if (half != width) {
        for (int64_t i = 0; i < width - half; ++i) x[i] += x[half + i];
        width = half;
    }
    while (width > 1) {
        width /= 2;
        if (width >= W) {
            for (int64_t i = 0; i < width; i += W) store(x + i, load(x + i) + load(x + width + i));
        } else {
            for (int64_t i = 0; i < width; ++i) x[i] += x[width + i];
        }
    }
    return x[0];
}
