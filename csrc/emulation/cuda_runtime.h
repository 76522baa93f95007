// CUDA emulated on the host, for tests: the C++ compiler compiles the *.cu files, with this folder before the toolkit's
// headers. This header has the keywords, built-in variables, barriers, shuffles and intrinsics; the runtime's functions
// are in cuda_runtime_api.h. A kernel's threads are fibers of one thread that run in a shuffled order: see emulator.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda_runtime_api.h"
#include "emulator.h"
#include "tensor_cores.h"

#define __host__
#define __device__
#define __global__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static const
#define __align__(n) alignas(n)
#define threadIdx (::infini::emulation::fiber->thread)
#define blockIdx (::infini::emulation::block_index)
#define blockDim (::infini::emulation::block_dim)
#define gridDim (::infini::emulation::grid_dim)

namespace infini::emulation {

template <typename To, typename From> inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <typename T> inline T from_lane(unsigned mask, T value, int lane) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    const uint64_t found = exchange(mask, bits, lane);
    std::memcpy(&value, &found, sizeof value);
    return value;
}

} // namespace infini::emulation

struct float2 {
    float x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}

// ---- barriers and shuffles ----

inline void __syncthreads() {
    infini::emulation::sync_block();
}
inline int __syncthreads_or(int predicate) {
    return infini::emulation::sync_block_or(predicate);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    infini::emulation::exchange(mask, 0, -1);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = infini::emulation::lane();
    return infini::emulation::from_lane(mask, value, lane / width * width + (source & (width - 1)));
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    const int lane = infini::emulation::lane(), other = lane ^ lane_mask;
    return infini::emulation::from_lane(mask, value, other / width == lane / width ? other : lane);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = infini::emulation::lane(), other = lane - static_cast<int>(delta);
    return infini::emulation::from_lane(mask, value, other >= lane / width * width ? other : lane);
}
template <typename T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = infini::emulation::lane(), other = lane + static_cast<int>(delta);
    return infini::emulation::from_lane(mask, value, other < (lane / width + 1) * width ? other : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return infini::emulation::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
    return __ballot_sync(mask, !predicate) == 0;
}

// ---- atomics: only one fiber runs at a time ----

template <typename T> inline T atomicAdd(T *p, T v) {
    const T old = *p;
    *p = static_cast<T>(old + v);
    return old;
}
template <typename T> inline T atomicMax(T *p, T v) {
    const T old = *p;
    *p = old > v ? old : v;
    return old;
}
template <typename T> inline T atomicMin(T *p, T v) {
    const T old = *p;
    *p = old < v ? old : v;
    return old;
}
template <typename T> inline T atomicOr(T *p, T v) {
    const T old = *p;
    *p = old | v;
    return old;
}
template <typename T> inline T atomicExch(T *p, T v) {
    const T old = *p;
    *p = v;
    return old;
}
template <typename T> inline T atomicCAS(T *p, T expected, T v) {
    const T old = *p;
    if (old == expected) {
        *p = v;
    }
    return old;
}

// ---- loads and stores with cache hints ----

template <typename T> inline T __ldg(const T *p) {
    return *p;
}
template <typename T> inline T __ldcs(const T *p) {
    return *p;
}
template <typename T> inline T __ldcg(const T *p) {
    return *p;
}
template <typename T> inline void __stcs(T *p, T v) {
    *p = v;
}
template <typename T> inline void __stcg(T *p, T v) {
    *p = v;
}

// ---- arithmetic ----

using std::max;
using std::min;

inline float __uint_as_float(unsigned v) {
    return infini::emulation::bit_cast<float>(v);
}
inline unsigned __float_as_uint(float v) {
    return infini::emulation::bit_cast<unsigned>(v);
}
inline float __int_as_float(int v) {
    return infini::emulation::bit_cast<float>(v);
}
inline int __float_as_int(float v) {
    return infini::emulation::bit_cast<int>(v);
}
inline float rsqrtf(float v) {
    return 1.0f / std::sqrt(v);
}
inline double rsqrt(double v) {
    return 1.0 / std::sqrt(v);
}
inline float __expf(float v) {
    return std::exp(v);
}
inline float __logf(float v) {
    return std::log(v);
}
inline float __log2f(float v) {
    return std::log2(v);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __frcp_rn(float v) {
    return 1.0f / v;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return std::fma(a, b, c);
}
inline float __saturatef(float v) {
    return v != v ? 0.0f : std::min(1.0f, std::max(0.0f, v));
}
inline int __float2int_rn(float v) { // saturates; NaN gives 0
    return v != v               ? 0
           : v >= 2147483648.0f ? INT32_MAX
           : v < -2147483648.0f ? INT32_MIN
                                : static_cast<int>(std::nearbyint(v));
}
inline unsigned long long __double2ull_rn(double v) { // saturates; NaN gives 0
    return !(v > 0) ? 0 : v >= 18446744073709551616.0 ? UINT64_MAX : static_cast<uint64_t>(std::nearbyint(v));
}
inline unsigned long long __float2ull_rn(float v) {
    return __double2ull_rn(v);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(unsigned v) {
    return __builtin_popcount(v);
}
inline int __ffs(int v) {
    return __builtin_ffs(v);
}
inline int __clz(int v) {
    return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v));
}
inline unsigned __brev(unsigned v) {
    unsigned out = 0;
    for (int i = 0; i < 32; ++i) {
        out |= (v >> i & 1) << (31 - i);
    }
    return out;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        out |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    }
    return out;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) {
        c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    }
    return c;
}
