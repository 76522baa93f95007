// The instruction set of the CPU kernels. A *_cpu.cpp file is compiled once for each level of CpuCapability except the
// VNNI-only levels, a *_dot_cpu.cpp file (products of int8) for those too, but not for avx512_bf16, where avx512_vnni
// serves. A *_tiles.cpp file is compiled for the AMX tile registers and for their emulation. The level is chosen once,
// from cpuid or AArch64's auxiliary vector; the environment variable INFINI_CPU_CAPABILITY can only lower it.
// INFINI_CPU_KERNEL(name, Args) declares all compiled copies of a kernel, name(args), and the function that picks one,
// name(context, args), for a KernelTable. INFINI_DOT_KERNEL does so for *_dot_cpu.cpp files, INFINI_TILE_KERNEL for
// tiles.
#pragma once

#include "execution_context.h"
#include "infinirt.h"
#include "status.h"

namespace infini {

#if defined(__aarch64__)
enum CpuCapability : int {
    kNeon = 0,        // Armv8.0-A: NEON with FMA and conversions of f16
    kNeonDotprod = 1, // adds int8 dot products of 4 elements (SDOT)
    kNeonBf16 = 2,    // adds bf16 dot products of 2 elements (BFDOT); such CPUs have I8MM too
    kCpuCapabilities
};
#else
enum CpuCapability : int {
    kBaseline = 0,   // the compiler's default target (SSE2 on x86-64)
    kAvx2 = 1,       // AVX2, FMA, F16C
    kAvx2Vnni = 2,   // adds AVX-VNNI: int8 dot products of 4 elements, 256 bits wide (Alder Lake, Zen 5)
    kAvx512 = 3,     // AVX-512 F, BW, DQ, VL
    kAvx512Vnni = 4, // adds VNNI, 512 bits wide (Cascade Lake, Ice Lake)
    kAvx512Bf16 = 5, // adds BF16 (Cooper Lake, Zen 4)
    kCpuCapabilities
};
#endif

// The level in use. Throws Error if INFINI_CPU_CAPABILITY or INFINI_EMULATE has an unknown value.
inline CpuCapability cpu_capability() {
    const int level = infinirtCpuVectorLevel();
    if (level < 0) {
        throw Error(INFINI_STATUS_BAD_PARAM, infiniGetLastErrorMessage());
    }
    return static_cast<CpuCapability>(level);
}

// The tile registers in use: AMX (level avx512_amx), their emulation, or none.
enum class Tiles : int { kNone = 0, kAmx = 1, kEmulated = 2 };

inline Tiles cpu_tiles() {
    return static_cast<Tiles>(infinirtCpuTiles());
}

} // namespace infini

// `make demo` links the kernels of some levels only; infinirt never chooses a level that is absent. The declarations
// are weak, so that absent kernels link; the files that define kernels see strong ones, so that a second definition is
// an error.
#if defined(INFINI_KERNEL_SOURCE)
#define INFINI_MAYBE_ABSENT
#else
#define INFINI_MAYBE_ABSENT __attribute__((weak))
#endif

#define INFINI_KERNEL_OF(level, name, ...)                                                                             \
    namespace level {                                                                                                  \
    INFINI_MAYBE_ABSENT void name(const __VA_ARGS__ &);                                                                \
    }

#if defined(__x86_64__)
// at_avx2_vnni, ...: the level whose copy runs at avx2_vnni, ...
#define INFINI_X86_KERNEL(at_avx2_vnni, at_avx512_vnni, at_avx512_bf16, name, ...)                                     \
    INFINI_KERNEL_OF(baseline, name, __VA_ARGS__)                                                                      \
    INFINI_KERNEL_OF(avx2, name, __VA_ARGS__)                                                                          \
    INFINI_KERNEL_OF(at_avx2_vnni, name, __VA_ARGS__)                                                                  \
    INFINI_KERNEL_OF(avx512, name, __VA_ARGS__)                                                                        \
    INFINI_KERNEL_OF(at_avx512_vnni, name, __VA_ARGS__)                                                                \
    INFINI_KERNEL_OF(at_avx512_bf16, name, __VA_ARGS__)                                                                \
    inline void name(const ExecutionContext &, const __VA_ARGS__ &args) {                                              \
        static void (*const levels[])(const __VA_ARGS__ &) = {                                                         \
            baseline::name, avx2::name, at_avx2_vnni::name, avx512::name, at_avx512_vnni::name, at_avx512_bf16::name}; \
        levels[cpu_capability()](args);                                                                                \
    }
#define INFINI_CPU_KERNEL(name, ...) INFINI_X86_KERNEL(avx2, avx512, avx512_bf16, name, __VA_ARGS__)
#define INFINI_DOT_KERNEL(name, ...) INFINI_X86_KERNEL(avx2_vnni, avx512_vnni, avx512_vnni, name, __VA_ARGS__)
#elif defined(__aarch64__)
#define INFINI_CPU_KERNEL(name, ...)                                                                                   \
    INFINI_KERNEL_OF(neon, name, __VA_ARGS__)                                                                          \
    INFINI_KERNEL_OF(neon_dotprod, name, __VA_ARGS__)                                                                  \
    INFINI_KERNEL_OF(neon_bf16, name, __VA_ARGS__)                                                                     \
    inline void name(const ExecutionContext &, const __VA_ARGS__ &args) {                                              \
        static void (*const levels[])(const __VA_ARGS__ &) = {neon::name, neon_dotprod::name, neon_bf16::name};        \
        levels[cpu_capability()](args);                                                                                \
    }
#else
#define INFINI_CPU_KERNEL(name, ...)                                                                                   \
    INFINI_KERNEL_OF(baseline, name, __VA_ARGS__)                                                                      \
    inline void name(const ExecutionContext &, const __VA_ARGS__ &args) {                                              \
        baseline::name(args);                                                                                          \
    }
#endif

#if !defined(__x86_64__)
#define INFINI_DOT_KERNEL(name, ...) INFINI_CPU_KERNEL(name, __VA_ARGS__)
#endif

#if defined(__x86_64__)
#define INFINI_TILE_KERNEL(name, ...)                                                                                  \
    INFINI_KERNEL_OF(avx512_amx, name, __VA_ARGS__)                                                                    \
    INFINI_KERNEL_OF(emulated_amx, name, __VA_ARGS__)                                                                  \
    inline void name(const ExecutionContext &, const __VA_ARGS__ &args) {                                              \
        cpu_tiles() == Tiles::kAmx ? avx512_amx::name(args) : emulated_amx::name(args);                                \
    }
#else
#define INFINI_TILE_KERNEL(name, ...)                                                                                  \
    INFINI_KERNEL_OF(emulated_amx, name, __VA_ARGS__)                                                                  \
    inline void name(const ExecutionContext &, const __VA_ARGS__ &args) {                                              \
        emulated_amx::name(args);                                                                                      \
    }
#endif
