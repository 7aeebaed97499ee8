// Vectors of one ISA level. Included inside namespace kvd::KVD_LEVEL.
//
// Element-wise float arithmetic is written with the compiler's vector extension, so one source serves every level;
// only what the extension cannot say (float16, integer dot products) is an intrinsic here. With KVD_EMULATE those are
// plain loops: the code of a level then runs on any processor.

#if defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef int8_t vb __attribute__((vector_size(4 * W)));
typedef uint8_t vu __attribute__((vector_size(4 * W)));
typedef int16_t vh __attribute__((vector_size(4 * W)));
typedef float vf_unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(4 * W), aligned(1), may_alias));

#define KVD_INLINE static inline __attribute__((always_inline))

KVD_INLINE vf load(const float *p) { return *reinterpret_cast<const vf_unaligned *>(p); }
KVD_INLINE void store(float *p, vf x) { *reinterpret_cast<vf_unaligned *>(p) = x; }
KVD_INLINE vi load_bytes(const void *p) { return *reinterpret_cast<const vi_unaligned *>(p); }
KVD_INLINE void store_bytes(void *p, vi x) { *reinterpret_cast<vi_unaligned *>(p) = x; }
KVD_INLINE vf splat(float x) { return x - vf{}; }  // x + 0 would turn -0 into 0
KVD_INLINE vi splat_int(int32_t x) { return vi{} + x; }
KVD_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
KVD_INLINE vi truncate(vf x) { return __builtin_convertvector(x, vi); }
KVD_INLINE vf bits_to_float(vi x) { return (vf)x; }
KVD_INLINE vi bits(vf x) { return (vi)x; }
KVD_INLINE vf absolute(vf x) { return (vf)((vi)x & 0x7fffffff); }
// Where both are numbers the larger one; a NaN in `a` or `b` stays (torch's amax does the same).
KVD_INLINE vf larger(vf a, vf b) { return (a > b) | (a != a) ? a : b; }

// Every lane a half of the width below: W values from 16-bit floats.
KVD_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
    float value;
    uint32_t word;
    if (magnitude >= 0x7c00) {
        word = sign | 0x7f800000 | ((magnitude & 0x3ff) << 13);
    } else if (magnitude >= 0x400) {
        word = sign | ((magnitude + (112u << 10)) << 13);
    } else {
        value = float(magnitude) * 5.9604644775390625e-8f;  // 2^-24: subnormal, exact
        __builtin_memcpy(&word, &value, 4);
        word |= sign;
    }
    __builtin_memcpy(&value, &word, 4);
    return value;
}

// float32 to float16, round half to even, overflow to infinity.
KVD_INLINE uint16_t float_to_half(float x) {
    uint32_t word;
    __builtin_memcpy(&word, &x, 4);
    const uint32_t sign = (word >> 16) & 0x8000;
    word &= 0x7fffffff;
    if (word > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (word >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (word < 0x38800000) {  // subnormal: adding 0.5 puts the rounded integer into the low mantissa bits
        float magnitude;
        __builtin_memcpy(&magnitude, &word, 4);
        magnitude += 0.5f;
        __builtin_memcpy(&word, &magnitude, 4);
        return uint16_t(sign | (word - 0x3f000000));
    }
    word += 0xc8000fff + ((word >> 13) & 1);
    return uint16_t(sign | (word >> 13));
}

KVD_INLINE float bf16_to_float(uint16_t h) {
    const uint32_t word = uint32_t(h) << 16;
    float value;
    __builtin_memcpy(&value, &word, 4);
    return value;
}

// The lowest byte of every lane, W bytes.
#if defined(KVD_EMULATE) || defined(KVD_LEVEL_PORTABLE)
KVD_INLINE void store_low_bytes(void *p, vi x) {
    typedef uint8_t bytes __attribute__((vector_size(W), aligned(1), may_alias));
    *reinterpret_cast<bytes *>(p) = __builtin_convertvector(x, bytes);
}
#elif defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
KVD_INLINE void store_low_bytes(void *p, vi x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x)); }
#else
KVD_INLINE void store_low_bytes(void *p, vi x) {
    const __m256i order = _mm256_set1_epi32(0x0c080400);
    const __m256i halves = _mm256_shuffle_epi8((__m256i)x, order);
    _mm_storel_epi64(
        (__m128i *)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
#endif

#if defined(KVD_EMULATE) || defined(KVD_LEVEL_PORTABLE)
KVD_INLINE vf load_halves(const uint16_t *p) {
    vf out;
    for (int i = 0; i < W; ++i) out[i] = half_to_float(p[i]);
    return out;
}
#elif defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
KVD_INLINE vf load_halves(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#else
KVD_INLINE vf load_halves(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#endif

// ---- integer dot products of four neighbouring bytes: acc[i] += Σ_c u[4 i + c] · s[4 i + c] ----
#if defined(KVD_EMULATE) || defined(KVD_LEVEL_PORTABLE)
KVD_INLINE vi dot_u8_s8(vi acc, vi u, vi s) {
    const vu a = (vu)u;
    const vb b = (vb)s;
    for (int i = 0; i < W; ++i)
        for (int c = 0; c < 4; ++c) acc[i] += int32_t(a[4 * i + c]) * int32_t(b[4 * i + c]);
    return acc;
}
#elif defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
KVD_INLINE vi dot_u8_s8(vi acc, vi u, vi s) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s); }
#elif defined(KVD_LEVEL_AVXVNNI)
KVD_INLINE vi dot_u8_s8(vi acc, vi u, vi s) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)s);
}
#else
// AVX2: only where u · s + u' · s' fits in int16, as with 4-bit u or magnitudes up to 127 on both sides.
KVD_INLINE vi dot_u8_s8(vi acc, vi u, vi s) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)u, (__m256i)s);
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif
