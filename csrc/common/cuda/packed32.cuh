// Vectors that stay packed in 32-bit registers until they are used. Unpacking small elements after the load paths
// (aligned or not, end of a row) join would serialize the loads. Stores are in PTX, because the compiler splits stores
// of vectors that it has assembled itself.
#pragma once

#include <cstring>

#include "vectors.cuh"

namespace infini::cuda {

// Reinterprets the bytes as another type of equal size.
template <typename To, typename From> __device__ __forceinline__ To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// A Vector<T, kCount> as 32-bit registers, or as itself if its size is no multiple of 4 bytes.
template <typename T, int kCount>
using Packed32 =
    std::conditional_t<sizeof(T) * kCount % 4 == 0, Vector<uint32_t, (sizeof(T) * kCount + 3) / 4>, Vector<T, kCount>>;

#ifdef INFINI_EMULATION

template <typename W> inline W load_vectorized(const void *p) {
    emulation::check_aligned(p, sizeof(W), "a load of a vector");
    W words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
template <typename W> inline void store_vectorized(void *p, const W &words) {
    emulation::check_aligned(p, sizeof(W), "a store of a vector");
    std::memcpy(p, &words, sizeof words);
}

#else

template <typename W> __device__ __forceinline__ W load_vectorized(const void *p) {
    if constexpr (sizeof(W) == 16) {
        const uint4 v = *static_cast<const uint4 *>(p);
        return {v.x, v.y, v.z, v.w};
    } else if constexpr (sizeof(W) == 8) {
        const uint2 v = *static_cast<const uint2 *>(p);
        return {v.x, v.y};
    } else {
        return *static_cast<const W *>(p);
    }
}
template <typename W> __device__ __forceinline__ void store_vectorized(void *p, const W &words) {
    if constexpr (sizeof(W) == 16) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.values[0]), "r"(words.values[1]),
                     "r"(words.values[2]), "r"(words.values[3])
                     : "memory");
    } else if constexpr (sizeof(W) == 8) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(words.values[0]), "r"(words.values[1])
                     : "memory");
    } else {
        *static_cast<W *>(p) = words;
    }
}

#endif

// Loads the vector at p: in one access if `whole` (aligned, complete), else the first `count` elements one by one,
// `step` apart, with `fill` for the rest.
template <typename T, int kCount>
__device__ __forceinline__ Packed32<T, kCount> load_packed32(const T *p, bool whole, int count, T fill = T{},
                                                             int64_t step = 1) {
    if (whole) {
        return load_vectorized<Packed32<T, kCount>>(p);
    }
    Vector<T, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        vector.values[i] = i < count ? p[i * step] : fill;
    }
    return bit_cast<Packed32<T, kCount>>(vector);
}

// Unpacks the elements to the compute type.
template <typename T, int kCount>
__device__ __forceinline__ void widen_packed32(Compute<T> (&out)[kCount], const Packed32<T, kCount> &words) {
    if constexpr (std::is_same_v<T, bf16> && kCount % 2 == 0) { // one instruction each, which nvcc does not emit
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            out[i] = __uint_as_float(words.values[i / 2] << 16);
            out[i + 1] = __uint_as_float(words.values[i / 2] & 0xffff0000u);
        }
    } else {
        widen(out, bit_cast<Vector<T, kCount>>(words));
    }
}

// Packs and stores to global memory; elements from `count` on are not written.
template <typename T, int kCount>
__device__ __forceinline__ void store_packed32(T *p, const Vector<T, kCount> &vector, bool whole, int count) {
    if (whole) {
        return store_vectorized(p, bit_cast<Packed32<T, kCount>>(vector));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < count) {
            p[i] = vector.values[i];
        }
    }
}

} // namespace infini::cuda
