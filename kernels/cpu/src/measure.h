// What the machine can do at most, measured by the same threads as the kernels. Included inside namespace
// kvd::KVD_LEVEL.

#if defined(__x86_64__) && !defined(KVD_LEVEL_PORTABLE) && !defined(KVD_EMULATE)
#define KVD_OPAQUE(x) __asm__ volatile("" : "+v"(x))
#else
#define KVD_OPAQUE(x) __asm__ volatile("" : "+m"(x))
#endif

// Read all bytes once. A piece is 64 KiB; the sum goes to `sink` so that nothing can be left out.
static void read_bytes(const void *raw, const KvdBatch &, Worker &worker) {
    const auto &args = *static_cast<const KvdMeasureArgs *>(raw);
    constexpr int64_t PIECE = 64 << 10;
    constexpr int VECTORS = 8;
    const int64_t pieces = args.count / PIECE;
    vi sums[VECTORS] = {};
    for (int64_t piece; (piece = worker.claim()) < pieces;) {
        const uint8_t *p = args.bytes + piece * PIECE, *const end = p + PIECE;
        for (; p != end; p += VECTORS * 4 * W)
            for (int v = 0; v < VECTORS; ++v) sums[v] += load_bytes(p + v * 4 * W);
    }
    for (int v = 1; v < VECTORS; ++v) sums[0] += sums[v];
    args.sink[worker.index] = sums[0][0];
}

// `count` rounds of eight independent integer dot products on registers, on every thread: multiply, add, nothing else.
static void dot_peak(const void *raw, const KvdBatch &, Worker &worker) {
    const auto &args = *static_cast<const KvdMeasureArgs *>(raw);
    constexpr int CHAINS = 8;
    vi u = splat_int(0x01020304), s = splat_int(0x01010101);
#if defined(KVD_LEVEL_AVX2) && !defined(KVD_EMULATE)
    vh sums[CHAINS] = {};  // int16, as the kernel sums them before widening
#else
    vi sums[CHAINS] = {};
#endif
    for (int64_t round = 0; round < args.count; ++round) {
        for (int chain = 0; chain < CHAINS; ++chain) {
            KVD_OPAQUE(u);
            KVD_OPAQUE(s);
#if defined(KVD_LEVEL_AVX2) && !defined(KVD_EMULATE)
            sums[chain] += (vh)_mm256_maddubs_epi16((__m256i)u, (__m256i)s);
#else
            sums[chain] = dot_u8_s8(sums[chain], u, s);
#endif
        }
    }
    for (int chain = 1; chain < CHAINS; ++chain) sums[0] += sums[chain];
    args.sink[worker.index] = sums[0][0];
}
constexpr int64_t DOT_PEAK_OPS = 8 * 4 * W * 2;  // operations of a round: a multiplication and an addition per byte
