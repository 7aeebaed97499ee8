// Row-wise ops: norm, silu · mul, embedding, gather. Included inside namespace kvd::KVD_LEVEL.

// out = x / sqrt(mean(x^2) + eps) * weight; squares needs room for `width` rounded up to a power of two.
KVD_INLINE void normalize_row(
    const float *x, const float *weight, float eps, int64_t width, float *squares, float *out) {
    int64_t i = 0;
    for (; i + W <= width; i += W) store(squares + i, load(x + i) * load(x + i));
    for (; i < width; ++i) squares[i] = x[i] * x[i];
    const float root = __builtin_sqrtf(tree_sum(squares, width) / float(width) + eps);
    for (i = 0; i + W <= width; i += W) store(out + i, load(x + i) / root * load(weight + i));
    for (; i < width; ++i) out[i] = x[i] / root * weight[i];
}

static void rms_norm(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdNormArgs *>(raw);
    const int64_t rows = live_rows(args.rows, batch);
    float *squares = reinterpret_cast<float *>(worker.scratch);
    for (int64_t row; (row = worker.claim()) < rows;)
        normalize_row(
            args.x + row * args.width, args.weight, args.eps, args.width, squares, args.out + row * args.width);
}

static void embed(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
static void silu_mul(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
static void gather(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
