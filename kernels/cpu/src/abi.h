// The plain C interface between Python (kvd_kernels.cpu.structs mirrors it field by field) and the kernels.
//
// A step is a list of stages: (kernel number, pointer to that kernel's arguments). All threads of the pool run a stage
// together, then meet at a barrier. Arguments point at buffers that live as long as the program; live sizes are
// read from the batch, so the same list serves every step.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVD_ABI_VERSION 4
#define KVD_BLOCK_TOKENS 16
#define KVD_SPLIT_SLOTS 256

// A row count in arguments: a number, or one of these, looked up in the batch when the stage runs.
enum KvdLive { KVD_LIVE_TOKENS = -1, KVD_LIVE_LOGIT_ROWS = -2 };

enum KvdType { KVD_F32 = 0, KVD_F16 = 1, KVD_BF16 = 2, KVD_I8 = 3, KVD_U4 = 4 };

enum KvdKernel {
    KVD_EMBED = 0,
    KVD_RMS_NORM,
    KVD_QUANTIZE,  // optional norm in front
    KVD_LINEAR,
    KVD_SILU_MUL,
    KVD_ROPE_WRITE,
    KVD_ATTEND,
    KVD_GATHER,
    KVD_SAMPLE,
    KVD_READ_BYTES,  // limits of the machine, for benchmarks
    KVD_DOT_PEAK,
    KVD_NUM_KERNELS
};

typedef struct {
    const int32_t *block_tables;     // [max_seqs, table_stride]
    const int32_t *first_positions;  // [max_seqs, table_stride]
    const int32_t *num_slots;        // [max_seqs]
    const int64_t *write_slots;      // [max_tokens]
    int64_t table_stride;
} KvdGroupTables;

typedef struct {
    const int64_t *token_ids;
    const int32_t *positions;
    const int32_t *query_starts;
    const int64_t *logit_rows;
    const KvdGroupTables *groups;
    int32_t num_tokens, num_seqs, num_logit_rows, num_groups;
} KvdBatch;

typedef struct {
    int32_t kernel;  // KvdKernel
    int32_t reserved;
    const void *args;
} KvdStage;

typedef struct {  // out[t] = table[token_ids[t]]
    int64_t rows;
    const void *values;     // KvdType `type` [vocab, width]; U4: two channels a byte, low nibble first
    const uint16_t *scales;   // float16 [vocab, width / group] for I8 and U4
    const uint16_t *offsets;  // float16, U4 alone
    float *out;               // [.., width]
    int64_t width, group, vocab;
    int32_t type;
} KvdEmbedArgs;

typedef struct {  // out = x / sqrt(mean(x^2) + eps) * weight; out may be x
    int64_t rows;
    const float *x;
    const float *weight;
    float *out;
    int64_t width;
    float eps;
} KvdNormArgs;

// Activations of a linear in a8: int8 codes per row and group of `length` channels, with scale and sum of codes.
// A weight group is cut into `cuts` activation groups of `length` channels, the last one padded with zeros.
typedef struct {
    int8_t *codes;   // [rows, groups, length rounded up to 32], row stride `stride` bytes (a multiple of 64)
    float *scales;   // [rows, groups]
    float *sums;     // [rows, groups]: of the codes, whole numbers
    int64_t stride, groups;
    int64_t weight_group, cuts, length;
} KvdQuantized;

typedef struct {
    int64_t rows;
    const float *x;            // [.., width]
    const float *norm_weight;  // float32 [width], or NULL: no norm
    int64_t width;
    float eps;
    KvdQuantized out;
} KvdQuantizeArgs;

// One or several neighbouring matrices of equal form, packed by kvd_pack_part.
typedef struct {
    int32_t type;          // KVD_U4, KVD_I8, or a 16/32-bit float type
    int32_t quantized;     // index into KvdLinearArgs.inputs for U4 and I8
    const uint8_t *packed;
    int64_t num_outputs;
    int64_t first_output;  // column of `out` where this part begins
} KvdPart;

typedef struct {
    int64_t rows;
    const float *x;              // [.., num_inputs]: what float parts read
    const KvdQuantized *inputs;  // [num_inputs_forms]
    const KvdPart *parts;
    const float *bias;           // [num_outputs] or NULL
    const float *residual;       // [.., num_outputs] or NULL; may be out
    float *out;                  // [.., num_outputs], or [.., num_outputs / 2] when gated
    int64_t num_inputs, num_outputs, num_parts;
    int32_t gated;               // 1: outputs are gate, then up; out = silu(gate) * up
} KvdLinearArgs;

typedef struct {
    int64_t rows;
    const float *gate_up;  // [.., 2 width]
    float *out;            // [.., width]
    int64_t width;
} KvdSiluArgs;

// One layer of the cache: kvd_kernels.kv_format says how its section is laid out.
typedef struct {
    uint8_t *pool;              // first byte of this layer's section in block 0
    int64_t block_bytes;        // from a block to the next
    int64_t v_offset, k_scale_offset, v_scale_offset;  // from the start of the section
    int64_t num_kv_heads, head_dim, rotation_size;     // rotation_size 0: K is not rotated
    int32_t k_type, v_type;     // KVD_I8, KVD_F16, KVD_BF16
    int32_t group_id, window;
} KvdLayer;

typedef struct {
    const KvdLayer *layer;
    const float *qkv;        // [.., (H + 2 KVH) D]
    const float *cos, *sin;  // [max_positions, half]
    float *q_out;            // [.., H D]
    int64_t num_heads, half; // half: rotary_dim / 2
} KvdRopeArgs;

typedef struct {
    const KvdLayer *layer;
    const float *q;
    const float *cos, *sin;
    const float *key_bias;    // [KVH, D] or NULL
    float *out;               // [.., H D]
    float *block_mass;        // [max_seqs, mass_stride] or NULL
    float *partials;          // scratch of split decoding, partial_capacity floats; see attention.h
    int64_t partial_capacity, mass_stride, num_heads, half, max_positions;
    float scale;
} KvdAttendArgs;

typedef struct {  // out[r] = x[logit_rows[r]]
    const float *x;
    float *out;
    int64_t width;
} KvdGatherArgs;

// Ragged inputs of sampling: row r has counts[r] entries at ids[r], values[r]; NULL pointer: none in any row.
typedef struct {
    const int64_t *const *ids;
    const void *const *values;  // float for a bias, int64 for counts
    const int64_t *counts;
} KvdRagged;

typedef struct {
    int64_t rows;          // rows of logits to sample, at most num_logit_rows; 0: none
    const float *logits;   // [.., vocab]
    int64_t vocab;
    const float *temperature, *top_p, *min_p, *presence, *frequency, *repetition;
    const int64_t *top_k, *seeds, *positions, *num_logprobs;
    KvdRagged prompt, output, bias, banned;
    const uint32_t *const *masks;  // NULL, or per row NULL or a bit per token, 1: it may be sampled
    int64_t *token_ids;       // out [rows]; -1: the row is not finite
    double *logprobs;         // out [rows]: of the chosen token, where num_logprobs >= 0
    int64_t *top_ids;         // out [rows, top_stride], best first
    double *top_logprobs;     // out [rows, top_stride]
    int64_t top_stride;
} KvdSampleArgs;

typedef struct {
    const uint8_t *bytes;
    int64_t count;   // bytes to read, or rounds of dot products
    int64_t *sink;   // [threads]
} KvdMeasureArgs;

// ---- functions ----
int32_t kvd_abi_version(void);
// Names of the levels in this library, lowest first, separated by blanks.
const char *kvd_levels(void);
// 1: this processor and kernel can run that level; 0: it cannot, or the library lacks it.
int32_t kvd_level_usable(const char *name);

typedef struct KvdPool KvdPool;
// A pool of num_threads threads (the caller is one of them) that runs kernels of one level; NULL when it cannot be.
KvdPool *kvd_pool_create(const char *level, int32_t num_threads, int32_t spin_microseconds);
void kvd_pool_destroy(KvdPool *pool);
// Run all stages; the caller takes part. One call at a time per pool. 0, or a negative error number.
int32_t kvd_run(KvdPool *pool, const KvdStage *stages, int64_t num_stages, const KvdBatch *batch);
// Steps run since the pool was made; tests count calls with it.
int64_t kvd_pool_runs(const KvdPool *pool);

// Integer operations (multiplications and additions) of one round of KVD_DOT_PEAK on one thread of that level.
int64_t kvd_dot_peak_ops(const char *level);

// Bytes that kvd_pack_part fills, for a matrix [num_outputs, num_inputs] with weight groups of `group` channels.
int64_t kvd_packed_bytes(int32_t type, int64_t num_outputs, int64_t num_inputs, int64_t group);
// Pack outputs of one matrix into `packed` from output `first` of its part on (a part may join several matrices:
// num_outputs is the part's total, `count` those of this matrix). Source as in kvd_kernels.weights.
int32_t kvd_pack_part(
    int32_t type, const void *codes, const uint16_t *scales, const uint16_t *offsets, int64_t first, int64_t count,
    int64_t num_outputs, int64_t num_inputs, int64_t group, uint8_t *packed);

void kvd_copy_block(
    uint8_t *pool, int64_t block_bytes, const KvdLayer *layers, int64_t num_layers, int64_t source, int64_t target,
    int64_t num_tokens);

// target[target_rows[i]] = source[source_rows[i]] for i = 0 … count - 1, in that order; rows of `width` bytes.
void kvd_copy_rows(
    const uint8_t *source, const int64_t *source_rows, uint8_t *target, const int64_t *target_rows, int64_t count,
    int64_t width);

#ifdef __cplusplus
}
#endif
