// Conversions in CUDA kernels between the storage types (bf16, f16, float, double) and the compute type: float, or
// double for double. Conversions to half types round to nearest even. Integers stay as they are.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "../dtype.h"

#ifdef INFINI_EMULATION
#include <cuda_runtime.h>

#include <cstring>
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace infini::cuda {

// A constant, because device code may not call std::numeric_limits.
template <typename C> constexpr C kInfinity = std::numeric_limits<C>::infinity();

template <typename T> struct ComputeOf {
    using type = std::conditional_t<std::is_integral_v<T>, T, float>;
};
template <> struct ComputeOf<double> {
    using type = double;
};
// The compute type of values stored as T.
template <typename T> using Compute = typename ComputeOf<T>::type;

__device__ __forceinline__ float widen(bf16 v) {
    return __uint_as_float(static_cast<uint32_t>(v.bits) << 16);
}
__device__ __forceinline__ float widen(float v) {
    return v;
}
__device__ __forceinline__ double widen(double v) {
    return v;
}
template <typename T> __device__ __forceinline__ std::enable_if_t<std::is_integral_v<T>, T> widen(T v) {
    return v;
}

#ifdef INFINI_EMULATION

inline float widen(f16 v) {
    _Float16 half;
    std::memcpy(&half, &v, sizeof half);
    return static_cast<float>(half);
}
inline void narrow_to(bf16 *out, float v) {
    const uint32_t bits = __float_as_uint(v);
    out->bits = static_cast<uint16_t>(v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow_to(f16 *out, float v) {
    const auto half = static_cast<_Float16>(v);
    std::memcpy(out, &half, sizeof half);
    out->bits = v != v ? 0x7fff : out->bits; // the GPU's canonical NaN
}

#else

__device__ __forceinline__ float widen(f16 v) {
    return __half2float(__ushort_as_half(v.bits));
}
__device__ __forceinline__ void narrow_to(bf16 *out, float v) {
    out->bits = __bfloat16_as_ushort(__float2bfloat16_rn(v));
}
__device__ __forceinline__ void narrow_to(f16 *out, float v) {
    out->bits = __half_as_ushort(__float2half_rn(v));
}

#endif

__device__ __forceinline__ void narrow_to(float *out, float v) {
    *out = v;
}
__device__ __forceinline__ void narrow_to(double *out, double v) {
    *out = v;
}
template <typename T> __device__ __forceinline__ std::enable_if_t<std::is_integral_v<T>> narrow_to(T *out, T v) {
    *out = v;
}

// Converts a value to storage type T.
template <typename T> __device__ __forceinline__ T narrow(Compute<T> v) {
    T out;
    narrow_to(&out, v);
    return out;
}

// Rounds a value to T and returns it in the compute type.
template <typename T> __device__ __forceinline__ Compute<T> round_to(Compute<T> v) {
    return widen(narrow<T>(v));
}

// On the host: calls body(T{}) with the C++ type of a floating dtype.
template <typename Body> void with_float_type(infiniDtype_t dtype, const Body &body) {
    switch (dtype) {
    case INFINI_DTYPE_BF16:
        return body(bf16{});
    case INFINI_DTYPE_F16:
        return body(f16{});
    case INFINI_DTYPE_F64:
        return body(double{});
    default:
        return body(float{});
    }
}

// As with_float_type, for ops that compute in float and take no double.
template <typename Body> void with_float32_or_half(infiniDtype_t dtype, const Body &body) {
    switch (dtype) {
    case INFINI_DTYPE_BF16:
        return body(bf16{});
    case INFINI_DTYPE_F16:
        return body(f16{});
    default:
        return body(float{});
    }
}

} // namespace infini::cuda
