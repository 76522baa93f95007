// Chooses the instruction set of the CPU kernels: cpuid at load, lowered by INFINI_CPU_CAPABILITY or by a call.
// It is chosen once for the process, by libinfinirt, whichever library the kernels are in.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cpu_capability.h"
#include "guard.h"

namespace infini {

namespace {

constexpr const char *kNames[kCpuCapabilities] = {"baseline", "avx2", "avx512", "avx512_bf16"};

CpuCapability detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) {
        return kBaseline;
    }
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) {
        return kAvx2;
    }
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
        return kAvx512Bf16;
    }
    return kAvx512;
#else
    return kBaseline;
#endif
}

CpuCapability highest() {
    static const CpuCapability value = detect();
    return value;
}

CpuCapability parse(const char *name) {
    for (int i = 0; i < kCpuCapabilities; ++i) {
        if (std::strcmp(name, kNames[i]) == 0) {
            return static_cast<CpuCapability>(i);
        }
    }
    throw Error(INFINI_STATUS_BAD_PARAM, message("infini: INFINI_CPU_CAPABILITY must be baseline, avx2, avx512 or "
                                                 "avx512_bf16, got '",
                                                 name, "'"));
}

// The environment names the wish; a level above the machine's is an error where it is set by hand, and lowered here,
// so that one setting serves a fleet of different machines.
CpuCapability initial() {
    const char *wish = std::getenv("INFINI_CPU_CAPABILITY");
    if (wish == nullptr || *wish == '\0') {
        return highest();
    }
    const CpuCapability wanted = parse(wish);
    return wanted < highest() ? wanted : highest();
}

std::atomic<int> in_use{-1};

} // namespace

} // namespace infini

using namespace infini;

int infinirtCpuCapabilityLevel(void) {
    int level = in_use.load(std::memory_order_relaxed);
    if (level < 0) {
        guarded([&] { level = initial(); });
        in_use.store(level, std::memory_order_relaxed);
    }
    return level;
}

const char *infinirtCpuCapability(void) {
    const int level = infinirtCpuCapabilityLevel();
    return level < 0 ? nullptr : kNames[level];
}

const char *infinirtCpuHighestCapability(void) {
    return kNames[highest()];
}

infiniStatus_t infinirtCpuSetCapability(const char *name) {
    return guarded([&] {
        not_null("infinirtCpuSetCapability", "name", name);
        const CpuCapability wanted = parse(name);
        if (wanted > highest()) {
            throw Error(INFINI_STATUS_BAD_PARAM, message("infini: the CPU capability must be at most ",
                                                         kNames[highest()], " on this machine, got ", name));
        }
        in_use.store(wanted, std::memory_order_relaxed);
    });
}
