// Copying whole blocks between pools, and the first tokens of a block, as copy-on-write needs it. Plain memory moves:
// the same at every level.
#include <string.h>

#include "abi.h"

namespace {

constexpr int64_t TOKENS = KVD_BLOCK_TOKENS;

int64_t element_bytes(int32_t type) { return type == KVD_I8 ? 1 : 2; }

// [rows][16 tokens][width bytes]: the first `count` tokens of every row.
void copy_tokens(uint8_t *target, const uint8_t *source, int64_t rows, int64_t width, int64_t count) {
    for (int64_t row = 0; row < rows; ++row)
        memcpy(target + row * TOKENS * width, source + row * TOKENS * width, size_t(count * width));
}

// V: [heads][4 token quads][head_dim][4 tokens].
void copy_values(
    uint8_t *target, const uint8_t *source, int64_t heads, int64_t head_dim, int64_t bytes, int64_t count) {
    const int64_t quad_bytes = head_dim * 4 * bytes, whole = count / 4, rest = count % 4;
    for (int64_t head = 0; head < heads; ++head, target += 4 * quad_bytes, source += 4 * quad_bytes) {
        memcpy(target, source, size_t(whole * quad_bytes));
        for (int64_t channel = 0; rest && channel < head_dim; ++channel) {
            const int64_t at = whole * quad_bytes + channel * 4 * bytes;
            memcpy(target + at, source + at, size_t(rest * bytes));
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void kvd_copy_block(
    uint8_t *pool, int64_t block_bytes, const KvdLayer *layers, int64_t num_layers, int64_t source, int64_t target,
    int64_t num_tokens) {
    for (const KvdLayer *layer = layers; layer != layers + num_layers; ++layer) {
        const int64_t section = reinterpret_cast<const uint8_t *>(layer->pool) - pool;
        const uint8_t *from = pool + source * block_bytes + section;
        uint8_t *to = pool + target * block_bytes + section;
        const int64_t k_bytes = element_bytes(layer->k_type), heads = layer->num_kv_heads;
        copy_tokens(to, from, heads * layer->head_dim / 4, 4 * k_bytes, num_tokens);
        copy_values(
            to + layer->v_offset, from + layer->v_offset, heads, layer->head_dim, element_bytes(layer->v_type),
            num_tokens);
        if (layer->k_type == KVD_I8)
            copy_tokens(to + layer->k_scale_offset, from + layer->k_scale_offset, heads, 2, num_tokens);
        if (layer->v_type == KVD_I8)
            copy_tokens(to + layer->v_scale_offset, from + layer->v_scale_offset, heads, 2, num_tokens);
    }
}

extern "C" __attribute__((visibility("default"))) void kvd_copy_rows(
    const uint8_t *source, const int64_t *source_rows, uint8_t *target, const int64_t *target_rows, int64_t count,
    int64_t width) {
    for (int64_t i = 0; i < count; ++i)
        memcpy(target + target_rows[i] * width, source + source_rows[i] * width, size_t(width));
}
