// Functions built from operations that IEEE 754 rounds correctly, in one stated order: byte for byte those of
// kvd_kernels.reference.elementary, at every level and in every lane. Included inside namespace kvd::KVD_LEVEL.

constexpr float EXP_FLUSH = -88.0f;
constexpr float ROUND_AND_BIAS = 12582912.0f + 127.0f;
constexpr float ROUND = 12582912.0f;  // 1.5 · 2^23: adding and subtracting it rounds |x| < 2^22 half to even

// e^x for x <= 0, of N vectors side by side: one alone is a long chain of operations that wait for one another.
// NaN stays NaN, below EXP_FLUSH exactly 0.
template <int N>
KVD_INLINE void exp_nonpositive(vf (&x)[N]) {
    constexpr float coefficients[] = {
        0.001384364441037178f, 0.008374162949621677f, 0.04166800156235695f, 0.16666431725025177f, 0.4999999403953552f,
        1.0f};
    vf power_of_two[N], result[N];
    for (int n = 0; n < N; ++n) {
        x[n] = x[n] < EXP_FLUSH ? splat(EXP_FLUSH) : x[n];
        const vf shifted = x[n] * 1.44269504088896341f + ROUND_AND_BIAS;
        power_of_two[n] = bits_to_float(bits(shifted) << 23);
        const vf exponent = shifted - ROUND_AND_BIAS;
        x[n] -= exponent * 0.693359375f;
        x[n] -= exponent * -2.12194440e-4f;
        result[n] = x[n] * coefficients[0];
    }
    for (int i = 1; i < 6; ++i)
        for (int n = 0; n < N; ++n) result[n] = (result[n] + coefficients[i]) * x[n];
    for (int n = 0; n < N; ++n) x[n] = (result[n] + 1.0f) * power_of_two[n];
}

KVD_INLINE vf exp_nonpositive(vf x) {
    vf one[1] = {x};
    exp_nonpositive(one);
    return one[0];
}

KVD_INLINE vf silu(vf x) {
    const vf decayed = exp_nonpositive(-absolute(x));
    const vf numerator = x >= 0.0f ? splat(1.0f) : decayed;
    return numerator / (decayed + 1.0f) * x;
}

// Lane i + step, around the end.
KVD_INLINE vf turn_lanes(vf x, int step) {
    vi order;
    for (int i = 0; i < W; ++i) order[i] = (i + step) % W;
    return __builtin_shuffle(x, order);
}

// The largest lane; NaN where one is NaN.
KVD_INLINE float largest_lane(vf x) {
#pragma GCC unroll 4
    for (int step = W / 2; step >= 1; step /= 2) x = larger(x, turn_lanes(x, step));
    return x[0];
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
