// Products of int8 keys and values with int8 queries and integer weights, exact at every level.
// Included inside namespace kvd::KVD_LEVEL.
//
// Scores. A line of K holds four channels of 16 tokens; a row's four codes are repeated over it. Where the processor
// multiplies unsigned by signed bytes exactly (VNNI), the key is the unsigned side: k + 128, and 128 · Σ q is taken off
// at the start. AVX2 multiplies |k| by q with the sign of k: two products of at most 128 · 127 fit in int16.
//
// Values. A line of V holds four tokens of one channel after another. With VNNI the 15-bit weights are two digits of
// base 256, each an unsigned byte. Else they stay int16, and V is widened to int16 too, tokens 0 and 2 of a channel apart
// from 1 and 3, so that each product of pairs is one channel's. |Σ w·v| < 2^15 · 2^7 · 2^8 < 2^31.

#if defined(KVD_LEVEL_AVXVNNI) || defined(KVD_LEVEL_AVX512VNNI) || defined(KVD_LEVEL_AMX)
#define KVD_BYTE_DIGITS 1
constexpr int32_t KEY_OFFSET = -128;
struct Key {
    vi biased;
};
KVD_INLINE Key prepare_key(vi k) { return {k ^ int32_t(0x80808080)}; }
KVD_INLINE vi dot_key(vi acc, Key key, vi q) { return dot_u8_s8(acc, key.biased, q); }
#else
constexpr int32_t KEY_OFFSET = 0;
#if defined(KVD_LEVEL_AVX2) && !defined(KVD_EMULATE)
struct Key {
    vi signed_bytes, magnitude;
};
KVD_INLINE Key prepare_key(vi k) { return {k, (vi)_mm256_abs_epi8((__m256i)k)}; }
KVD_INLINE vi dot_key(vi acc, Key key, vi q) {
    return dot_u8_s8(acc, key.magnitude, (vi)_mm256_sign_epi8((__m256i)q, (__m256i)key.signed_bytes));
}
// Lanes as int16, those of each four in the order 0, 2, 1, 3.
KVD_INLINE void store_words_by_pairs(uint8_t *p, vi x) {
    const __m256i order = _mm256_set_epi64x(0, 0x0d0c050409080100, 0, 0x0d0c050409080100);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)x, order), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(halves));
}
KVD_INLINE vi dot_words(vi acc, vh a, vh b) { return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else
struct Key {
    vi signed_bytes;
};
KVD_INLINE Key prepare_key(vi k) { return {k}; }
KVD_INLINE vi dot_key(vi acc, Key key, vi q) {
    const vi k = key.signed_bytes;
    return acc + (k << 24 >> 24) * (q << 24 >> 24) + (k << 16 >> 24) * (q << 16 >> 24) +
           (k << 8 >> 24) * (q << 8 >> 24) + (k >> 24) * (q >> 24);
}
KVD_INLINE vi dot_words(vi acc, vh a, vh b) {
    const vi x = (vi)a, y = (vi)b;
    return acc + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
}
KVD_INLINE void store_words_by_pairs(uint8_t *p, vi x) {
    typedef int16_t words __attribute__((vector_size(2 * W), aligned(1), may_alias));
    vi order;
    for (int i = 0; i < W; ++i) order[i] = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
    *reinterpret_cast<words *>(p) = __builtin_convertvector(__builtin_shuffle(x, order), words);
}
#endif
// Tokens 0 and 2, or 1 and 3, of every channel of a V line as int16.
KVD_INLINE vh even_tokens(vi line) { return ((vh)line << 8) >> 8; }
KVD_INLINE vh odd_tokens(vi line) { return (vh)line >> 8; }
#endif
