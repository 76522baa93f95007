// a / b as a times the special function unit's reciprocal of b: to within 2 ulp, enough for results rounded to a half
// type. The reciprocal is 0 where |b| is above 2^126.
#pragma once

#include <cuda_runtime.h>

namespace infini::cuda {

#ifdef INFINI_EMULATION
inline float fast_divide(float a, float b) {
    return a * (std::fabs(b) > 0x1p126f ? std::copysign(0.0f, b) : 1.0f / b);
}
#else
__device__ __forceinline__ float fast_divide(float a, float b) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    return a * reciprocal;
}
#endif

} // namespace infini::cuda
