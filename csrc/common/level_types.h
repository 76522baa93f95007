// with_level_float_type: with_float_type for kernels that use BF16 instructions for bf16 only. For float and f16,
// avx512_bf16 would duplicate the code of avx512, and neon_bf16 that of neon, so they call that copy instead.
// neon_dotprod does so for all types.
// At the end of a *_cpu.cpp file: with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel, body).
#pragma once

#include "vec.h"

// The level of this file, or the lower level that serves float and f16; looked up in the op's namespace.
#if defined(__AVX512BF16__)
#define INFINI_FLOAT_LEVEL avx512
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define INFINI_FLOAT_LEVEL neon
#else
#define INFINI_FLOAT_LEVEL INFINI_LEVEL
#endif

namespace infini::INFINI_LEVEL {
namespace {

#if defined(__AVX512BF16__) || (defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD))
constexpr bool kOnlyBf16 = true; // all other types call the lower level
#else
constexpr bool kOnlyBf16 = false;
#endif

template <typename Args, typename Body>
inline void with_level_float_type([[maybe_unused]] infiniDtype_t dtype, [[maybe_unused]] const Args &args,
                                  [[maybe_unused]] void (*lower)(const Args &), [[maybe_unused]] const Body &body) {
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    dtype == INFINI_DTYPE_BF16 ? body(bf16{}) : lower(args);
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    lower(args); // this level differs only in products of int8
#else
    with_float_type(dtype, body);
#endif
}

} // namespace
} // namespace infini::INFINI_LEVEL
