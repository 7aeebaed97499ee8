// Choosing tokens: the order of operations and the arithmetic (float64) of kvd_kernels.reference.sampling, without
// sorting a vocabulary. Included inside namespace kvd::KVD_LEVEL. One row is one piece of work.
//
// The adjusted logits of a row lie in scratch as float64. Candidates are found by a threshold: passes that only count
// how many values reach it narrow it down until it lets through a few more than wanted; those alone are sorted.

typedef int64_t vl __attribute__((vector_size(8 * WD)));
typedef float vf_half __attribute__((vector_size(4 * WD), aligned(4), may_alias));

KVD_INLINE vd load_doubles(const double *p) { return *reinterpret_cast<const vd_unaligned *>(p); }
KVD_INLINE vd widen(const float *p) { return __builtin_convertvector(*reinterpret_cast<const vf_half *>(p), vd); }

// e^x for x <= 0 within 1e-15: 2^n e^r, |r| <= ln 2 / 2, Taylor polynomial of degree 13. -inf and far below give 0.
KVD_INLINE vd exp_nonpositive_double(vd x) {
    x = x < -708.0 ? vd{} - 708.0 : x;
    constexpr double round = 6755399441055744.0;  // 1.5 · 2^52
    const vd shifted = x * 1.4426950408889634 + round;
    const vd n = shifted - round;
    vd r = x - n * 0.693147180369123816490;  // ln 2 in two parts: the first times n is exact
    r -= n * 1.90821492927058770002e-10;
    vd sum = vd{} + 1.6059043836821613e-10;
    constexpr double coefficients[] = {
        2.08767569878681e-09, 2.505210838544172e-08, 2.7557319223985893e-07, 2.7557319223985888e-06,
        2.48015873015873e-05, 0.0001984126984126984, 0.001388888888888889, 0.008333333333333333,
        0.041666666666666664, 0.16666666666666666, 0.5, 1.0, 1.0,
    };
    for (double coefficient : coefficients) sum = sum * r + coefficient;
    const vd power_of_two = (vd)(((vl)shifted + 1023) << 52);
    const vd result = sum * power_of_two;
    return x > -708.0 ? result : vd{};
}

// Σ e^(values - peak); lanes are added in one fixed order.
KVD_INLINE double exp_sum(const double *values, int64_t count, double peak) {
    vd sums = {};
    int64_t i = 0;
    for (; i + WD <= count; i += WD) sums += exp_nonpositive_double(load_doubles(values + i) - peak);
    double total = 0.0;
    for (int lane = 0; lane < WD; ++lane) total += sums[lane];
    for (; i < count; ++i) total += exp_nonpositive_double(vd{} + (values[i] - peak))[0];
    return total;
}

KVD_INLINE int64_t count_from(const double *values, int64_t count, double threshold) {
    vl counts = {};
    int64_t i = 0;
    for (; i + WD <= count; i += WD) counts -= (vl)(load_doubles(values + i) >= threshold);
    int64_t total = 0;
    for (int lane = 0; lane < WD; ++lane) total += counts[lane];
    for (; i < count; ++i) total += values[i] >= threshold;
    return total;
}

// Whether candidate a comes before b: larger value first, equal ones by id.
KVD_INLINE bool is_before(const double *values, int32_t a, int32_t b) {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
}

KVD_INLINE void sift_down(const double *values, int32_t *ids, int64_t root, int64_t count) {
    for (int64_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && is_before(values, ids[child], ids[child + 1])) ++child;
        if (!is_before(values, ids[root], ids[child])) return;
        const int32_t moved = ids[root];
        ids[root] = ids[child];
        ids[child] = moved;
    }
}

// Heap sort: no worst case, no memory.
static void sort_candidates(const double *values, int32_t *ids, int64_t count) {
    for (int64_t root = count / 2; root-- > 0;) sift_down(values, ids, root, count);
    for (int64_t last = count; last-- > 1;) {
        const int32_t moved = ids[0];
        ids[0] = ids[last];
        ids[last] = moved;
        sift_down(values, ids, 0, last);
    }
}

// The `wanted` best ids in order into `ids`, which has room for `count`; returns how many there are. Fewer than wanted
// only where values further than `reach` below the peak would have to be among them.
static int64_t best_candidates(
    const double *values, int64_t count, double peak, int64_t wanted, double reach, int32_t *ids) {
    if (wanted > count) wanted = count;
    double threshold = -__builtin_inf();
    if (wanted < count) {
        // Grow the distance from the peak until enough values are inside, then halve the surplus away. A tie of many
        // equal values cannot be split by a threshold; the bound on rounds ends that.
        double inside = 4.0, outside = 0.0;
        int64_t reached = count_from(values, count, peak - inside);
        while (reached < wanted && inside < reach) {
            outside = inside;
            inside = 2.0 * inside < reach ? 2.0 * inside : reach;
            reached = count_from(values, count, peak - inside);
        }
        for (int round = 0; round < 20 && reached > 2 * wanted + 64; ++round) {
            const double middle = 0.5 * (inside + outside);
            const int64_t fewer = count_from(values, count, peak - middle);
            if (fewer >= wanted) {
                inside = middle;
                reached = fewer;
            } else {
                outside = middle;
            }
        }
        threshold = peak - inside;
    }
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        ids[found] = int32_t(i);
        found += values[i] >= threshold;
    }
    sort_candidates(values, ids, found);
    return found < wanted ? found : wanted;
}

// One number in [0, 1) with 53 random bits from Philox-4x32-10 (Salmon et al., SC 2011).
static double philox_uniform(uint64_t seed, uint64_t position) {
    uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t(0xD2511F53u) * c0, product1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(product1 >> 32) ^ c1 ^ k0;
        c2 = uint32_t(product0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(product1);
        c3 = uint32_t(product0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return double(uint64_t(c0 >> 5) * 67108864u + (c1 >> 6)) / 9007199254740992.0;
}

struct RowParameters {
    int64_t top_k;
    double top_p, min_p, number;
};

// e^-750 is 0 in float64: what lies further below the peak is never drawn. Low temperatures put nearly all there.
constexpr double POSSIBLE = 750.0;

// Inverse transform sampling over candidates by falling probability, then id.
static int64_t draw(const double *values, int64_t vocab, double peak, const RowParameters &row, int32_t *ids) {
    const int64_t limit = row.top_k > 0 && row.top_k < vocab ? row.top_k : vocab;
    const double everything = limit == vocab ? exp_sum(values, vocab, peak) : 0.0;
    for (int64_t count = limit < 256 ? limit : 256;;) {
        // With top_k the mass is that of the k best, so they are all looked at.
        const int64_t looked_at = limit == vocab ? count : limit;
        const int64_t found = best_candidates(values, vocab, peak, looked_at, POSSIBLE, ids);
        double total = everything;
        if (limit != vocab)
            for (int64_t i = 0; i < found; ++i) total += exp_nonpositive_double(vd{} + (values[ids[i]] - peak))[0];
        // A candidate stays while the mass before it has not reached top_p, and while it is likely enough.
        double cumulative = 0.0;
        int64_t kept = 0;
        for (; kept < found; ++kept) {
            const double probability = exp_nonpositive_double(vd{} + (values[ids[kept]] - peak))[0];
            const bool stays = cumulative < row.top_p * total && probability >= row.min_p && probability > 0.0;
            if (kept && !stays) break;
            cumulative += probability;
        }
        double mass = cumulative;
        if (kept == looked_at && looked_at < limit) {
            const bool is_enough = row.top_p >= 1.0 && row.min_p <= 0.0 && row.number * total < cumulative;
            if (!is_enough) {
                count = count * 16 < limit ? count * 16 : limit;
                continue;
            }
            mass = total;
        }
        const double target = row.number * mass;
        double reached = 0.0;
        for (int64_t i = 0; i < kept; ++i) {
            reached += exp_nonpositive_double(vd{} + (values[ids[i]] - peak))[0];
            if (reached > target) return ids[i];
        }
        return ids[kept - 1];
    }
}

KVD_INLINE bool has_entries(const KvdRagged &ragged, int64_t row) { return ragged.ids && ragged.ids[row]; }

// -inf wherever a bit is 0. Whole words are the rule: a grammar allows next to nothing or nearly everything.
static void apply_mask(const uint32_t *mask, int64_t vocab, double *values) {
    for (int64_t start = 0; start < vocab; start += 32) {
        const uint32_t word = mask[start / 32];
        if (word == 0xffffffffu) continue;
        const int64_t count = vocab - start < 32 ? vocab - start : 32;
        for (int64_t i = 0; i < count; ++i) values[start + i] = word >> i & 1 ? values[start + i] : -__builtin_inf();
    }
}

// Bias, penalties, ban and mask on a row of float64 values; `seen` has a bit for every token, all zero.
static void adjust(const KvdSampleArgs &args, int64_t row, double *values, uint8_t *seen) {
    const auto is_token = [&](int64_t id) { return id >= 0 && id < args.vocab; };
    if (has_entries(args.bias, row)) {
        const float *bias = static_cast<const float *>(args.bias.values[row]);
        for (int64_t i = 0; i < args.bias.counts[row]; ++i)
            if (is_token(args.bias.ids[row][i])) values[args.bias.ids[row][i]] += double(bias[i]);
    }
    const double repetition = args.repetition[row];
    if (repetition != 1.0) {
        const KvdRagged *const both[] = {&args.prompt, &args.output};
        for (const KvdRagged *ragged : both) {
            if (!has_entries(*ragged, row)) continue;
            for (int64_t i = 0; i < ragged->counts[row]; ++i) {
                const int64_t id = ragged->ids[row][i];
                if (!is_token(id) || (seen[id / 8] >> (id % 8) & 1)) continue;
                seen[id / 8] = uint8_t(seen[id / 8] | 1 << (id % 8));
                values[id] = values[id] > 0 ? values[id] / repetition : values[id] * repetition;
            }
        }
    }
    if (has_entries(args.output, row)) {
        const int64_t *counts = static_cast<const int64_t *>(args.output.values[row]);
        for (int64_t i = 0; i < args.output.counts[row]; ++i) {
            const int64_t id = args.output.ids[row][i];
            if (!is_token(id)) continue;
            const double presence = counts[i] > 0 ? double(args.presence[row]) : 0.0;
            values[id] -= presence + double(args.frequency[row]) * double(counts[i]);
        }
    }
    if (has_entries(args.banned, row))
        for (int64_t i = 0; i < args.banned.counts[row]; ++i)
            if (is_token(args.banned.ids[row][i])) values[args.banned.ids[row][i]] = -__builtin_inf();
    if (args.masks && args.masks[row]) apply_mask(args.masks[row], args.vocab, values);
}

KVD_INLINE bool is_finite_row(const float *logits, int64_t vocab) {
    vi bad = {};
    int64_t i = 0;
    for (; i + W <= vocab; i += W) bad |= (bits(load(logits + i)) & 0x7fffffff) >= 0x7f800000;
    bool any = false;
    for (int lane = 0; lane < W; ++lane) any |= bad[lane] != 0;
    for (; i < vocab; ++i) any |= !__builtin_isfinite(logits[i]);
    return !any;
}

KVD_INLINE double largest(const double *values, int64_t count) {
    vd best = vd{} - __builtin_inf();
    int64_t i = 0;
    for (; i + WD <= count; i += WD) {
        const vd x = load_doubles(values + i);
        best = x > best ? x : best;
    }
    double result = best[0];
    for (int lane = 1; lane < WD; ++lane) result = best[lane] > result ? best[lane] : result;
    for (; i < count; ++i) result = values[i] > result ? values[i] : result;
    return result;
}

// values[i] = logits[i] / divisor
KVD_INLINE void widen_row(const float *logits, int64_t vocab, double *values) {
    int64_t i = 0;
    for (; i + WD <= vocab; i += WD) *reinterpret_cast<vd_unaligned *>(values + i) = widen(logits + i);
    for (; i < vocab; ++i) values[i] = double(logits[i]);
}

static void sample_row(const KvdSampleArgs &args, int64_t row, Worker &worker) {
    const int64_t vocab = args.vocab;
    const float *logits = args.logits + row * vocab;
    double *values = reinterpret_cast<double *>(worker.scratch);
    int32_t *ids = reinterpret_cast<int32_t *>(values + vocab);
    uint8_t *seen = reinterpret_cast<uint8_t *>(ids + vocab + 1);
    if (!is_finite_row(logits, vocab)) {
        args.token_ids[row] = -1;
        return;
    }
    widen_row(logits, vocab, values);
    if (args.repetition[row] != 1.0f) memset(seen, 0, size_t((vocab + 7) / 8));
    adjust(args, row, values, seen);
    const double temperature = args.temperature[row];
    if (temperature == 0.0) {
        const double peak = largest(values, vocab);
        int64_t first = 0;
        while (first + 1 < vocab && values[first] != peak) ++first;
        args.token_ids[row] = first;
    } else {
        for (int64_t i = 0; i < vocab; ++i) values[i] /= temperature;
        const RowParameters parameters = {
            args.top_k[row], args.top_p[row], args.min_p[row],
            philox_uniform(uint64_t(args.seeds[row]), uint64_t(args.positions[row])),
        };
        args.token_ids[row] = draw(values, vocab, largest(values, vocab), parameters, ids);
    }
    const int64_t wanted = args.num_logprobs[row];
    if (wanted < 0) return;
    widen_row(logits, vocab, values);
    const double peak = largest(values, vocab), log_total = std::log(exp_sum(values, vocab, peak));
    args.logprobs[row] = values[args.token_ids[row]] - peak - log_total;
    if (!wanted) return;
    const int64_t found = best_candidates(values, vocab, peak, wanted, __builtin_inf(), ids);
    for (int64_t i = 0; i < found; ++i) {
        args.top_ids[row * args.top_stride + i] = ids[i];
        args.top_logprobs[row * args.top_stride + i] = values[ids[i]] - peak - log_total;
    }
}

static void sample(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdSampleArgs *>(raw);
    const int64_t rows = live_rows(args.rows, batch);
    for (int64_t row; (row = worker.claim()) < rows;) sample_row(args, row, worker);
}
