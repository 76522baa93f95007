// Chooses the instruction set of the CPU kernels, from cpuid or from Linux's description of an AArch64 CPU, lowered by
// INFINI_CPU_CAPABILITY or by a call.
// libinfinirt chooses once for the process, for kernels of all libraries. INFINI_EMULATE=amx adds the level avx512_amx
// on any machine: its tile kernels compute in plain C++, everything else as the machine allows.
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "cpu_capability.h"
#include "guard.h"

namespace infini {

namespace {

constexpr int kAmx = kCpuCapabilities; // above all vector levels
#if defined(__aarch64__)
constexpr std::array kNames = {"neon", "neon_dotprod", "neon_bf16", "avx512_amx"}; // the last one emulated only
#else
constexpr std::array kNames = {"baseline", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx"};
#endif
static_assert(kNames.size() == kAmx + 1);

constexpr unsigned bit(int level) {
    return 1u << level;
}

// A partial build, `make demo`, has the kernels of some levels only and names them in this macro.
#ifdef INFINI_BUILT_LEVELS
constexpr bool kIsWhole = false;
constexpr const char *kBuilt = INFINI_BUILT_LEVELS;
#else
constexpr bool kIsWhole = true;
constexpr const char *kBuilt = "";
#endif

bool is_built(const char *name) {
    return kIsWhole || message(" ", kBuilt, " ").find(message(" ", name, " ")) != std::string::npos;
}

unsigned built_levels() {
    unsigned levels = 0;
    for (int level = 0; level <= kAmx; ++level) {
        levels |= is_built(kNames[level]) ? bit(level) : 0;
    }
    return levels;
}

#if defined(__x86_64__)
bool has_avx_vnni() {
    unsigned most = 0, eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &most, &ebx, &ecx, &edx) && most >= 1 &&
           __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4) != 0;
}
#endif

// The vector levels that the CPU has, one bit each. A level below the highest may be missing: Cascade Lake and Zen 4
// have AVX-512 VNNI, but not AVX-VNNI.
unsigned detect_vectors() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned levels = bit(kBaseline);
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) {
        return levels;
    }
    levels |= bit(kAvx2) | (has_avx_vnni() ? bit(kAvx2Vnni) : 0);
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) {
        return levels;
    }
    levels |= bit(kAvx512);
    if (__builtin_cpu_supports("avx512vnni")) {
        levels |= bit(kAvx512Vnni) | (__builtin_cpu_supports("avx512bf16") ? bit(kAvx512Bf16) : 0);
    }
    return levels;
#elif defined(__aarch64__)
    // Bits of the kernel's interface, because older headers lack the names. Compilers assume Armv8.2-A's other
    // instructions too; of those they emit only the atomic ones.
    constexpr unsigned long kAtomicsBit = 1ul << 8, kDotprodBit = 1ul << 20, kDotprodLevel = kAtomicsBit | kDotprodBit;
    constexpr unsigned long kInt8MatrixBit = 1ul << 13, kBf16Bit = 1ul << 14; // of the second word (AT_HWCAP2)
    if ((getauxval(AT_HWCAP) & kDotprodLevel) != kDotprodLevel) {
        return bit(kNeon);
    }
    constexpr unsigned long kBf16Level = kInt8MatrixBit | kBf16Bit;
    const bool has_bf16 = (getauxval(AT_HWCAP2) & kBf16Level) == kBf16Level;
    return bit(kNeon) | bit(kNeonDotprod) | (has_bf16 ? bit(kNeonBf16) : 0);
#else
    return bit(kBaseline);
#endif
}

bool has_vectors(int level) {
    static const unsigned levels = detect_vectors() & built_levels();
    return (levels & bit(level)) != 0;
}

// The highest vector level of the machine that is at most `level`. A full build has the lowest level on every machine.
int vectors_up_to(int level) {
    int found = level;
    while (found >= 0 && !has_vectors(found)) {
        --found;
    }
    if (found < 0) {
        throw Error(INFINI_STATUS_NOT_IMPLEMENTED,
                    message("infini: this build has only the kernels that `make demo` runs (", kBuilt,
                            "), and none that ",
                            level >= kAmx ? "this CPU takes" : message("is at most ", kNames[level]),
                            ": `make build` builds all"));
    }
    return found;
}

int highest_vectors() {
    return vectors_up_to(kAmx);
}

// Why this process cannot use tile registers; empty if it can. Asks the kernel for permission.
std::string tiles_refused() {
#if defined(__x86_64__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kAmxBits = 1u << 22 | 1u << 24 | 1u << 25; // AMX-BF16, AMX-TILE, AMX-INT8
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kAmxBits) != kAmxBits || !has_vectors(kAvx512Bf16)) {
        return "the CPU has no AMX";
    }
    if (!is_built("avx512_amx")) {
        return message("this build has no kernels for AMX, only those for ", kBuilt, ": `make build` builds all");
    }
    constexpr unsigned kOsxsave = 1u << 27, kTileState = 3u << 17; // of XCR0: configuration and data
    __get_cpuid(1, &eax, &ebx, &ecx, &edx);
    unsigned low = 0, high = 0;
    if ((ecx & kOsxsave) != 0) {
        asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    }
    if ((low & kTileState) != kTileState) {
        return "the operating system does not save tile registers (XCR0)";
    }
    constexpr long kRequestPermission = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
        return message("the kernel refused tile registers (arch_prctl: ", std::strerror(errno), ")");
    }
    return "";
#else
    return "the CPU has no AMX";
#endif
}

const std::string &why_no_tiles() {
    static const std::string reason = tiles_refused();
    return reason;
}

bool emulates_tiles() {
    static const char *const wish = std::getenv("INFINI_EMULATE");
    if (wish == nullptr || *wish == '\0') {
        return false;
    }
    if (std::strcmp(wish, "amx") != 0) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message("infini: INFINI_EMULATE must be amx or not be set, got '", wish, "'"));
    }
    if (!is_built("emulated_amx")) {
        throw Error(INFINI_STATUS_NOT_IMPLEMENTED,
                    message("infini: INFINI_EMULATE=amx needs kernels that this build has not, only those for ", kBuilt,
                            ": `make build` builds all"));
    }
    return true;
}

int highest() {
    return emulates_tiles() || why_no_tiles().empty() ? kAmx : highest_vectors();
}

// Emulated tiles need no AVX-512, so a level below them may be missing too.
bool has(int level) {
    return level == kAmx ? highest() == kAmx : has_vectors(level);
}

int parse(const char *name) {
    std::string all;
    for (int i = 0; i <= kAmx; ++i) {
        if (std::strcmp(name, kNames[i]) == 0) {
            return i;
        }
        all += message(i == 0 ? "" : i == kAmx ? " or " : ", ", kNames[i]);
    }
    throw Error(INFINI_STATUS_BAD_PARAM, message("infini: INFINI_CPU_CAPABILITY must be ", all, ", got '", name, "'"));
}

// The level at start. Setting a level by a call fails if the machine lacks it; the environment variable is lowered to
// the next level that the machine has, so that one setting serves a fleet of different machines.
int initial() {
    const int most = highest();
    const char *wish = std::getenv("INFINI_CPU_CAPABILITY");
    const int wanted = wish == nullptr || *wish == '\0' ? most : parse(wish);
    return has(wanted) ? wanted : vectors_up_to(wanted);
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

int infinirtCpuVectorLevel(void) {
    const int level = infinirtCpuCapabilityLevel();
    return level == kAmx ? highest_vectors() : level;
}

int infinirtCpuTiles(void) {
    if (infinirtCpuCapabilityLevel() != kAmx) {
        return static_cast<int>(Tiles::kNone);
    }
    return static_cast<int>(emulates_tiles() ? Tiles::kEmulated : Tiles::kAmx);
}

const char *infinirtCpuTilesRefused(void) {
    const char *reason = nullptr;
    guarded([&] { reason = emulates_tiles() ? "emulated (INFINI_EMULATE=amx)" : why_no_tiles().c_str(); });
    return reason;
}

const char *infinirtCpuCapability(void) {
    const int level = infinirtCpuCapabilityLevel();
    return level < 0 ? nullptr : kNames[level];
}

const char *infinirtCpuHighestCapability(void) {
    const char *name = nullptr;
    guarded([&] { name = kNames[highest()]; });
    return name;
}

int infinirtCpuHasCapability(const char *name) {
    int found = -1;
    guarded([&] {
        not_null("infinirtCpuHasCapability", "name", name);
        found = has(parse(name)) ? 1 : 0;
    });
    return found;
}

infiniStatus_t infinirtCpuSetCapability(const char *name) {
    return guarded([&] {
        not_null("infinirtCpuSetCapability", "name", name);
        const int wanted = parse(name);
        if (!has(wanted)) {
            std::string all;
            for (int i = 0; i <= kAmx; ++i) {
                all += has(i) ? message(all.empty() ? "" : ", ", kNames[i]) : "";
            }
            throw Error(INFINI_STATUS_BAD_PARAM,
                        message("infini: the CPU capability must be one of ", all, " on this machine",
                                kIsWhole ? "" : " in this build (`make build` builds all)", ", got ", name));
        }
        in_use.store(wanted, std::memory_order_relaxed);
    });
}
