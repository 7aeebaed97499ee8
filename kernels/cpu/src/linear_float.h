// Tiles of float weights (16-bit and float32 checkpoints) times some rows. Included inside namespace kvd::KVD_LEVEL.
//
// Byte for byte fixed_point and _apply_fixed_point of the reference: both operands become integers of so few bits that
// float64 holds their dot product exactly, in any order; the scales are powers of two, and one rounding to float32 ends
// it. Weights keep their own 16 or 32 bits in memory and become integers on the way. A NaN or an infinity is carried
// along by the float64 arithmetic itself.

constexpr int WD = W / 2;  // doubles in a vector
typedef double vd __attribute__((vector_size(8 * WD)));
typedef double vd_unaligned __attribute__((vector_size(8 * WD), aligned(8), may_alias));

#if defined(KVD_EMULATE) || defined(KVD_LEVEL_PORTABLE)
KVD_INLINE void widen(vf x, vd *low, vd *high) {
    for (int i = 0; i < WD; ++i) {
        (*low)[i] = double(x[i]);
        (*high)[i] = double(x[WD + i]);
    }
}
KVD_INLINE vd multiply_add(vd a, double b, vd c) { return a * b + c; }
#elif defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
KVD_INLINE void widen(vf x, vd *low, vd *high) {
    *low = (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
    *high = (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
}
KVD_INLINE vd multiply_add(vd a, double b, vd c) {
    return (vd)_mm512_fmadd_pd((__m512d)a, _mm512_set1_pd(b), (__m512d)c);
}
#else
KVD_INLINE void widen(vf x, vd *low, vd *high) {
    *low = (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
    *high = (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
}
KVD_INLINE vd multiply_add(vd a, double b, vd c) {
    return (vd)_mm256_fmadd_pd((__m256d)a, _mm256_set1_pd(b), (__m256d)c);
}
#endif

constexpr int FLOAT_ROWS_PER_PASS = ROWS_PER_PASS / 2;
constexpr int VECS_D = int(TILE) / WD;

KVD_INLINE vf load_bf16(const uint16_t *p) {
    typedef uint16_t halves __attribute__((vector_size(2 * W), aligned(2), may_alias));
    return bits_to_float(__builtin_convertvector(*reinterpret_cast<const halves *>(p), vi) << 16);
}

template <int TYPE>
KVD_INLINE vf load_values(const uint8_t *p) {
    if constexpr (TYPE == KVD_F16) return load_halves(reinterpret_cast<const uint16_t *>(p));
    if constexpr (TYPE == KVD_BF16) return load_bf16(reinterpret_cast<const uint16_t *>(p));
    return load(reinterpret_cast<const float *>(p));
}

// Codes of R rows, float64 [rows, channels], and their scales, for the row's outputs y[r][16].
template <int TYPE, int R>
static __attribute__((noinline)) void multiply_float_tile(
    const uint8_t *tile, const double *codes, const double *row_scales, int64_t channels, float *y) {
    constexpr int64_t BYTES = TYPE == KVD_F32 ? 4 : 2;
    const float *head = reinterpret_cast<const float *>(tile);
    const uint8_t *values = tile + FLOAT_HEAD_BYTES;
    vf reciprocal[VECS];
    for (int v = 0; v < VECS; ++v) reciprocal[v] = load(head + TILE + v * W);
    vd sums[R][VECS_D];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS_D; ++v) sums[r][v] = vd{};
    for (int64_t c = 0; c < channels; ++c, values += TILE * BYTES) {
        vd weights[VECS_D];
        for (int v = 0; v < VECS; ++v) {
            const vf scaled = load_values<TYPE>(values + v * W * BYTES) * reciprocal[v];
            widen(scaled + ROUND - ROUND, &weights[2 * v], &weights[2 * v + 1]);
        }
        for (int r = 0; r < R; ++r) {
            const double code = codes[r * channels + c];
            for (int v = 0; v < VECS_D; ++v) sums[r][v] = multiply_add(weights[v], code, sums[r][v]);
        }
    }
    for (int v = 0; v < VECS; ++v) {
        vd low, high;
        widen(load(head + v * W), &low, &high);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < WD; ++i) {
                y[r * TILE + v * W + i] = float(sums[r][2 * v][i] * row_scales[r] * low[i]);
                y[r * TILE + v * W + WD + i] = float(sums[r][2 * v + 1][i] * row_scales[r] * high[i]);
            }
    }
}

template <int TYPE>
static void multiply_float_rows(
    const uint8_t *tile, const double *codes, const double *scales, int64_t channels, int64_t rows, float *y) {
    for (; rows >= FLOAT_ROWS_PER_PASS; rows -= FLOAT_ROWS_PER_PASS) {
        multiply_float_tile<TYPE, FLOAT_ROWS_PER_PASS>(tile, codes, scales, channels, y);
        codes += FLOAT_ROWS_PER_PASS * channels;
        scales += FLOAT_ROWS_PER_PASS;
        y += FLOAT_ROWS_PER_PASS * TILE;
    }
    for (; rows > 0; --rows, codes += channels, ++scales, y += TILE)
        multiply_float_tile<TYPE, 1>(tile, codes, scales, channels, y);
}

// fixed_point of one row: codes float64 [channels].
static void round_to_fixed_point(const float *x, int64_t channels, double *codes, double *scale) {
    int activation_bits, weight_bits;
    exact_bits(channels, &activation_bits, &weight_bits);
    uint32_t largest = 0;  // magnitudes compare like their bits
    for (int64_t i = 0; i < channels; ++i) {
        uint32_t magnitude;
        memcpy(&magnitude, x + i, 4);
        magnitude &= 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint32_t scale_bits = fixed_point_scale_bits(largest, activation_bits);
    const uint32_t other_bits = reciprocal_bits(scale_bits);
    float power, reciprocal;
    memcpy(&power, &scale_bits, 4);
    memcpy(&reciprocal, &other_bits, 4);
    *scale = double(power);
    int64_t i = 0;
    for (; i + W <= channels; i += W) {
        vd low, high;
        widen(load(x + i) * reciprocal + ROUND - ROUND, &low, &high);
        *reinterpret_cast<vd_unaligned *>(codes + i) = low;
        *reinterpret_cast<vd_unaligned *>(codes + i + WD) = high;
    }
    for (; i < channels; ++i) codes[i] = double(x[i] * reciprocal + ROUND - ROUND);
}
