// The AMX path of integer weights, for 16 rows and more. Included inside namespace kvd::KVD_LEVEL.

constexpr int64_t AMX_UNPACKED_BYTES = 64 << 10;

static void enter_thread() {}

template <bool IS_U4>
KVD_INLINE void multiply_integers(const uint8_t *tile, const Rows &x, int64_t rows, float *y, uint8_t *) {
    multiply_rows<IS_U4>(tile, x, rows, y);
}
