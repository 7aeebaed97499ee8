// Linear layers: what a stage does, cut into pieces of work. Included inside namespace kvd::KVD_LEVEL.
//
// A piece is a range of tiles times a chunk of rows. Its outputs are computed tile by tile into scratch memory, then
// bias and residual are added and the result is written; when gated, a piece covers the same columns of gate and up and
// ends in silu(gate) · up. Nothing depends on how pieces are cut.
#include "linear_dot.h"
#include "linear_rows.h"
#include "linear_unpacked.h"
#include "linear_float.h"
#include "linear_amx.h"

constexpr int64_t ROW_CHUNK = 64;
constexpr int64_t GATED_COLUMNS = 256;

// One thread's scratch memory during a linear stage.
struct LinearScratch {
    float *sums;           // [ROW_CHUNK][16]: a tile's outputs
    float *gate, *up;      // [ROW_CHUNK][GATED_COLUMNS] each
    double *codes;         // fixed-point activations of the chunk [rows][channels]
    double *scales;        // [ROW_CHUNK]
    uint8_t *unpacked;     // AMX_UNPACKED_BYTES
    int64_t coded_first, coded_rows;  // whose codes lie there; coded_rows 0: nobody's

    KVD_ALWAYS_INLINE explicit LinearScratch(uint8_t *memory) : coded_first(0), coded_rows(0) {
        sums = reinterpret_cast<float *>(memory);
        gate = sums + ROW_CHUNK * TILE;
        up = gate + ROW_CHUNK * GATED_COLUMNS;
        unpacked = reinterpret_cast<uint8_t *>(up + ROW_CHUNK * GATED_COLUMNS);
        scales = reinterpret_cast<double *>(unpacked + AMX_UNPACKED_BYTES);
        codes = scales + ROW_CHUNK;
    }
};
constexpr size_t LINEAR_HEAD_BYTES = size_t(ROW_CHUNK * (TILE + 2 * GATED_COLUMNS) * 4 + AMX_UNPACKED_BYTES + ROW_CHUNK * 8);
static_assert(LINEAR_HEAD_BYTES + size_t(MAX_INPUTS) * 8 <= SCRATCH_BYTES, "a row of codes fits into the scratch memory");

KVD_INLINE int64_t value_bytes(int32_t type) { return type == KVD_F32 ? 4 : 2; }

KVD_INLINE bool is_integer(const KvdPart &part) { return part.type == KVD_U4 || part.type == KVD_I8; }

KVD_INLINE int64_t tile_bytes_of(const KvdLinearArgs &args, const KvdPart &part) {
    if (!is_integer(part)) return float_tile_bytes(args.num_inputs, value_bytes(part.type));
    const KvdQuantized &q = args.inputs[part.quantized];
    return part.type == KVD_U4 ? u4_tile_bytes(q.groups, q.length) : i8_tile_bytes(q.groups, q.length);
}

// sums[rows][16] of one tile.
static void multiply(
    const KvdLinearArgs &args, const KvdPart &part, int64_t tile, int64_t row, int64_t rows, LinearScratch &scratch) {
    const uint8_t *packed = part.packed + tile * tile_bytes_of(args, part);
    if (is_integer(part)) {
        const Rows x(args.inputs[part.quantized], row);
        if (part.type == KVD_U4)
            multiply_integers<true>(packed, x, rows, scratch.sums, scratch.unpacked);
        else
            multiply_integers<false>(packed, x, rows, scratch.sums, scratch.unpacked);
        return;
    }
    const int64_t channels = args.num_inputs;
    if (scratch.coded_rows != rows || scratch.coded_first != row) {
        for (int64_t r = 0; r < rows; ++r)
            round_to_fixed_point(args.x + (row + r) * channels, channels, scratch.codes + r * channels, scratch.scales + r);
        scratch.coded_first = row;
        scratch.coded_rows = rows;
    }
    if (part.type == KVD_F16)
        multiply_float_rows<KVD_F16>(packed, scratch.codes, scratch.scales, channels, rows, scratch.sums);
    else if (part.type == KVD_BF16)
        multiply_float_rows<KVD_BF16>(packed, scratch.codes, scratch.scales, channels, rows, scratch.sums);
    else
        multiply_float_rows<KVD_F32>(packed, scratch.codes, scratch.scales, channels, rows, scratch.sums);
}

// Columns first … last - 1, all in this tile of the part, to out[r · stride + column - first].
static void finish(
    const KvdLinearArgs &args, const KvdPart &part, int64_t tile, int64_t row, int64_t rows, int64_t first,
    int64_t last, const LinearScratch &scratch, float *out, int64_t stride) {
    const float *sums = scratch.sums + (first - part.first_output - tile * TILE);
    const float *bias = args.bias == nullptr ? nullptr : args.bias + first;
    const float *residual = args.residual == nullptr ? nullptr : args.residual + row * args.num_outputs + first;
    const int64_t count = last - first;
    for (int64_t r = 0; r < rows; ++r, sums += TILE, out += stride) {
        int64_t i = 0;
        for (; i + W <= count; i += W) {
            vf y = load(sums + i);
            if (bias != nullptr) y += load(bias + i);
            if (residual != nullptr) y += load(residual + r * args.num_outputs + i);
            store(out + i, y);
        }
        for (; i < count; ++i) {
            float y = sums[i];
            if (bias != nullptr) y += bias[i];
            if (residual != nullptr) y += residual[r * args.num_outputs + i];
            out[i] = y;
        }
    }
}

// Columns first … last - 1 of the outputs, whatever parts they lie in, to out[r · stride + column - first].
static void multiply_columns(
    const KvdLinearArgs &args, int64_t row, int64_t rows, int64_t first, int64_t last, LinearScratch &scratch,
    float *out, int64_t stride) {
    for (int64_t p = 0; p < args.num_parts; ++p) {
        const KvdPart &part = args.parts[p];
        const int64_t begin = part.first_output, end = begin + part.num_outputs;
        int64_t column = first > begin ? first : begin;
        const int64_t until = last < end ? last : end;
        while (column < until) {
            const int64_t tile = (column - begin) / TILE;
            const int64_t tile_end = begin + (tile + 1) * TILE, stop = tile_end < until ? tile_end : until;
            multiply(args, part, tile, row, rows, scratch);
            finish(args, part, tile, row, rows, column, stop, scratch, out + (column - first), stride);
            column = stop;
        }
    }
}

static void multiply_gated(
    const KvdLinearArgs &args, int64_t row, int64_t rows, int64_t first, int64_t last, LinearScratch &scratch) {
    const int64_t width = args.num_outputs / 2, count = last - first;
    multiply_columns(args, row, rows, first, last, scratch, scratch.gate, GATED_COLUMNS);
    multiply_columns(args, row, rows, width + first, width + last, scratch, scratch.up, GATED_COLUMNS);
    for (int64_t r = 0; r < rows; ++r) {
        const float *gate = scratch.gate + r * GATED_COLUMNS, *up = scratch.up + r * GATED_COLUMNS;
        float *out = args.out + (row + r) * width + first;
        int64_t i = 0;
        for (; i + W <= count; i += W) store(out + i, silu(load(gate + i)) * load(up + i));
        if (i < count) {  // lanes behind the last column hold numbers of no meaning, which are dropped
            float rest[W];
            store(rest, silu(load(gate + i)) * load(up + i));
            memcpy(out + i, rest, size_t(count - i) * 4);
        }
    }
}

// How a stage is cut: chunks of rows, and within each the columns in units of a tile.
struct Pieces {
    int64_t rows, row_chunk, row_chunks;
    int64_t tiles, tiles_per_piece, pieces_per_chunk;

    KVD_ALWAYS_INLINE Pieces(const KvdLinearArgs &args, int64_t live, int threads) : rows(live) {
        row_chunk = ROW_CHUNK;
        int64_t bytes = 0;
        tiles = 0;
        for (int64_t p = 0; p < args.num_parts; ++p) {
            const int64_t count = divide_up(args.parts[p].num_outputs, TILE);
            tiles += count;
            bytes += count * tile_bytes_of(args, args.parts[p]);
            if (!is_integer(args.parts[p])) {
                const int64_t fitting = int64_t(SCRATCH_BYTES - LINEAR_HEAD_BYTES) / (args.num_inputs * 8);
                const int64_t preferred = FLOAT_ROWS_PER_PASS * 4;
                row_chunk = fitting < preferred ? fitting : preferred;
            }
        }
        if (args.gated) tiles = divide_up(args.num_outputs / 2, TILE);
        row_chunks = divide_up(rows, row_chunk);
        const int64_t bytes_per_tile = bytes / (tiles > 0 ? tiles : 1);
        tiles_per_piece = tiles * row_chunks / (threads * 12);
        const int64_t smallest = 4096 / bytes_per_tile, largest = (96 << 10) / bytes_per_tile;
        if (tiles_per_piece > largest) tiles_per_piece = largest;
        if (tiles_per_piece < smallest) tiles_per_piece = smallest;
        if (args.gated && tiles_per_piece > GATED_COLUMNS / TILE) tiles_per_piece = GATED_COLUMNS / TILE;
        if (tiles_per_piece < 1) tiles_per_piece = 1;
        pieces_per_chunk = divide_up(tiles, tiles_per_piece);
    }
};

// Tiles first … last - 1, counted through all parts.
static void multiply_tiles(
    const KvdLinearArgs &args, int64_t row, int64_t rows, int64_t first, int64_t last, LinearScratch &scratch) {
    for (int64_t p = 0, start = 0; p < args.num_parts && start < last; ++p) {
        const KvdPart &part = args.parts[p];
        const int64_t count = divide_up(part.num_outputs, TILE), end = start + count;
        for (int64_t tile = first > start ? first : start; tile < last && tile < end; ++tile) {
            const int64_t in_part = (tile - start) * TILE, column = part.first_output + in_part;
            const int64_t width = part.num_outputs - in_part < TILE ? part.num_outputs - in_part : TILE;
            multiply(args, part, tile - start, row, rows, scratch);
            finish(
                args, part, tile - start, row, rows, column, column + width, scratch,
                args.out + row * args.num_outputs + column, args.num_outputs);
        }
        start = end;
    }
}

static void linear(const void *raw, const KvdBatch &batch, Worker &worker) {
    const auto &args = *static_cast<const KvdLinearArgs *>(raw);
    const int64_t live = live_rows(args.rows, batch);
    if (live <= 0) return;
    const Pieces pieces(args, live, worker.count);
    LinearScratch scratch(worker.scratch);
    if (live >= AMX_ROWS) enter_thread();
    for (int64_t piece; (piece = worker.claim()) < pieces.row_chunks * pieces.pieces_per_chunk;) {
        const int64_t row = piece / pieces.pieces_per_chunk * pieces.row_chunk;
        const int64_t rows = live - row < pieces.row_chunk ? live - row : pieces.row_chunk;
        const int64_t first = piece % pieces.pieces_per_chunk * pieces.tiles_per_piece;
        const int64_t end = first + pieces.tiles_per_piece, last = end < pieces.tiles ? end : pieces.tiles;
        if (args.gated) {
            const int64_t width = args.num_outputs / 2;
            multiply_gated(args, row, rows, first * TILE, last * TILE < width ? last * TILE : width, scratch);
        } else {
            multiply_tiles(args, row, rows, first, last, scratch);
        }
    }
}
