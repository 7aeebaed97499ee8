// What this processor and kernel can run.
#include <string.h>

#include "abi.h"
#include "runtime.h"

#if (defined(__x86_64__) || defined(__i386__)) && !defined(KVD_EMULATE)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct Features {
    bool avx2 = false, avxvnni = false, avx512vnni = false, amx = false;
};

bool bit(unsigned word, int n) { return (word >> n) & 1; }

uint64_t enabled_state() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

// Tile registers are off until a process asks; the kernel may refuse. The permission covers all threads made later
// and the calling one; asking again is harmless.
bool ask_for_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int request = 0x1023, query = 0x1022, tile_data = 18;
    if (syscall(SYS_arch_prctl, request, tile_data) != 0) return false;
    unsigned long mask = 0;
    return syscall(SYS_arch_prctl, query, &mask) == 0 && ((mask >> tile_data) & 1);
#else
    return false;
#endif
}

Features detect() {
    Features found;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool has_xsave = bit(c, 27), fma = bit(c, 12), f16c = bit(c, 29);
    if (!has_xsave) return found;
    const uint64_t state = enabled_state();
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const unsigned max_subleaf = a;
    found.avx2 = ymm && fma && f16c && bit(b, 5) && bit(b, 8);
    const bool avx512 = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);
    found.avx512vnni = found.avx2 && zmm && avx512;
    const bool amx = bit(d, 24) && bit(d, 25);
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avxvnni = found.avx2 && bit(a, 4);
    found.amx = found.avx512vnni && tiles && amx && ask_for_tiles();
    return found;
}

}  // namespace

bool kvd::level_runs_here(const char *name) {
    static const Features found = detect();
    if (!strcmp(name, "portable")) return true;
    if (!strcmp(name, "avx2")) return found.avx2;
    if (!strcmp(name, "avxvnni")) return found.avxvnni;
    if (!strcmp(name, "avx512vnni")) return found.avx512vnni;
    if (!strcmp(name, "amx")) return found.amx;
    return false;
}

#else

bool kvd::level_runs_here(const char *name) {
#if defined(KVD_EMULATE)
    return name != nullptr;
#else
    return !strcmp(name, "portable");
#endif
}

#endif
