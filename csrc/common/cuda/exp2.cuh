// 2^x by the special function unit: relative error 2^-22, enough for results rounded to a half type.
// Results below 2^-126 are 0; infinity and NaN propagate.
#pragma once

#include <cuda_runtime.h>

namespace infini::cuda {

#ifdef INFINI_EMULATION
inline float fast_exp2(float x) {
    return x < -126.0f ? 0.0f : std::exp2(x);
}
#else
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

} // namespace infini::cuda
