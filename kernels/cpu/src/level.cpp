// All kernels of one ISA level. Compiled once per level, with that level's flags and -DKVD_LEVEL=name.
#if (defined(__x86_64__) || defined(__i386__)) && !defined(KVD_EMULATE) && !defined(KVD_LEVEL_PORTABLE)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#include "level.h"

#define KVD_CAT_(a, b) a##b
#define KVD_CAT(a, b) KVD_CAT_(a, b)
#define KVD_STR_(a) #a
#define KVD_STR(a) KVD_STR_(a)

namespace kvd {
namespace KVD_LEVEL {
#include "simd.h"
#include "elementary.h"
#include "rows.h"
#include "quantize.h"
#include "linear.h"
#include "kv.h"
#include "attention.h"
#include "sampling.h"
#include "measure.h"
}  // namespace KVD_LEVEL

extern const LevelTable KVD_CAT(level_, KVD_LEVEL);
const LevelTable KVD_CAT(level_, KVD_LEVEL) = {
    KVD_STR(KVD_LEVEL),
    {
        KVD_LEVEL::embed, KVD_LEVEL::rms_norm, KVD_LEVEL::quantize, KVD_LEVEL::linear, KVD_LEVEL::silu_mul,
        KVD_LEVEL::rope_write, KVD_LEVEL::attend, KVD_LEVEL::gather, KVD_LEVEL::sample,
        KVD_LEVEL::read_bytes, KVD_LEVEL::dot_peak,
    },
    KVD_LEVEL::enter_thread,
    KVD_LEVEL::DOT_PEAK_OPS,
};
}  // namespace kvd
