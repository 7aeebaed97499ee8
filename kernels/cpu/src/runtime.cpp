// The levels of this library and what Python asks about them; packing of weights stands here too, since it is the
// same at every level.
#include <string.h>

#include "abi.h"
#include "pack.h"
#include "runtime.h"

namespace kvd {

#define KVD_DECLARE(name) extern const LevelTable level_##name;
KVD_DECLARE(portable)
#if KVD_HAVE_AVX2
KVD_DECLARE(avx2)
#endif
#if KVD_HAVE_AVXVNNI
KVD_DECLARE(avxvnni)
#endif
#if KVD_HAVE_AVX512VNNI
KVD_DECLARE(avx512vnni)
#endif
#if KVD_HAVE_AMX
KVD_DECLARE(amx)
#endif

static const LevelTable *const LEVELS[] = {
    &level_portable,
#if KVD_HAVE_AVX2
    &level_avx2,
#endif
#if KVD_HAVE_AVXVNNI
    &level_avxvnni,
#endif
#if KVD_HAVE_AVX512VNNI
    &level_avx512vnni,
#endif
#if KVD_HAVE_AMX
    &level_amx,
#endif
};

const LevelTable *find_level(const char *name) {
    for (const LevelTable *level : LEVELS)
        if (!strcmp(level->name, name)) return level;
    return nullptr;
}

}  // namespace kvd

#define KVD_EXPORT extern "C" __attribute__((visibility("default")))

KVD_EXPORT int32_t kvd_abi_version(void) { return KVD_ABI_VERSION; }

KVD_EXPORT const char *kvd_levels(void) {
    return "portable"
#if KVD_HAVE_AVX2
           " avx2"
#endif
#if KVD_HAVE_AVXVNNI
           " avxvnni"
#endif
#if KVD_HAVE_AVX512VNNI
           " avx512vnni"
#endif
#if KVD_HAVE_AMX
           " amx"
#endif
        ;
}

KVD_EXPORT int32_t kvd_level_usable(const char *name) {
    return kvd::find_level(name) != nullptr && kvd::level_runs_here(name);
}

KVD_EXPORT int64_t kvd_packed_bytes(int32_t type, int64_t num_outputs, int64_t num_inputs, int64_t group) {
    return kvd::packed_bytes(type, num_outputs, num_inputs, group);
}

KVD_EXPORT int32_t kvd_pack_part(
    int32_t type, const void *codes, const uint16_t *scales, const uint16_t *offsets, int64_t first, int64_t count,
    int64_t num_outputs, int64_t num_inputs, int64_t group, uint8_t *packed) {
    return kvd::pack_part(type, codes, scales, offsets, first, count, num_outputs, num_inputs, group, packed);
}

KVD_EXPORT int64_t kvd_dot_peak_ops(const char *name) {
    const kvd::LevelTable *level = kvd::find_level(name);
    return level == nullptr ? 0 : level->dot_peak_ops;
}
