// Rope, the Hadamard rotation, and the writing of K and V into blocks. Included inside namespace kvd::KVD_LEVEL.
//
// Byte for byte reference.rope, elementary.hadamard, quantize.quantize_kv and kv_blocks.write_tokens. One token and KV
// head in the section of a layer (kvd_kernels.kv_format; token t of 16, channel c of D):
//
//     K         element ((head · D/4 + c/4) · 16 + t) · 4 + c%4     four channels side by side, then the next token
//     V         element ((head · 4 + t/4) · D + c) · 4 + t%4        every fourth element
//     scales    float16 head · 16 + t
//
// Only these elements change, so threads may write tokens of one block at the same time.

constexpr int64_t MAX_HEAD_DIM = 1024;
constexpr float LARGEST_HALF = 65504.0f;

// Pairs (i, i + half) turned by the token's angle; channels from 2 · half on pass.
KVD_INLINE void rotate_head(
    const float *x, const float *cos, const float *sin, int64_t half, int64_t head_dim, float *out) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const vf first = load(x + i), second = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, first * c - second * s);
        store(out + half + i, second * c + first * s);
    }
    for (; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        out[i] = first * cos[i] - second * sin[i];
        out[half + i] = second * cos[i] + first * sin[i];
    }
    for (i = 2 * half; i < head_dim; ++i) out[i] = x[i];
}

// One butterfly between lanes `step` apart: sums in the lanes where that bit of the lane number is 0, else differences.
template <int STEP>
KVD_INLINE vf butterfly(vf x) {
    vi partner, sign;
    for (int i = 0; i < W; ++i) {
        partner[i] = i ^ STEP;
        sign[i] = i & STEP ? int32_t(0x80000000) : 0;
    }
    return __builtin_shuffle(x, partner) + (vf)((vi)x ^ sign);
}

// 1 / √size for a power of two.
KVD_INLINE float hadamard_scale(int64_t size) {
    const float root_of_half = 0.70710678118654752440f;  // rounding commutes with powers of two
    const int log = __builtin_ctzll(uint64_t(size));
    const float power = 1.0f / float(int64_t(1) << log / 2);
    return log % 2 ? power * root_of_half : power;
}

// Blocks of `size` channels times the orthonormal Hadamard matrix, in place. x has room for whole vectors of W.
KVD_INLINE void hadamard(float *x, int64_t head_dim, int64_t size) {
    const vf scale = splat(hadamard_scale(size));
    for (int64_t i = 0; i < head_dim; i += W) {
        vf v = load(x + i);
        if (size > 1) v = butterfly<1>(v);
        if (size > 2) v = butterfly<2>(v);
        if (size > 4) v = butterfly<4>(v);
        if constexpr (W > 8) {
            if (size > 8) v = butterfly<8 % W>(v);
        }
        store(x + i, size > W ? v : v * scale);
    }
    for (int64_t step = W; step < size; step *= 2) {
        const bool is_last = 2 * step == size;
        for (int64_t start = 0; start < head_dim; start += 2 * step) {
            for (int64_t i = start; i < start + step; i += W) {
                const vf a = load(x + i), b = load(x + i + step);
                store(x + i, is_last ? (a + b) * scale : a + b);
                store(x + i + step, is_last ? (a - b) * scale : a - b);
            }
        }
    }
}

KVD_INLINE uint16_t float_to_bf16(float x) {
    uint32_t word;
    __builtin_memcpy(&word, &x, 4);
    if ((word & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// Largest of magnitudes as bit patterns, which order numbers, infinity and NaN in this order.
KVD_INLINE vi larger_magnitude(vi largest, vf x) {
    const vi magnitude = bits(x) & 0x7fffffff;
    return magnitude > largest ? magnitude : largest;
}

// Largest magnitude of `count` floats; a NaN stays. Lanes behind them, up to a whole vector, must be 0.
KVD_INLINE float largest_magnitude(const float *x, int64_t count) {
    vi largest = splat_int(0);
    for (int64_t i = 0; i < count; i += W) largest = larger_magnitude(largest, load(x + i));
    return largest_lane(bits_to_float(largest));
}

// Integers within ±127 nearest to x / divisor, a multiple of W of them; 0 where x is NaN.
KVD_INLINE void round_to_codes(const float *x, int64_t count, float divisor, int8_t *codes) {
    for (int64_t i = 0; i < count; i += W) {
        vf ratio = load(x + i) / splat(divisor);
        ratio = ratio == ratio ? ratio : splat(0.0f);
        ratio = ratio > 127.0f ? splat(127.0f) : ratio < -127.0f ? splat(-127.0f) : ratio;
        store_low_bytes(codes + i, bits(ratio + ROUND));
    }
}

// int8 codes and the float16 scale of one head as the cache stores them.
KVD_INLINE uint16_t quantize_head(const float *x, int64_t head_dim, int8_t *codes) {
    float scale = largest_magnitude(x, head_dim) / 127.0f;
    scale = scale > LARGEST_HALF ? LARGEST_HALF : scale;
    const uint16_t stored = float_to_half(scale);
    const float divisor = half_to_float(stored);
    round_to_codes(x, head_dim, divisor == 0.0f ? __builtin_inff() : divisor, codes);
    return stored;
}

KVD_INLINE void narrow_head(const float *x, int64_t head_dim, int32_t type, uint16_t *out) {
    for (int64_t i = 0; i < head_dim; ++i) out[i] = type == KVD_F16 ? float_to_half(x[i]) : float_to_bf16(x[i]);
}

// Where one token's K, V and scales go: `section` is the layer's part of its block.
struct TokenPlace {
    uint8_t *section;
    int64_t head, token;
};

KVD_INLINE void write_key(const KvdLayer &layer, const TokenPlace &place, const float *k) {
    const int64_t head_dim = layer.head_dim;
    const int64_t bytes = layer.k_type == KVD_I8 ? 4 : 8;  // of four channels
    alignas(64) uint8_t elements[2 * MAX_HEAD_DIM];
    if (layer.k_type == KVD_I8) {
        const uint16_t scale = quantize_head(k, head_dim, reinterpret_cast<int8_t *>(elements));
        memcpy(place.section + layer.k_scale_offset + (place.head * 16 + place.token) * 2, &scale, 2);
    } else {
        narrow_head(k, head_dim, layer.k_type, reinterpret_cast<uint16_t *>(elements));
    }
    uint8_t *target = place.section + (place.head * (head_dim / 4) * 16 + place.token) * bytes;
    for (int64_t quad = 0; quad < head_dim / 4; ++quad) {
        if (bytes == 4)
            memcpy(target + quad * 16 * 4, elements + quad * 4, 4);
        else
            memcpy(target + quad * 16 * 8, elements + quad * 8, 8);
    }
}

KVD_INLINE void write_value(const KvdLayer &layer, const TokenPlace &place, const float *v) {
    const int64_t head_dim = layer.head_dim;
    const int64_t first = (place.head * 4 + place.token / 4) * head_dim * 4 + place.token % 4;
    uint8_t *region = place.section + layer.v_offset;
    if (layer.v_type == KVD_I8) {
        alignas(64) int8_t codes[MAX_HEAD_DIM];
        const uint16_t scale = quantize_head(v, head_dim, codes);
        memcpy(place.section + layer.v_scale_offset + (place.head * 16 + place.token) * 2, &scale, 2);
        for (int64_t c = 0; c < head_dim; ++c) region[first + 4 * c] = uint8_t(codes[c]);
    } else {
        alignas(64) uint16_t elements[MAX_HEAD_DIM];
        narrow_head(v, head_dim, layer.v_type, elements);
        for (int64_t c = 0; c < head_dim; ++c) memcpy(region + (first + 4 * c) * 2, elements + c, 2);
    }
}

// One token and KV head: K and V into the cache, and the query heads of its group to q_out.
static void rope_write_head(const KvdRopeArgs &args, const KvdBatch &batch, int64_t token, int64_t head) {
    const KvdLayer &layer = *args.layer;
    const int64_t head_dim = layer.head_dim, heads_per_group = args.num_heads / layer.num_kv_heads;
    const float *row = args.qkv + token * (args.num_heads + 2 * layer.num_kv_heads) * head_dim;
    const float *cos = args.cos + batch.positions[token] * args.half;
    const float *sin = args.sin + batch.positions[token] * args.half;
    for (int64_t h = head * heads_per_group; h < (head + 1) * heads_per_group; ++h)
        rotate_head(
            row + h * head_dim, cos, sin, args.half, head_dim, args.q_out + (token * args.num_heads + h) * head_dim);

    const int64_t slot = batch.groups[layer.group_id].write_slots[token];
    const TokenPlace place{
        layer.pool + slot / KVD_BLOCK_TOKENS * layer.block_bytes, head, slot % KVD_BLOCK_TOKENS};
    alignas(64) float x[MAX_HEAD_DIM];
    for (int64_t i = head_dim / W * W; i < round_up(head_dim, W); ++i) x[i] = 0.0f;
    rotate_head(row + (args.num_heads + head) * head_dim, cos, sin, args.half, head_dim, x);
    if (layer.rotation_size) hadamard(x, head_dim, layer.rotation_size);
    write_key(layer, place, x);
    memcpy(x, row + (args.num_heads + layer.num_kv_heads + head) * head_dim, size_t(head_dim) * 4);
    write_value(layer, place, x);
}

static void rope_write(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdRopeArgs *>(raw);
    const int64_t num_heads = args.layer->num_kv_heads, pieces = batch.num_tokens * num_heads;
    const int64_t at_once = pieces / (16 * worker.count) + 1;  // claims cost as much as a small piece
    for (int64_t claim; (claim = worker.claim() * at_once) < pieces;)
        for (int64_t piece = claim; piece < claim + at_once && piece < pieces; ++piece)
            rope_write_head(args, batch, piece / num_heads, piece % num_heads);
}
