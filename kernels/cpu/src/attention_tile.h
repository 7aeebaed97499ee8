// What attention computes with: some query rows of one KV head, and one split of the positions at a time.
// Included inside namespace kvd::KVD_LEVEL.
//
// A tile is `tokens` neighbouring query tokens of a sequence times the `heads` query heads of one KV head; its row
// r = token · heads + head. All rows share every load of K and V. Split s is the positions 256 · s … 256 · s + 255, 16
// places for table entries, of which only [first_entry, last_entry) are read: those before and behind are seen by no
// row, and a slot that is not seen adds an exact zero to every sum. A place between them may have no table entry: it
// is read from some block that exists, and hidden. Per split and row (reference.splits states the arithmetic):
//
//     scores [rows][256]    q·k · scales, then in place e = exp(score - peak), 0 where the row does not see the slot
//     weights               e · value scale as integers, in the form that the level multiplies best
//     out [rows][pitch]     Σ w·v · weight scale; pitch is head_dim rounded up to whole lines of 16
//
// The running state (state_peak, state_total, state_out) is what the splits so far have been merged to.

constexpr int64_t SPLIT_SLOTS = KVD_SPLIT_SLOTS;
constexpr int64_t BLOCK_TOKENS = KVD_BLOCK_TOKENS;
constexpr int64_t SPLIT_ENTRIES = SPLIT_SLOTS / BLOCK_TOKENS;
constexpr int64_t TILE_ROWS = 24;  // a tile has as many tokens as fit in so many rows, but one at least
constexpr float LOWEST = -3.4028234663852886e38f;
constexpr int32_t HIDDEN_POSITION = 0x7fffffff;

// Hands out parts of a thread's scratch memory, each at a cache line.
struct Arena {
    uint8_t *next;

    template <typename T>
    KVD_ALWAYS_INLINE T *take(int64_t count) {
        T *result = reinterpret_cast<T *>(next);
        next += round_up(count * int64_t(sizeof(T)), 64);
        return result;
    }
};

struct Tile {
    const KvdAttendArgs *args;
    const KvdLayer *layer;
    const KvdBatch *batch;
    int64_t sequence, kv_head, first_token, tokens, heads, rows, head_dim, pitch, num_slots;
    const int32_t *block_table, *first_positions;  // of the sequence; [num_entries], first_positions ascending
    int64_t num_entries;
    int32_t first_query, last_query;  // least and greatest position among the tokens
    int query_bits, key_bits;         // of fixed-point numbers; the values' come from the number of slots
    int weight_bits, value_bits;

    // Queries.
    int32_t *positions;       // [rows]
    int8_t *codes;            // int8 keys: [rows][pitch]
    int32_t *starts;          // int8 keys: [rows] what the dot product of a row begins with
    float *query_scales;      // [rows], times the softmax scale
    double *wide_codes;       // 16-bit keys: [rows][head_dim / 4][WD], four channels repeated to fill a vector
    double *bias_codes;       // [rows][pitch]
    float *bias_scales;       // [rows], times the softmax scale

    // The split at hand.
    int64_t next_table_entry;   // the first of the next split
    int64_t first_entry, last_entry;        // places
    bool is_masked;             // some row does not see some slot of these places
    int32_t used[SPLIT_ENTRIES];  // slots in use of each place
    bool has_bad_values;        // int8 values: a scale that is NaN; 16-bit ones: an element that is not finite
    const uint8_t *sections[SPLIT_ENTRIES];  // the layer's part of each block
    bool has_next;              // next_keys is set: this chain goes on behind this split
    const uint8_t *next_keys[SPLIT_ENTRIES];  // K of this head in the blocks of the next split
    int32_t *key_positions;     // [256], HIDDEN_POSITION where the slot is not in use; set where masked or biased
    float *key_scales;          // [256]
    float *value_scales;        // [256], 0 where the slot is not in use
    uint8_t *bad_values;        // [256]
    float *scores;              // [rows][256]
    uint8_t *weights;           // [rows][512]
    float *peak, *total, *weight_scales;  // [rows]
    float *out;                 // [rows][pitch]
    float *block_floats;        // one block of 16-bit K or V, or of rope rows: [16 · pitch]
    double *wide_out;           // 16-bit values: [rows][head_dim · 4]

    float *state_peak, *state_total, *state_out;
    bool is_empty;              // no split has been merged yet
    Arena rest;                 // scratch memory that nothing of this uses
};

static void make_tile(Tile &tile, const KvdAttendArgs &args, const KvdBatch &batch, Arena arena) {
    const KvdLayer &layer = *args.layer;
    tile.args = &args;
    tile.layer = &layer;
    tile.batch = &batch;
    tile.heads = args.num_heads / layer.num_kv_heads;
    tile.head_dim = layer.head_dim;
    tile.pitch = round_up(tile.head_dim, 16);
    exact_bits(tile.head_dim, &tile.query_bits, &tile.key_bits);
    exact_bits(SPLIT_SLOTS, &tile.weight_bits, &tile.value_bits);
    // Per-row numbers are worked on in whole vectors.
    const int64_t rows = round_up(tile.heads < TILE_ROWS ? TILE_ROWS : tile.heads, 16);
    tile.positions = arena.take<int32_t>(rows);
    tile.starts = arena.take<int32_t>(rows);
    tile.query_scales = arena.take<float>(rows);
    tile.bias_scales = arena.take<float>(rows);
    tile.peak = arena.take<float>(rows);
    tile.total = arena.take<float>(rows);
    tile.weight_scales = arena.take<float>(rows);
    tile.state_peak = arena.take<float>(rows);
    tile.state_total = arena.take<float>(rows);
    tile.key_positions = arena.take<int32_t>(SPLIT_SLOTS);
    tile.key_scales = arena.take<float>(SPLIT_SLOTS);
    tile.value_scales = arena.take<float>(SPLIT_SLOTS);
    tile.bad_values = arena.take<uint8_t>(SPLIT_SLOTS);
    tile.scores = arena.take<float>(rows * SPLIT_SLOTS);
    tile.weights = arena.take<uint8_t>(rows * SPLIT_SLOTS * 2);
    tile.out = arena.take<float>(rows * tile.pitch);
    tile.state_out = arena.take<float>(rows * tile.pitch);
    tile.codes = arena.take<int8_t>(rows * tile.pitch);
    tile.block_floats = arena.take<float>(BLOCK_TOKENS * tile.pitch);
    if (layer.k_type != KVD_I8) tile.wide_codes = arena.take<double>(rows * tile.head_dim / 4 * WD);
    if (layer.v_type != KVD_I8) tile.wide_out = arena.take<double>(rows * tile.head_dim * 4);
    if (args.key_bias != nullptr) tile.bias_codes = arena.take<double>(rows * tile.pitch);
    tile.rest = arena;
}

// The power of two by which fixed point divides numbers up to `largest`, and its reciprocal.
KVD_INLINE float fixed_point_scale(float largest, int bits, float *inverse) {
    uint32_t word;
    __builtin_memcpy(&word, &largest, 4);
    const uint32_t scale_bits = fixed_point_scale_bits(word, bits), inverse_bits = reciprocal_bits(scale_bits);
    float scale;
    __builtin_memcpy(&scale, &scale_bits, 4);
    __builtin_memcpy(inverse, &inverse_bits, 4);
    return scale;
}

// Fixed point: the nearest integers after scaling by a power of two, which is returned. A multiple of W of them.
KVD_INLINE float to_fixed_point(const float *x, int64_t count, int bits, float *codes) {
    float inverse;
    const float scale = fixed_point_scale(largest_magnitude(x, count), bits, &inverse);
    for (int64_t i = 0; i < count; i += W) store(codes + i, load(x + i) * splat(inverse) + ROUND - ROUND);
    return scale;
}

// int8 codes of one row, their scale, and the start of its dot products. A row that is not finite has no codes; its
// scale is NaN, which makes all its scores NaN.
static void quantize_query(Tile &tile, int64_t row, const float *x) {
    const float absmax = largest_magnitude(x, tile.pitch);
    int8_t *codes = tile.codes + row * tile.pitch;
    float step = absmax / 127.0f;
    step = step == 0.0f ? 1.0f : step;
    if (!(absmax <= -LOWEST)) {
        step = __builtin_nanf("");
        memset(codes, 0, size_t(tile.pitch));
    } else {
        round_to_codes(x, tile.pitch, step, codes);
    }
    tile.query_scales[row] = step * tile.args->scale;
    int32_t sum = 0;
    if (KEY_OFFSET)
        for (int64_t i = 0; i < tile.pitch; ++i) sum += codes[i];
    tile.starts[row] = KEY_OFFSET * sum;
}

// What q · RoPE_p(key bias) is made of, apart from the key's position p: see reference.rope.bias_coefficients.
static void prepare_bias(Tile &tile, int64_t row, const float *q, float *coefficients) {
    const int64_t half = tile.args->half;
    const float *bias = tile.args->key_bias + tile.kv_head * tile.head_dim;
    for (int64_t i = 0; i < half; ++i) {
        coefficients[i] = q[i] * bias[i] + q[half + i] * bias[half + i];
        coefficients[half + i] = q[half + i] * bias[i] - q[i] * bias[half + i];
    }
    for (int64_t i = 2 * half; i < tile.head_dim; ++i) coefficients[i] = q[i] * bias[i];
    for (int64_t i = tile.head_dim; i < tile.pitch; ++i) coefficients[i] = 0.0f;
    const float scale = to_fixed_point(coefficients, tile.pitch, tile.query_bits, coefficients);
    tile.bias_scales[row] = scale * tile.args->scale;
    for (int64_t i = 0; i < tile.pitch; ++i) tile.bias_codes[row * tile.pitch + i] = double(coefficients[i]);
}

// Where the split that begins with table entry `entry` ends.
KVD_INLINE int64_t end_of_split(const int32_t *first_positions, int64_t num_entries, int64_t entry) {
    const int64_t next_split = (first_positions[entry] / SPLIT_SLOTS + 1) * SPLIT_SLOTS;
    int64_t end = entry + (next_split - first_positions[entry]) / BLOCK_TOKENS;  // where no place of it is empty
    end = end < num_entries ? end : num_entries;
    while (first_positions[end - 1] >= next_split) --end;
    return end;
}

// Splits that hold an entry of a table.
KVD_INLINE int64_t count_splits(const int32_t *first_positions, int64_t num_entries) {
    if (num_entries == 0) return 0;
    const int64_t first = first_positions[0], last = first_positions[num_entries - 1];
    if (last - first == (num_entries - 1) * BLOCK_TOKENS) return last / SPLIT_SLOTS - first / SPLIT_SLOTS + 1;
    int64_t count = 0;
    for (int64_t entry = 0; entry < num_entries; entry = end_of_split(first_positions, num_entries, entry)) ++count;
    return count;
}

// Choose the rows of a tile and turn their queries into integers.
static void begin_tile(Tile &tile, int64_t sequence, int64_t kv_head, int64_t first_token, int64_t tokens) {
    const KvdAttendArgs &args = *tile.args;
    tile.sequence = sequence;
    tile.kv_head = kv_head;
    tile.first_token = first_token;
    tile.tokens = tokens;
    tile.rows = tokens * tile.heads;
    const KvdGroupTables &tables = tile.batch->groups[tile.layer->group_id];
    tile.num_slots = tables.num_slots[sequence];
    tile.num_entries = divide_up(tile.num_slots, BLOCK_TOKENS);
    tile.block_table = tables.block_tables + sequence * tables.table_stride;
    tile.first_positions = tables.first_positions + sequence * tables.table_stride;
    tile.is_empty = true;
    tile.first_query = tile.last_query = tile.batch->positions[first_token];
    alignas(64) float x[MAX_HEAD_DIM], more[MAX_HEAD_DIM];
    for (int64_t row = 0; row < tile.rows; ++row) {
        const int64_t token = first_token + row / tile.heads, head = kv_head * tile.heads + row % tile.heads;
        const int32_t position = tile.batch->positions[token];
        tile.positions[row] = position;
        tile.first_query = position < tile.first_query ? position : tile.first_query;
        tile.last_query = position > tile.last_query ? position : tile.last_query;
        memcpy(x, args.q + (token * args.num_heads + head) * tile.head_dim, size_t(tile.head_dim) * 4);
        for (int64_t i = tile.head_dim; i < tile.pitch; ++i) x[i] = 0.0f;
        if (args.key_bias != nullptr) prepare_bias(tile, row, x, more);
        if (tile.layer->rotation_size) hadamard(x, tile.head_dim, tile.layer->rotation_size);
        if (tile.layer->k_type == KVD_I8) {
            quantize_query(tile, row, x);
            continue;
        }
        tile.query_scales[row] = to_fixed_point(x, tile.pitch, tile.query_bits, more) * args.scale;
        double *wide = tile.wide_codes + row * (tile.head_dim / 4) * WD;
        for (int64_t quad = 0; quad < tile.head_dim / 4; ++quad)
            for (int64_t i = 0; i < WD; ++i) wide[quad * WD + i] = double(more[quad * 4 + i % 4]);
    }
}

// The layer's part of the block of a table entry.
KVD_INLINE const uint8_t *section_of(const Tile &tile, int64_t entry) {
    return tile.layer->pool + tile.block_table[entry] * tile.layer->block_bytes;
}

// Slots in use of a table entry.
KVD_INLINE int64_t used_slots(const Tile &tile, int64_t entry) {
    const int64_t used = tile.num_slots - entry * BLOCK_TOKENS;
    return used < BLOCK_TOKENS ? used : BLOCK_TOKENS;
}

// Take up the split that begins with table entry `entry`, and set the range of its places that some row sees; false
// when there is none.
static bool begin_split(Tile &tile, int64_t entry) {
    const int32_t *first_positions = tile.first_positions;
    const int64_t window = tile.layer->window, end = end_of_split(first_positions, tile.num_entries, entry);
    const int64_t start = first_positions[entry] / SPLIT_SLOTS * SPLIT_SLOTS;
    tile.next_table_entry = end;
    int64_t first_seen = entry, last_seen = end;  // entries ascend: what is seen has no gap in the table
    if (window)
        while (first_seen < end &&
               first_positions[first_seen] + used_slots(tile, first_seen) <= tile.first_query - window + 1)
            ++first_seen;
    while (last_seen > first_seen && first_positions[last_seen - 1] > tile.last_query) --last_seen;
    if (first_seen == last_seen) return false;
    const int64_t first = first_positions[first_seen], last = first_positions[last_seen - 1];
    const int64_t last_used = used_slots(tile, last_seen - 1);
    tile.first_entry = (first - start) / BLOCK_TOKENS;
    tile.last_entry = (last - start) / BLOCK_TOKENS + 1;
    const bool has_hole = tile.last_entry - tile.first_entry != last_seen - first_seen;
    tile.is_masked = has_hole || last_used < BLOCK_TOKENS || last + last_used - 1 > tile.first_query ||
                     (window && first <= tile.last_query - window);
    for (int64_t place = tile.first_entry; has_hole && place < tile.last_entry; ++place) {
        tile.sections[place] = section_of(tile, first_seen);
        tile.used[place] = 0;
    }
    for (int64_t at = first_seen; at < last_seen; ++at) {
        const int64_t place = (first_positions[at] - start) / BLOCK_TOKENS;
        tile.sections[place] = section_of(tile, at);
        tile.used[place] = BLOCK_TOKENS;
    }
    tile.used[tile.last_entry - 1] = int32_t(last_used);
    if (tile.is_masked || tile.args->key_bias != nullptr)
        for (int64_t place = tile.first_entry; place < tile.last_entry; ++place)
            for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
                const int64_t slot = place * BLOCK_TOKENS + i;
                tile.key_positions[slot] = i < tile.used[place] ? int32_t(start + slot) : HIDDEN_POSITION;
            }
    tile.has_bad_values = false;
    tile.has_next = end < tile.num_entries;
    for (int64_t i = 0; tile.has_next && i < SPLIT_ENTRIES; ++i) {
        const int64_t at = end + i < tile.num_entries ? end + i : end;  // any address will do
        tile.next_keys[i] = section_of(tile, at) + tile.kv_head * tile.head_dim * 16;
    }
    return true;
}

// float16 scales [kv_head][16] of the entries in range as float32 [256].
KVD_INLINE void load_scales(const Tile &tile, int64_t offset, float *scales) {
    for (int64_t entry = tile.first_entry; entry < tile.last_entry; ++entry) {
        const uint8_t *source = tile.sections[entry] + offset + tile.kv_head * BLOCK_TOKENS * 2;
        for (int64_t i = 0; i < BLOCK_TOKENS; i += W)
            store(scales + entry * BLOCK_TOKENS + i, load_halves(reinterpret_cast<const uint16_t *>(source) + i));
    }
}
