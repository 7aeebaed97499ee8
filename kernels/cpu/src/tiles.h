// How packed weights and activation codes lie in memory. Included inside namespace kvd (for packing) and inside
// namespace kvd::KVD_LEVEL (for the kernels), so it has no include guard.
//
// A matrix is cut into tiles of 16 outputs; the last one is filled with zeros. A tile is one contiguous record, and
// tiles follow one another, so that a pass over all outputs reads memory from front to back.
//
// Input channels fall into activation groups (GroupLayout of kvd_kernels.reference.linear): a weight group of G
// channels is `cuts` groups of `length` = min(G, 128) channels, the last one filled with zeros.
//
//   U4  per group:   line 0 … ceil(length / 8) - 1, then one line of scales and offsets
//       code line:   byte 4 n + c of 64   low nibble:  output n, channel 8 line + c          (c = 0 … 3)
//                                         high nibble: output n, channel 8 line + 4 + c
//       last line:   float16 scale [16] | float16 offset [16]
//
//   I8  tile:        code lines of all groups | float16 scale [groups][16] | filled up to 64 bytes
//       code line:   byte 4 n + c of 64   output n, channel 4 line + c, ceil(length / 4) lines per group
//
//   float            float32 scale [16] | float32 1 / scale [16] | values [channels][16]
//                    scale: the power of two that makes this output's weights integers (fixed_point)
//
// One code line is an operand of 16 x 4 bytes: one AVX-512 register, two AVX2 registers, a row of an AMX B tile.

constexpr int64_t TILE = 16;
constexpr int64_t LINE = 64;
constexpr int64_t ACTIVATION_GROUP = 128;
// Bounds the scratch memory that a row of activations needs.
constexpr int64_t MAX_INPUTS = int64_t(1) << 18;

static KVD_ALWAYS_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static KVD_ALWAYS_INLINE int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Activation codes of a group begin at multiples of this, with zeros between: whole half-depth AMX tiles can be read.
static KVD_ALWAYS_INLINE int64_t codes_pitch(int64_t length) { return round_up(length, 32); }

static KVD_ALWAYS_INLINE int64_t u4_lines(int64_t length) { return divide_up(length, 8); }
static KVD_ALWAYS_INLINE int64_t u4_group_bytes(int64_t length) { return (u4_lines(length) + 1) * LINE; }
static KVD_ALWAYS_INLINE int64_t u4_tile_bytes(int64_t groups, int64_t length) {
    return groups * u4_group_bytes(length);
}

static KVD_ALWAYS_INLINE int64_t i8_lines(int64_t length) { return divide_up(length, 4); }
static KVD_ALWAYS_INLINE int64_t i8_scales_at(int64_t groups, int64_t length) {
    return groups * i8_lines(length) * LINE;
}
static KVD_ALWAYS_INLINE int64_t i8_tile_bytes(int64_t groups, int64_t length) {
    return i8_scales_at(groups, length) + round_up(groups * TILE * 2, LINE);
}

constexpr int64_t FLOAT_HEAD_BYTES = 2 * TILE * 4;
static KVD_ALWAYS_INLINE int64_t float_tile_bytes(int64_t channels, int64_t value_bytes) {
    return FLOAT_HEAD_BYTES + round_up(channels * TILE * value_bytes, LINE);
}

// Bits of the two fixed-point operands whose dot product over `channels` terms float64 holds exactly.
static KVD_ALWAYS_INLINE void exact_bits(int64_t channels, int *activation_bits, int *weight_bits) {
    int length = 0;
    for (int64_t rest = channels - 1; rest > 0; rest >>= 1) ++length;
    const int total = 53 - length;
    const int first = (total + 1) / 2 < 22 ? (total + 1) / 2 : 22;
    *activation_bits = first;
    *weight_bits = total - first < 22 ? total - first : 22;
}

// Bit pattern of the float32 power of two by which fixed_point divides a row with this largest magnitude.
static KVD_ALWAYS_INLINE uint32_t fixed_point_scale_bits(uint32_t largest_bits, int bits) {
    int exponent = int(largest_bits >> 23) + 1 - bits;
    exponent = exponent < 1 ? 1 : exponent > 254 ? 254 : exponent;
    return uint32_t(exponent) << 23;
}

// The reciprocal of a power of two; never of 2^127, which no number of bits above 1 leads to.
static KVD_ALWAYS_INLINE uint32_t reciprocal_bits(uint32_t scale_bits) { return (uint32_t(254) << 23) - scale_bits; }
