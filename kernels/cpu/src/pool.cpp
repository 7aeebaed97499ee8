// Persistent threads that run a list of stages together. The caller is one of them.
//
// Inside a step threads meet at a barrier after every stage: they spin, since a stage lasts microseconds, and yield
// when the wait is long (a neighbour took the core). Between steps they spin for a bounded time and then sleep, so an
// idle server burns nothing.
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "abi.h"
#include "runtime.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { __asm__ volatile("yield"); }
#else
static inline void relax() {}
#endif

namespace {

// Some microseconds: as long as a stage's threads drift apart when each has a core. Longer would hold the core that a
// delayed thread waits for; with one core busy elsewhere 2,000 made steps twice as long as 100.
constexpr int SPINS_BEFORE_YIELD = 100;
using Clock = std::chrono::steady_clock;

struct alignas(64) Padded {
    std::atomic<int64_t> value{0};
};

}  // namespace

struct KvdPool {
    const kvd::LevelTable *level = nullptr;
    int num_threads = 1;
    std::chrono::microseconds spin{0};
    pid_t owner = 0;

    // The step in progress; written before `ticket` rises, read after.
    const KvdStage *stages = nullptr;
    int64_t num_stages = 0;
    const KvdBatch *batch = nullptr;

    Padded next;        // the stage's work counter
    Padded arrived;     // threads at the barrier
    Padded generation;  // barriers passed
    Padded ticket;      // steps begun
    Padded runs;        // steps finished
    std::atomic<bool> stopping{false};
    std::mutex sleep_lock;
    std::condition_variable wake;
    int num_sleeping = 0;  // under sleep_lock
    std::vector<std::thread> threads;
    std::vector<uint8_t *> scratch;

    void barrier() {
        const int64_t passed = generation.value.load(std::memory_order_relaxed);
        if (arrived.value.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
            arrived.value.store(0, std::memory_order_relaxed);
            next.value.store(0, std::memory_order_relaxed);
            generation.value.store(passed + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; generation.value.load(std::memory_order_acquire) == passed; ++spins) {
            if (spins < SPINS_BEFORE_YIELD)
                relax();
            else
                std::this_thread::yield();
        }
    }

    void work(int index) {
        kvd::Worker worker{index, num_threads, &next.value, scratch[index], kvd::SCRATCH_BYTES};
        // Copies: the caller may begin the next step while this thread still leaves the last barrier.
        const KvdStage *const list = stages;
        const int64_t length = num_stages;
        const KvdBatch &sizes = *batch;
        for (int64_t i = 0; i < length; ++i) {
            level->kernels[list[i].kernel](list[i].args, sizes, worker);
            barrier();
        }
    }

    void wait_for_ticket(int64_t seen) {
        const auto until = Clock::now() + spin;
        while (ticket.value.load(std::memory_order_acquire) == seen) {
            for (int i = 0; i < 32; ++i) relax();
            if (Clock::now() < until) continue;
            std::unique_lock<std::mutex> lock(sleep_lock);
            ++num_sleeping;
            wake.wait(lock, [&] { return ticket.value.load(std::memory_order_acquire) != seen; });
            --num_sleeping;
            return;
        }
    }

    void serve(int index) {
        level->enter_thread();
        for (int64_t seen = 0;; ++seen) {
            wait_for_ticket(seen);
            if (stopping.load(std::memory_order_acquire)) return;
            work(index);
        }
    }

    void announce() {
        {
            std::lock_guard<std::mutex> lock(sleep_lock);
            ticket.value.fetch_add(1, std::memory_order_release);
            if (!num_sleeping) return;
        }
        wake.notify_all();
    }
};

#define KVD_EXPORT extern "C" __attribute__((visibility("default")))

KVD_EXPORT void kvd_pool_destroy(KvdPool *pool) {
    if (pool == nullptr || pool->owner != getpid()) return;  // a forked child has no threads to end: its copy leaks
    pool->stopping.store(true, std::memory_order_release);
    pool->announce();
    for (std::thread &thread : pool->threads) thread.join();
    for (uint8_t *memory : pool->scratch) free(memory);
    delete pool;
}

KVD_EXPORT KvdPool *kvd_pool_create(const char *level, int32_t num_threads, int32_t spin_microseconds) {
    const kvd::LevelTable *table = kvd::find_level(level);
    if (table == nullptr || !kvd::level_runs_here(level) || num_threads < 1) return nullptr;
    KvdPool *pool = new (std::nothrow) KvdPool;
    if (pool == nullptr) return nullptr;
    pool->owner = getpid();
    pool->level = table;
    pool->num_threads = num_threads;
    pool->spin = std::chrono::microseconds(spin_microseconds);
    for (int i = 0; i < num_threads; ++i) {
        void *memory = nullptr;
        if (posix_memalign(&memory, 4096, kvd::SCRATCH_BYTES) != 0) memory = nullptr;
        if (memory == nullptr) {
            kvd_pool_destroy(pool);
            return nullptr;
        }
        pool->scratch.push_back(static_cast<uint8_t *>(memory));
    }
    try {
        for (int i = 1; i < num_threads; ++i) pool->threads.emplace_back([pool, i] { pool->serve(i); });
    } catch (const std::system_error &) {  // no more threads for this process
        kvd_pool_destroy(pool);
        return nullptr;
    }
    return pool;
}

KVD_EXPORT int32_t kvd_run(KvdPool *pool, const KvdStage *stages, int64_t num_stages, const KvdBatch *batch) {
    if (pool->owner != getpid()) return -1;  // threads do not survive a fork
    for (int64_t i = 0; i < num_stages; ++i)
        if (stages[i].kernel < 0 || stages[i].kernel >= KVD_NUM_KERNELS) return -2;
    static thread_local const kvd::LevelTable *entered = nullptr;
    if (entered != pool->level) {
        pool->level->enter_thread();
        entered = pool->level;
    }
    pool->stages = stages;
    pool->num_stages = num_stages;
    pool->batch = batch;
    if (pool->num_threads > 1) pool->announce();
    pool->work(0);
    pool->runs.value.fetch_add(1, std::memory_order_relaxed);
    return 0;
}

KVD_EXPORT int64_t kvd_pool_runs(const KvdPool *pool) { return pool->runs.value.load(std::memory_order_relaxed); }
