// Softmax weight per table entry, summed over query tokens and heads. Included inside namespace kvd::KVD_LEVEL.
//
// The weights need the peak and total over all splits, so scores are computed twice. The order of additions is that of
// reference.attention: tokens are taken in tiles of MASS_ELEMENTS / (heads · 256); in a tile, per entry, a tree over the
// 16 slots, then a tree over (KV head, token, head of the group); tiles are added one after the other.

constexpr int64_t MASS_ELEMENTS = int64_t(1) << 17;

// Scores of the split that begins with table entry `entry` for the rows of a tile as e, with peak and total. False when
// no row sees a slot of it.
static bool exponentiate_split(Tile &tile, int64_t entry) {
    if (!begin_split(tile, entry)) return false;
    if (tile.layer->k_type == KVD_I8)
        score_int8(tile);
    else
        score_float(tile);
    if (tile.args->key_bias != nullptr) add_key_bias(tile);
    for (int64_t row = 0; row < tile.rows; ++row) exponentiate_row(tile, row);
    return true;
}

// Tokens that a tile of attention holds.
KVD_INLINE int64_t tokens_of_tile(int64_t heads) { return heads < TILE_ROWS ? TILE_ROWS / heads : 1; }

// Mass of one sequence's tokens first … first + tokens - 1, added to `mass` [entries].
static void add_mass(Tile &tile, int64_t sequence, int64_t first, int64_t tokens, float *mass, Arena arena) {
    const int64_t kv_heads = tile.layer->num_kv_heads, rows = tokens * tile.heads * kv_heads;
    const int64_t at_once = tokens_of_tile(tile.heads);
    float *peaks = arena.take<float>(rows), *totals = arena.take<float>(rows);
    int64_t room = 16;
    while (room < rows) room *= 2;
    float *shares = arena.take<float>(SPLIT_ENTRIES * room);
    for (int64_t head = 0; head < kv_heads; ++head)
        for (int64_t token = 0; token < tokens; token += at_once) {
            begin_tile(tile, sequence, head, first + token, tokens - token < at_once ? tokens - token : at_once);
            for (int64_t row = 0; row < tile.rows; ++row) {
                tile.state_peak[row] = -__builtin_inff();
                tile.state_total[row] = 0.0f;
            }
            for (int64_t entry = 0; entry < tile.num_entries; entry = tile.next_table_entry) {
                if (!exponentiate_split(tile, entry)) continue;
                memset(tile.out, 0, size_t(tile.rows * tile.pitch) * 4);
                merge_split(tile, tile.peak, tile.total, tile.out, tile.pitch);
            }
            const int64_t at = (head * tokens + token) * tile.heads;
            memcpy(peaks + at, tile.state_peak, size_t(tile.rows) * 4);
            memcpy(totals + at, tile.state_total, size_t(tile.rows) * 4);
        }
    for (int64_t table_entry = 0; table_entry < tile.num_entries; table_entry = tile.next_table_entry) {
        memset(shares, 0, size_t(SPLIT_ENTRIES * room) * 4);
        for (int64_t head = 0; head < kv_heads; ++head)
            for (int64_t token = 0; token < tokens; token += at_once) {
                begin_tile(tile, sequence, head, first + token, tokens - token < at_once ? tokens - token : at_once);
                if (!exponentiate_split(tile, table_entry)) continue;
                for (int64_t row = 0; row < tile.rows; ++row) {
                    const int64_t at = (head * tokens + token) * tile.heads + row;
                    const float peak = peaks[at] < LOWEST ? LOWEST : peaks[at], total = totals[at];
                    const float factor = exp_nonpositive(splat(tile.peak[row] - peak))[0];
                    const vf share = splat(factor / (total == 0.0f ? 1.0f : total));
                    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
                        alignas(64) float slots[BLOCK_TOKENS];
                        const float *e = tile.scores + row * SPLIT_SLOTS + entry * BLOCK_TOKENS;
                        for (int64_t i = 0; i < BLOCK_TOKENS; i += W) store(slots + i, load(e + i) * share);
                        shares[entry * room + at] = tree_sum(slots, BLOCK_TOKENS);
                    }
                }
            }
        for (int64_t entry = table_entry; entry < tile.next_table_entry; ++entry) {
            const int64_t place = tile.first_positions[entry] / BLOCK_TOKENS % SPLIT_ENTRIES;
            mass[entry] += tree_sum(shares + place * room, rows);
        }
    }
}

static void mass_of_sequence(Tile &tile, int64_t sequence, Arena arena) {
    const KvdAttendArgs &args = *tile.args;
    float *mass = args.block_mass + sequence * args.mass_stride;
    memset(mass, 0, size_t(args.mass_stride) * 4);
    const int64_t first = tile.batch->query_starts[sequence], last = tile.batch->query_starts[sequence + 1];
    const int64_t fitting = MASS_ELEMENTS / (args.num_heads * SPLIT_SLOTS), tokens = fitting < 1 ? 1 : fitting;
    for (int64_t token = first; token < last; token += tokens)
        add_mass(tile, sequence, token, last - token < tokens ? last - token : tokens, mass, arena);
}
