// Fast functions for results that are rounded to a half type: a few units in the last place of float away, with what is
// below float's normal range taken for 0. In PTX; emulated by the exact functions with the same flushing.
#pragma once

#include <cuda_runtime.h>

namespace infini::cuda {

#ifdef INFINI_EMULATION
inline float flushed(float x) {
    return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
#endif

// 2^x; relative error 2^-22.
__device__ __forceinline__ float approximate_exp2(float x) {
#ifdef INFINI_EMULATION
    return flushed(std::exp2(flushed(x)));
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// e^x; relative error 2^-22 + 2^-24 |x|.
__device__ __forceinline__ float approximate_exp(float x) {
    return approximate_exp2(x * 1.44269504f);
}

// a / b to within 2 ulp, as a times the reciprocal, which is 0 where |b| is above 2^126.
__device__ __forceinline__ float approximate_quotient(float a, float b) {
#ifdef INFINI_EMULATION
    return a * flushed(1.0f / flushed(b));
#else
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    return a * reciprocal;
#endif
}

} // namespace infini::cuda
