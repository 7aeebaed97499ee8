// AMX instructions, or with KVD_EMULATE their semantics in plain C++. Included inside namespace kvd::KVD_LEVEL.
//
// Macros, since the instructions take tile numbers as literals. The compiler does not know that loading a tile or a
// configuration reads memory, so a barrier stands before each.

struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "as the architecture defines it");

#if !defined(KVD_EMULATE)

#define KVD_MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

KVD_INLINE void tile_config_load(const TileConfig *config) {
    KVD_MEMORY_BARRIER();
    __asm__ volatile("ldtilecfg %0" ::"m"(*config) : "memory");
}
KVD_INLINE void tile_config_store(TileConfig *config) { __asm__ volatile("sttilecfg %0" : "=m"(*config)::"memory"); }

#define KVD_TILE_ZERO(c) _tile_zero(c)
#define KVD_TILE_LOAD(t, p, stride) \
    do {                            \
        KVD_MEMORY_BARRIER();       \
        _tile_loadd(t, p, stride);  \
    } while (0)
#define KVD_TILE_STORE(t, p, stride) _tile_stored(t, p, stride)
#define KVD_TILE_DOT_S8_U8(c, a, b) _tile_dpbsud(c, a, b)
#define KVD_TILE_DOT_S8_S8(c, a, b) _tile_dpbssd(c, a, b)

#else

constexpr int NUM_TILES = 8, MAX_TILE_ROWS = 16, MAX_TILE_ROW_BYTES = 64;

struct TileState {
    TileConfig config;
    uint8_t data[NUM_TILES][MAX_TILE_ROWS][MAX_TILE_ROW_BYTES];
};
static thread_local TileState tile_state;  // palette 0: not configured

// What would be an exception of the processor ends the process.
KVD_INLINE void tile_require(bool condition) {
    if (!condition) __builtin_trap();
}

static void tile_config_load(const TileConfig *config) {
    tile_require(config->palette == 1 && config->start_row == 0);
    for (int i = 0; i < 14; ++i) tile_require(config->reserved[i] == 0);
    for (int t = 0; t < 16; ++t) {
        tile_require(config->rows[t] <= MAX_TILE_ROWS && config->row_bytes[t] <= MAX_TILE_ROW_BYTES);
        tile_require((config->rows[t] == 0) == (config->row_bytes[t] == 0));
        tile_require(t < NUM_TILES || config->rows[t] == 0);
    }
    memset(&tile_state, 0, sizeof tile_state);
    tile_state.config = *config;
}
static void tile_config_store(TileConfig *config) { *config = tile_state.config; }

static void tile_check(int t) { tile_require(tile_state.config.palette == 1 && tile_state.config.rows[t] > 0); }

static void tile_zero(int t) {
    tile_check(t);
    memset(tile_state.data[t], 0, sizeof tile_state.data[t]);
}
static void tile_load(int t, const void *from, int64_t stride) {
    tile_zero(t);
    for (int r = 0; r < tile_state.config.rows[t]; ++r)
        memcpy(
            tile_state.data[t][r], static_cast<const uint8_t *>(from) + r * stride, tile_state.config.row_bytes[t]);
}
static void tile_store(int t, void *to, int64_t stride) {
    tile_check(t);
    for (int r = 0; r < tile_state.config.rows[t]; ++r)
        memcpy(static_cast<uint8_t *>(to) + r * stride, tile_state.data[t][r], tile_state.config.row_bytes[t]);
}

// C[m][n] += Σ_k Σ_i a[m][4 k + i] · b[k][4 n + i], a signed, b of type B.
template <class B>
static void tile_dot(int c, int a, int b) {
    tile_check(a), tile_check(b), tile_check(c);
    const TileConfig &config = tile_state.config;
    tile_require(config.rows[c] == config.rows[a] && config.row_bytes[c] == config.row_bytes[b]);
    tile_require(config.row_bytes[a] == 4 * config.rows[b] && config.row_bytes[c] % 4 == 0 && c != a && c != b && a != b);
    for (int m = 0; m < config.rows[c]; ++m)
        for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
            int32_t sum;
            memcpy(&sum, &tile_state.data[c][m][4 * n], 4);
            for (int k = 0; k < config.row_bytes[a]; ++k)
                sum += int32_t(int8_t(tile_state.data[a][m][k])) * int32_t(B(tile_state.data[b][k / 4][4 * n + k % 4]));
            memcpy(&tile_state.data[c][m][4 * n], &sum, 4);
        }
}

#define KVD_TILE_ZERO(c) tile_zero(c)
#define KVD_TILE_LOAD(t, p, stride) tile_load(t, p, stride)
#define KVD_TILE_STORE(t, p, stride) tile_store(t, p, stride)
#define KVD_TILE_DOT_S8_U8(c, a, b) tile_dot<uint8_t>(c, a, b)
#define KVD_TILE_DOT_S8_S8(c, a, b) tile_dot<int8_t>(c, a, b)

#endif
