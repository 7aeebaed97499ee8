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

// Work on elements that do not depend on one another is cut into pieces of this many columns of a row.
constexpr int64_t COLUMNS_AT_ONCE = 1024;

// Channels `first` … `last` - 1 of one row as float32, each product and sum rounded on its own.
static void dequantize_channels(const KvdEmbedArgs &args, int64_t row, int64_t first, int64_t last, float *out) {
    const int64_t start = row * args.width;
    if (args.type == KVD_F32) {
        memcpy(out + first, static_cast<const float *>(args.values) + start + first, size_t(last - first) * 4);
        return;
    }
    if (args.type == KVD_F16 || args.type == KVD_BF16) {
        const uint16_t *values = static_cast<const uint16_t *>(args.values) + start;
        for (int64_t i = first; i < last; ++i)
            out[i] = args.type == KVD_F16 ? half_to_float(values[i]) : bf16_to_float(values[i]);
        return;
    }
    const int64_t groups = args.width / args.group, group_start = row * groups;
    const int8_t *codes = static_cast<const int8_t *>(args.values) + start;
    const uint8_t *pairs = static_cast<const uint8_t *>(args.values) + start / 2;
    for (int64_t i = first; i < last;) {
        const int64_t group = i / args.group, end = (group + 1) * args.group < last ? (group + 1) * args.group : last;
        const float scale = half_to_float(args.scales[group_start + group]);
        if (args.type == KVD_I8) {
            for (; i < end; ++i) out[i] = float(codes[i]) * scale;
            continue;
        }
        const float offset = half_to_float(args.offsets[group_start + group]);
        for (; i < end; ++i) out[i] = float(pairs[i / 2] >> 4 * (i & 1) & 15) * scale + offset;
    }
}

static void embed(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdEmbedArgs *>(raw);
    const int64_t rows = live_rows(args.rows, batch), cuts = (args.width + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE;
    for (int64_t piece; (piece = worker.claim()) < rows * cuts;) {
        const int64_t row = piece / cuts, first = piece % cuts * COLUMNS_AT_ONCE;
        const int64_t last = first + COLUMNS_AT_ONCE < args.width ? first + COLUMNS_AT_ONCE : args.width;
        dequantize_channels(args, batch.token_ids[row], first, last, args.out + row * args.width);
    }
}

static void silu_mul(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdSiluArgs *>(raw);
    const int64_t rows = live_rows(args.rows, batch), cuts = (args.width + COLUMNS_AT_ONCE - 1) / COLUMNS_AT_ONCE;
    for (int64_t piece; (piece = worker.claim()) < rows * cuts;) {
        const int64_t row = piece / cuts, first = piece % cuts * COLUMNS_AT_ONCE;
        const int64_t last = first + COLUMNS_AT_ONCE < args.width ? first + COLUMNS_AT_ONCE : args.width;
        const float *gate = args.gate_up + row * 2 * args.width, *up = gate + args.width;
        float *out = args.out + row * args.width;
        int64_t i = first;
        for (; i + W <= last; i += W) store(out + i, silu(load(gate + i)) * load(up + i));
        for (; i < last; ++i) out[i] = (silu(splat(gate[i])) * up[i])[0];
    }
}

static void gather(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdGatherArgs *>(raw);
    for (int64_t row; (row = worker.claim()) < batch.num_logit_rows;)
        memcpy(args.out + row * args.width, args.x + batch.logit_rows[row] * args.width, size_t(args.width) * 4);
}
