// The interface of vec.h for CUDA, with one lane: a VecF is one float, so that formulas.h serves the CPU and the GPU.
// Results that are rounded to a half type use approximations of that precision.
#pragma once

#include <cmath>
#include <type_traits>

#include "cuda/exp2.cuh"
#include "cuda/fast_divide.cuh"

#define INFINI_LEVEL nvidia
#define INFINI_FORMULA __device__ __forceinline__

namespace infini::INFINI_LEVEL {
namespace {

using VecF = float;

INFINI_FORMULA float splat(float x) {
    return x;
}

INFINI_FORMULA float fma(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}

INFINI_FORMULA float select(bool mask, float yes, float no) {
    return mask ? yes : no;
}

// If either argument is NaN, returns the second one.
INFINI_FORMULA float max(float a, float b) {
    return a > b ? a : b;
}

INFINI_FORMULA float min(float a, float b) {
    return a < b ? a : b;
}

INFINI_FORMULA float abs(float x) {
    return fabsf(x);
}

INFINI_FORMULA float leading_bits(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xfffff000u);
}

INFINI_FORMULA float exp(float x) {
    return expf(x);
}

// As in vec.h; x <= 0.
INFINI_FORMULA float exp_and_rest(float x, float &rest) {
    const float clamped = max(-105.0f, x);
    const float t = __fmul_rn(clamped, 1.44269504f); // not fused into t - n, because rest_of_t is its rounding error
    const float n = rintf(t), f = t - n;
    const float rest_of_t = fma(clamped, 1.92596303e-8f, fma(clamped, 1.44269504f, -t));
    float p = 1.5353362e-4f;
    p = fma(p, f, 1.3398875e-3f);
    p = fma(p, f, 9.6184369e-3f);
    p = fma(p, f, 5.5503324e-2f);
    p = fma(p, f, 2.4022648e-1f);
    p = fma(p, f, 6.9314718e-1f);
    const float e = fma(p, f, 1.0f);
    rest = ldexpf(fma(rest_of_t, 6.9314718e-1f * e, fma(p, f, 1.0f - e)), static_cast<int>(n));
    return ldexpf(e, static_cast<int>(n));
}

template <typename T> INFINI_FORMULA float exp_for(float x) {
    return std::is_same_v<T, float> ? expf(x) : cuda::fast_exp2(x * 1.44269504f);
}

template <typename T> INFINI_FORMULA float quotient_for(float a, float b) {
    return std::is_same_v<T, float> ? a / b : cuda::fast_divide(a, b);
}

template <typename T> INFINI_FORMULA float tanh_for(float x) {
    return tanhf(x);
}

} // namespace
} // namespace infini::INFINI_LEVEL
