// What a level gives to the runtime, and what the runtime gives to a kernel.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace kvd {

// Code of a level must not leave this file's object: an inline function that the compiler emits once for all objects
// could come from a level that the processor lacks. So everything here is forced inline, and kernels use no templates
// of the standard library.
#define KVD_ALWAYS_INLINE inline __attribute__((always_inline))

// One thread's view of the stage that it works on.
struct Worker {
    int index;
    int count;                      // threads that run the stage
    std::atomic<int64_t> *next;     // shared by all of them; zero when the stage begins
    uint8_t *scratch;               // this thread's own, 64-byte aligned, scratch_bytes long
    size_t scratch_bytes;

    // The next piece of work, 0, 1, 2, …; pieces are computed alike by whoever claims them.
    KVD_ALWAYS_INLINE int64_t claim() const { return next->fetch_add(1, std::memory_order_relaxed); }
};

static KVD_ALWAYS_INLINE int64_t live_rows(int64_t rows, const KvdBatch &batch) {
    if (rows == KVD_LIVE_TOKENS) return batch.num_tokens;
    if (rows == KVD_LIVE_LOGIT_ROWS) return batch.num_logit_rows;
    return rows;
}

constexpr size_t SCRATCH_BYTES = size_t(16) << 20;  // of addresses; only pages that a kernel touches take memory

using Kernel = void (*)(const void *args, const KvdBatch &batch, Worker &worker);

struct LevelTable {
    const char *name;
    Kernel kernels[KVD_NUM_KERNELS];
    void (*enter_thread)();  // called once on every thread of a pool before its first stage; AMX configures here
    int64_t dot_peak_ops;
};

}  // namespace kvd
