// Softmax inside a split, and the merging of splits. Included inside namespace kvd::KVD_LEVEL.

constexpr float INT8_WEIGHT_LEVELS = 32767.0f;

// Sum of 2^n ≥ W numbers by halving; zeros behind the last slot change nothing.
KVD_INLINE float sum_slots(const float *x, int64_t width) {
    alignas(64) float sums[SPLIT_SLOTS / 2];
    vf lanes;
    if (width == W) {
        lanes = load(x);
    } else {
        int64_t half = width / 2;
        for (int64_t i = 0; i < half; i += W) store(sums + i, load(x + i) + load(x + half + i));
        while (half > W) {
            half /= 2;
            for (int64_t i = 0; i < half; i += W) store(sums + i, load(sums + i) + load(sums + half + i));
        }
        lanes = load(sums);
    }
#pragma GCC unroll 4
    for (int step = W / 2; step >= 1; step /= 2) lanes += turn_lanes(lanes, step);
    return lanes[0];
}

// The largest lane of numbers.
KVD_INLINE float larger_lane(vf x) {
#pragma GCC unroll 4
    for (int step = W / 2; step >= 1; step /= 2) {
        const vf turned = turn_lanes(x, step);
        x = turned > x ? turned : x;
    }
    return x[0];
}

// Scores to e = exp(score - peak) in place, with peak and total of the row. A NaN among them is left out of the peak
// but not of the total, which is enough to make the row NaN.
KVD_INLINE void exponentiate_row(Tile &tile, int64_t row) {
    float *scores = tile.scores + row * SPLIT_SLOTS;
    const int64_t first = tile.first_entry * BLOCK_TOKENS, last = tile.last_entry * BLOCK_TOKENS;
    const vf nothing = splat(-__builtin_inff());
    vf best = nothing;
    if (tile.is_masked) {
        const vi query = splat_int(tile.positions[row]);
        const int64_t window = tile.layer->window;
        const vi before = splat_int(window ? int32_t(tile.positions[row] - window) : -HIDDEN_POSITION - 1);
        for (int64_t i = first; i < last; i += W) {
            const vi key = load_bytes(tile.key_positions + i);
            const vf score = ((key <= query) & (key > before)) != 0 ? load(scores + i) : nothing;
            store(scores + i, score);
            best = score > best ? score : best;
        }
    } else {
        for (int64_t i = first; i < last; i += W) {
            const vf score = load(scores + i);
            best = score > best ? score : best;
        }
    }
    const float peak = larger_lane(best);
    tile.peak[row] = peak;
    const vf shift = splat(peak < LOWEST ? LOWEST : peak);
    constexpr int VECS = 32 / W;
    int64_t i = first;
    for (; i + 32 <= last; i += 32) {
        vf x[VECS];
        for (int v = 0; v < VECS; ++v) x[v] = load(scores + i + v * W) - shift;
        exp_nonpositive(x);
        for (int v = 0; v < VECS; ++v) store(scores + i + v * W, x[v]);
    }
    for (; i < last; i += W) store(scores + i, exp_nonpositive(load(scores + i) - shift));
    int64_t width = BLOCK_TOKENS;
    while (width < last) width *= 2;
    for (int64_t i = 0; i < first; i += W) store(scores + i, splat(0.0f));
    for (int64_t i = last; i < width; i += W) store(scores + i, splat(0.0f));
    tile.total[row] = sum_slots(scores, width);
}

// e to integer weights of e · value scale: int8 values take them from `weights`, 16-bit ones in place of the scores.
template <bool IS_INT8>
KVD_INLINE void weigh_row(Tile &tile, int64_t row) {
    float *e = tile.scores + row * SPLIT_SLOTS;
    const int64_t first = tile.first_entry * BLOCK_TOKENS, last = tile.last_entry * BLOCK_TOKENS;
    const float levels = IS_INT8 ? INT8_WEIGHT_LEVELS : float((1 << tile.weight_bits) - 1);
    vf best = splat(0.0f);
    for (int64_t i = first; i < last; i += W) {
        const vf weight = load(e + i) * load(tile.value_scales + i);
        best = weight > best ? weight : best;
    }
    float scale = larger_lane(best) / levels;
    scale = scale == 0.0f ? 1.0f : scale;
    const vf divisor = splat(scale), most = splat(levels);
    for (int64_t i = first; i < last; i += W) {
        vf ratio = load(e + i) * load(tile.value_scales + i) / divisor;
        ratio = ratio < most ? ratio : most;
        const vf code = ratio + ROUND;
        if constexpr (IS_INT8)
            store_weights(tile.weights + row * SPLIT_SLOTS * 2, i, bits(code) & 0x7fff);
        else
            store(e + i, code - ROUND);
    }
    if (IS_INT8 && tile.has_bad_values)
        for (int64_t i = first; i < last; ++i)
            if (tile.bad_values[i] && e[i] > 0.0f) scale = __builtin_nanf("");
    tile.weight_scales[row] = scale;
}

// Merge a split's result (peak and total [rows], out [rows][pitch]) into the running state.
static void merge_split(Tile &tile, const float *peak, const float *total, const float *out, int64_t pitch) {
    if (tile.is_empty) {
        tile.is_empty = false;
        memcpy(tile.state_peak, peak, size_t(tile.rows) * 4);
        memcpy(tile.state_total, total, size_t(tile.rows) * 4);
        for (int64_t row = 0; row < tile.rows; ++row)
            memcpy(tile.state_out + row * tile.pitch, out + row * pitch, size_t(tile.head_dim) * 4);
        return;
    }
    alignas(64) float old_factors[W], new_factors[W];
    for (int64_t start = 0; start < tile.rows; start += W) {
        const int64_t rows = tile.rows - start < W ? tile.rows - start : W;
        alignas(64) float peaks[W] = {}, totals[W] = {};
        memcpy(peaks, peak + start, size_t(rows) * 4);
        memcpy(totals, total + start, size_t(rows) * 4);
        const vf a = load(tile.state_peak + start), b = load(peaks);
        const vf both = a > b ? a : b;
        const vf shift = both < LOWEST ? splat(LOWEST) : both;
        const vf old_factor = exp_nonpositive(a - shift), new_factor = exp_nonpositive(b - shift);
        store(tile.state_peak + start, both);
        store(tile.state_total + start, load(tile.state_total + start) * old_factor + load(totals) * new_factor);
        store(old_factors, old_factor);
        store(new_factors, new_factor);
        for (int64_t r = 0; r < rows; ++r) {
            float *state = tile.state_out + (start + r) * tile.pitch;
            const float *more = out + (start + r) * pitch;
            const vf f = splat(old_factors[r]), g = splat(new_factors[r]);
            int64_t i = 0;
            for (; i + W <= tile.head_dim; i += W) store(state + i, load(state + i) * f + load(more + i) * g);
            for (; i < tile.head_dim; ++i) state[i] = state[i] * old_factors[r] + more[i] * new_factors[r];
        }
    }
}

// Divide by the total and store the rows where attention's output goes; 0 where nothing was seen.
static void finish_tile(const Tile &tile) {
    for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t token = tile.first_token + row / tile.heads, head = tile.kv_head * tile.heads + row % tile.heads;
        float *out = tile.args->out + (token * tile.args->num_heads + head) * tile.head_dim;
        if (tile.is_empty) {
            memset(out, 0, size_t(tile.head_dim) * 4);
            continue;
        }
        const float total = tile.state_total[row], divisor = total == 0.0f ? 1.0f : total;
        const float *state = tile.state_out + row * tile.pitch;
        int64_t i = 0;
        for (; i + W <= tile.head_dim; i += W) store(out + i, load(state + i) / splat(divisor) + 0.0f);
        for (; i < tile.head_dim; ++i) out[i] = state[i] / divisor + 0.0f;
    }
}
