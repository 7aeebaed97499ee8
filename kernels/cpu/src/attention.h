// Paged attention. Included inside namespace kvd::KVD_LEVEL.
//
// Byte for byte reference.attention, whose bits do not depend on what is computed together. Work is cut in two ways:
//
//     chain    (sequence, tile of its query tokens, KV head): walks its splits in ascending order and merges each into
//              a running state that never leaves the core's caches
//     piece    where a sequence has one tile and so many splits that a chain would leave other threads idle, chains are
//              cut into pieces; each split of a piece leaves its result in `partials`, and the thread that ends the
//              last piece of a chain merges them in ascending order
//
// Splits that hold no table entry do not exist here: those that do are counted from 0. Both ways give the same bits, so
// a chain that finds no room in `partials` is simply not cut.
//
//     partials = counter [1024] | one result per (sequence, KV head, split): peak [rows] | total [rows] | out [rows][D]
//
// The counters are int32, zero before the first step, and every step leaves them zero: pieces of a chain that have
// ended. So `partials` needs 1024 + Σ (splits · heads · (D + 2)) floats over the sequences that are cut.

#include "attention_dot.h"
#include "attention_tile.h"
#include "attention_int8.h"
#include "attention_float.h"
#include "attention_softmax.h"
#include "attention_mass.h"

constexpr int64_t COUNTERS = 1024;
constexpr int64_t PIECES_PER_THREAD = 8;

// How one sequence is cut. Every thread computes the same plan.
struct SequencePlan {
    int64_t first_unit;  // of all sequences, in order
    int32_t tiles, pieces, splits, splits_per_piece;
    int64_t partials_at, counters_at;
};

struct AttentionPlan {
    SequencePlan *sequences;
    int64_t num_units, tokens_per_tile;
};

static AttentionPlan plan_attention(const KvdAttendArgs &args, const KvdBatch &batch, int threads, Arena &arena) {
    const int64_t kv_heads = args.layer->num_kv_heads, heads = args.num_heads / kv_heads;
    AttentionPlan plan{arena.take<SequencePlan>(batch.num_seqs), 0, tokens_of_tile(heads)};
    const KvdGroupTables &tables = batch.groups[args.layer->group_id];
    int64_t all_splits = 0;
    for (int64_t s = 0; s < batch.num_seqs; ++s) {
        const int64_t tokens = batch.query_starts[s + 1] - batch.query_starts[s];
        const int32_t *first_positions = tables.first_positions + s * tables.table_stride;
        SequencePlan &sequence = plan.sequences[s];
        sequence.tiles = int32_t(divide_up(tokens, plan.tokens_per_tile));
        sequence.splits = int32_t(count_splits(first_positions, divide_up(tables.num_slots[s], BLOCK_TOKENS)));
        all_splits += sequence.tiles * kv_heads * sequence.splits;
    }
    const int64_t fair = all_splits / (PIECES_PER_THREAD * threads), most = fair < 1 ? 1 : fair;
    int64_t partials = COUNTERS, counters = 0;
    for (int64_t s = 0; s < batch.num_seqs; ++s) {
        SequencePlan &sequence = plan.sequences[s];
        const int64_t rows = (batch.query_starts[s + 1] - batch.query_starts[s]) * heads;
        const int64_t room = kv_heads * sequence.splits * rows * (args.layer->head_dim + 2);
        const bool is_cut = threads > 1 && sequence.tiles == 1 && sequence.splits > most &&
                            counters + kv_heads <= COUNTERS && partials + room <= args.partial_capacity;
        sequence.splits_per_piece = is_cut ? int32_t(most) : sequence.splits;
        sequence.pieces = is_cut ? int32_t(divide_up(sequence.splits, most)) : 1;
        sequence.partials_at = partials;
        sequence.counters_at = counters;
        sequence.first_unit = plan.num_units;
        plan.num_units += sequence.tiles * kv_heads * sequence.pieces;
        if (is_cut) {
            partials += room;
            counters += kv_heads;
        }
    }
    return plan;
}

// peak, total and out for all rows of the tile, of the split that begins with table entry `entry`. False when no row
// sees a slot of it.
static bool attend_split(Tile &tile, int64_t entry) {
    if (!exponentiate_split(tile, entry)) return false;
    if (tile.layer->v_type == KVD_I8) {
        load_value_scales(tile);
        for (int64_t row = 0; row < tile.rows; ++row) weigh_row<true>(tile, row);
        sum_int8(tile);
    } else {
        load_float_value_scales(tile);
        for (int64_t row = 0; row < tile.rows; ++row) weigh_row<false>(tile, row);
        sum_float(tile);
    }
    return true;
}

static void attend_chain(Tile &tile) {
    for (int64_t entry = 0; entry < tile.num_entries; entry = tile.next_table_entry)
        if (attend_split(tile, entry)) merge_split(tile, tile.peak, tile.total, tile.out, tile.pitch);
    finish_tile(tile);
}

static void attend_piece(Tile &tile, const SequencePlan &plan, int64_t piece) {
    const int64_t floats = tile.rows * (tile.head_dim + 2), first = piece * plan.splits_per_piece;
    const int64_t rest = plan.splits - first;
    const int64_t last = first + (rest < plan.splits_per_piece ? rest : plan.splits_per_piece);
    float *const results = tile.args->partials + plan.partials_at + tile.kv_head * plan.splits * floats;
    int64_t entry = 0;
    for (int64_t split = 0; split < first; ++split)
        entry = end_of_split(tile.first_positions, tile.num_entries, entry);
    for (int64_t split = first; split < last; ++split, entry = tile.next_table_entry) {
        float *peak = results + split * floats, *total = peak + tile.rows, *out = total + tile.rows;
        if (!attend_split(tile, entry)) {  // merging this changes nothing
            for (int64_t row = 0; row < tile.rows; ++row) peak[row] = -__builtin_inff();
            memset(total, 0, size_t(floats - tile.rows) * 4);
            continue;
        }
        memcpy(peak, tile.peak, size_t(tile.rows) * 4);
        memcpy(total, tile.total, size_t(tile.rows) * 4);
        for (int64_t row = 0; row < tile.rows; ++row)
            memcpy(out + row * tile.head_dim, tile.out + row * tile.pitch, size_t(tile.head_dim) * 4);
    }
    int32_t *ended = reinterpret_cast<int32_t *>(tile.args->partials) + plan.counters_at + tile.kv_head;
    if (__atomic_add_fetch(ended, 1, __ATOMIC_ACQ_REL) != plan.pieces) return;
    __atomic_store_n(ended, 0, __ATOMIC_RELAXED);
    for (int64_t split = 0; split < plan.splits; ++split) {
        const float *peak = results + split * floats, *total = peak + tile.rows;
        merge_split(tile, peak, total, total + tile.rows, tile.head_dim);
    }
    finish_tile(tile);
}

static void attend(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdAttendArgs *>(raw);
    Arena arena{worker.scratch};
    const AttentionPlan plan = plan_attention(args, batch, worker.count, arena);
    const int64_t kv_heads = args.layer->num_kv_heads;
    const int64_t mass_units = args.block_mass == nullptr ? 0 : batch.num_seqs;
    Tile tile;
    bool is_made = false;
    int64_t sequence = 0;
    for (int64_t unit; (unit = worker.claim()) < plan.num_units + mass_units;) {
        if (!is_made) make_tile(tile, args, batch, arena);
        is_made = true;
        if (unit >= plan.num_units) {
            mass_of_sequence(tile, unit - plan.num_units, tile.rest);
            continue;
        }
        // Claims of one thread ascend, so the search goes on where the last one ended.
        while (sequence + 1 < batch.num_seqs && plan.sequences[sequence + 1].first_unit <= unit) ++sequence;
        const SequencePlan &cut = plan.sequences[sequence];
        const int64_t index = unit - cut.first_unit, piece = index % cut.pieces;
        const int64_t chain = index / cut.pieces, kv_head = chain % kv_heads;
        const int64_t nth = cut.tiles - 1 - chain / kv_heads;  // the last tiles see most: long work first
        const int64_t first = batch.query_starts[sequence] + nth * plan.tokens_per_tile;
        const int64_t rest = batch.query_starts[sequence + 1] - first;
        begin_tile(tile, sequence, kv_head, first, rest < plan.tokens_per_tile ? rest : plan.tokens_per_tile);
        if (cut.pieces == 1)
            attend_chain(tile);
        else
            attend_piece(tile, cut, piece);
    }
}
