// Integer dot products of one activation group: 16 outputs times R rows. Included inside namespace kvd::KVD_LEVEL.
//
// dot_u4 and dot_i8 walk the code lines of a group (tiles.h) and leave Σ q_w q_x in acc[r][v], output v · W + lane.
// LINES is their number where it is known when compiling, else 0 and `count` says it. The sums are exact, so that every level and every R gives the same numbers. Only the thin wrappers at
// the top are intrinsics; with KVD_EMULATE they are loops that do the same, saturation included.

constexpr int VECS = int(TILE) / W;  // vectors of int32 or float that hold 16 outputs

#if defined(KVD_LEVEL_AVXVNNI) || defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
#define KVD_HAS_VNNI 1
#endif

// Keeps a running sum in its register: the compiler would else turn chains of additions into trees of products, which
// it then has to spill. Costs nothing by itself.
#if (defined(__x86_64__) || defined(__i386__)) && !defined(KVD_EMULATE) && !defined(KVD_LEVEL_PORTABLE)
#define KVD_KEEP(x) __asm__("" : "+v"(x))
#else
#define KVD_KEEP(x) (void)(x)
#endif

KVD_INLINE vi low_nibbles(vi line) { return line & 0x0f0f0f0f; }
KVD_INLINE vi high_nibbles(vi line) { return (line >> 4) & 0x0f0f0f0f; }

KVD_INLINE vi broadcast_quad(const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return splat_int(quad);
}

#if defined(KVD_LEVEL_AVX2)

#if defined(KVD_EMULATE)
KVD_INLINE int16_t saturate16(int32_t x) { return int16_t(x > 32767 ? 32767 : x < -32768 ? -32768 : x); }
KVD_INLINE vh multiply_pairs(vi u, vi s) {
    const vu a = (vu)u;
    const vb b = (vb)s;
    vh out;
    for (int i = 0; i < 2 * W; ++i)
        out[i] = saturate16(int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1]);
    return out;
}
KVD_INLINE vi sum_pairs(vh x) {
    vi out;
    for (int i = 0; i < W; ++i) out[i] = int32_t(x[2 * i]) + int32_t(x[2 * i + 1]);
    return out;
}
KVD_INLINE vi magnitude_bytes(vi x) {  // of -128: 128 as an unsigned byte
    vb out = (vb)x;
    for (int i = 0; i < 4 * W; ++i) out[i] = int8_t(out[i] < 0 ? -int32_t(out[i]) : out[i]);
    return (vi)out;
}
KVD_INLINE vi apply_signs(vi x, vi signs) {
    vb out = (vb)x;
    const vb s = (vb)signs;
    for (int i = 0; i < 4 * W; ++i) out[i] = int8_t(s[i] < 0 ? -int32_t(out[i]) : s[i] == 0 ? 0 : out[i]);
    return (vi)out;
}
#else
KVD_INLINE vh multiply_pairs(vi u, vi s) { return (vh)_mm256_maddubs_epi16((__m256i)u, (__m256i)s); }
KVD_INLINE vi sum_pairs(vh x) { return (vi)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1)); }
KVD_INLINE vi magnitude_bytes(vi x) { return (vi)_mm256_abs_epi8((__m256i)x); }
KVD_INLINE vi apply_signs(vi x, vi signs) { return (vi)_mm256_sign_epi8((__m256i)x, (__m256i)signs); }
#endif

// One to four lines, eight products per int16 lane: 8 · 15 · 2 · 127 < 32767.
template <int R, int COUNT>
KVD_INLINE void sum_u4_lines(const uint8_t *lines, const int8_t *x, int64_t stride, vh (&sums)[R][VECS]) {
#pragma GCC unroll 8
    for (int step = 0; step < 2 * COUNT; ++step) {
        vi weights[VECS];
        for (int v = 0; v < VECS; ++v) {
            const vi both = load_bytes(lines + step / 2 * LINE + v * 4 * W);
            weights[v] = step % 2 ? high_nibbles(both) : low_nibbles(both);
        }
        for (int r = 0; r < R; ++r) {
            const vi quad = broadcast_quad(x + r * stride + step * 4);
            for (int v = 0; v < VECS; ++v) {
                const vh products = multiply_pairs(weights[v], quad);
                sums[r][v] = step == 0 ? products : sums[r][v] + products;
                KVD_KEEP(sums[r][v]);
            }
        }
    }
}

template <int R, int LINES>
KVD_INLINE void dot_u4(
    const uint8_t *lines, int64_t count, const int8_t *x, int64_t stride, vi (&acc)[R][VECS]) {
    vh sums[R][VECS];
    if constexpr (LINES > 0) {
        static_assert(LINES % 4 == 0, "whole blocks");
        for (int first = 0; first < LINES; first += 4) {
            sum_u4_lines<R, 4>(lines + first * LINE, x + first * 8, stride, sums);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECS; ++v)
                    acc[r][v] = first == 0 ? sum_pairs(sums[r][v]) : acc[r][v] + sum_pairs(sums[r][v]);
        }
        return;
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat_int(0);
    for (int64_t line = 0; line < count; ++line) {
        sum_u4_lines<R, 1>(lines + line * LINE, x + line * 8, stride, sums);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECS; ++v) acc[r][v] += sum_pairs(sums[r][v]);
    }
}

// |w| · (x with the sign of w): 2 · 128 · 127 < 32767, widened at once.
template <int R, int LINES>
KVD_INLINE void dot_i8(
    const uint8_t *lines, int64_t count, const int8_t *x, int64_t stride, const float *, int64_t,
    vi (&acc)[R][VECS]) {
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat_int(0);
    if constexpr (LINES > 0) count = LINES;
#pragma GCC unroll 8
    for (int64_t line = 0; line < count; ++line) {
        vi weights[VECS], magnitudes[VECS];
        for (int v = 0; v < VECS; ++v) {
            weights[v] = load_bytes(lines + line * LINE + v * 4 * W);
            magnitudes[v] = magnitude_bytes(weights[v]);
        }
        for (int r = 0; r < R; ++r) {
            const vi quad = broadcast_quad(x + r * stride + line * 4);
            for (int v = 0; v < VECS; ++v) {
                acc[r][v] += sum_pairs(multiply_pairs(magnitudes[v], apply_signs(quad, weights[v])));
                KVD_KEEP(acc[r][v]);
            }
        }
    }
}

#elif defined(KVD_HAS_VNNI)

template <int R, int LINES>
KVD_INLINE void dot_u4(
    const uint8_t *lines, int64_t count, const int8_t *x, int64_t stride, vi (&acc)[R][VECS]) {
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat_int(0);
    if constexpr (LINES > 0) count = LINES;
#pragma GCC unroll 4
    for (int64_t line = 0; line < count; ++line) {
        for (int half = 0; half < 2; ++half) {
            vi weights[VECS];
            for (int v = 0; v < VECS; ++v) {
                const vi both = load_bytes(lines + line * LINE + v * 4 * W);
                weights[v] = half ? high_nibbles(both) : low_nibbles(both);
            }
            for (int r = 0; r < R; ++r) {
                const vi quad = broadcast_quad(x + r * stride + line * 8 + half * 4);
                for (int v = 0; v < VECS; ++v) {
                    acc[r][v] = dot_u8_s8(acc[r][v], weights[v], quad);
                    KVD_KEEP(acc[r][v]);
                }
            }
        }
    }
}

// w + 128 is unsigned; what it adds is 128 times the sum of the row's codes, taken off beforehand.
template <int R, int LINES>
KVD_INLINE void dot_i8(
    const uint8_t *lines, int64_t count, const int8_t *x, int64_t stride, const float *sums, int64_t sums_stride,
    vi (&acc)[R][VECS]) {
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat_int(-128 * int32_t(sums[r * sums_stride]));
    if constexpr (LINES > 0) count = LINES;
#pragma GCC unroll 8
    for (int64_t line = 0; line < count; ++line) {
        vi weights[VECS];
        for (int v = 0; v < VECS; ++v)
            weights[v] = load_bytes(lines + line * LINE + v * 4 * W) ^ splat_int(int32_t(0x80808080u));
        for (int r = 0; r < R; ++r) {
            const vi quad = broadcast_quad(x + r * stride + line * 4);
            for (int v = 0; v < VECS; ++v) {
                acc[r][v] = dot_u8_s8(acc[r][v], weights[v], quad);
                KVD_KEEP(acc[r][v]);
            }
        }
    }
}

#else  // portable

// acc[i] += Σ_c w[4 i + c] · x[c] for the 16 outputs of a line.
template <class Code>
KVD_INLINE void add_quad(const Code *weights, const int8_t *x, vi (&acc)[VECS]) {
    const int32_t a = x[0], b = x[1], c = x[2], d = x[3];
    for (int v = 0; v < VECS; ++v)
        for (int i = 0; i < W; ++i) {
            const Code *w = weights + (v * W + i) * 4;
            acc[v][i] += w[0] * a + w[1] * b + w[2] * c + w[3] * d;
        }
}

template <int R, int LINES>
KVD_INLINE void dot_u4(
    const uint8_t *lines, int64_t count, const int8_t *x, int64_t stride, vi (&acc)[R][VECS]) {
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat_int(0);
    for (int64_t line = 0; line < count; ++line) {
        int8_t low[LINE], high[LINE];
        for (int i = 0; i < LINE; ++i) {
            low[i] = int8_t(lines[line * LINE + i] & 15);
            high[i] = int8_t(lines[line * LINE + i] >> 4);
        }
        for (int r = 0; r < R; ++r) {
            add_quad(low, x + r * stride + line * 8, acc[r]);
            add_quad(high, x + r * stride + line * 8 + 4, acc[r]);
        }
    }
}

template <int R, int LINES>
KVD_INLINE void dot_i8(
    const uint8_t *lines, int64_t count, const int8_t *x, int64_t stride, const float *, int64_t,
    vi (&acc)[R][VECS]) {
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat_int(0);
    for (int64_t line = 0; line < count; ++line)
        for (int r = 0; r < R; ++r)
            add_quad(reinterpret_cast<const int8_t *>(lines + line * LINE), x + r * stride + line * 4, acc[r]);
}

#endif
