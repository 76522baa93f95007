// Vectors as words of registers: what is loaded stays like this until it is computed with. Were small elements taken
// apart where the ways of loading a vector meet (aligned or not, the last one of a row), each vector would be waited for
// before the next is asked for. Stores are in PTX, for the compiler splits those of vectors it has put together itself.
#pragma once

#include <cstring>

#include "vectors.cuh"

namespace infini::cuda {

// The same bytes as another type of the same size.
template <typename To, typename From> __device__ __forceinline__ To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// A Vector<T, kCount> in words of 4 bytes, or as it is where it is no number of them.
template <typename T, int kCount>
using Words =
    std::conditional_t<sizeof(T) * kCount % 4 == 0, Vector<uint32_t, (sizeof(T) * kCount + 3) / 4>, Vector<T, kCount>>;

#ifdef INFINI_EMULATION

template <typename W> inline W load_at_once(const void *p) {
    emulation::check_aligned(p, sizeof(W), "a load of a vector");
    W words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
template <typename W> inline void store_at_once(void *p, const W &words) {
    emulation::check_aligned(p, sizeof(W), "a store of a vector");
    std::memcpy(p, &words, sizeof words);
}

#else

template <typename W> __device__ __forceinline__ W load_at_once(const void *p) {
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
template <typename W> __device__ __forceinline__ void store_at_once(void *p, const W &words) {
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

// The elements from p on, as one access if `whole` (aligned, all there), else the first `count` one by one, `step` apart,
// and `fill` for the rest.
template <typename T, int kCount>
__device__ __forceinline__ Words<T, kCount> load_words(const T *p, bool whole, int count, T fill = T{},
                                                       int64_t step = 1) {
    if (whole) {
        return load_at_once<Words<T, kCount>>(p);
    }
    Vector<T, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        vector.values[i] = i < count ? p[i * step] : fill;
    }
    return bits_as<Words<T, kCount>>(vector);
}

// The numbers in words that hold a Vector<T, kCount>.
template <typename T, int kCount>
__device__ __forceinline__ void widen_words(Compute<T> (&out)[kCount], const Words<T, kCount> &words) {
    if constexpr (std::is_same_v<T, bf16> && kCount % 2 == 0) { // one instruction for each, which nvcc does not find
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            out[i] = __uint_as_float(words.values[i / 2] << 16);
            out[i + 1] = __uint_as_float(words.values[i / 2] & 0xffff0000u);
        }
    } else {
        widen(out, bits_as<Vector<T, kCount>>(words));
    }
}

// The other way round, to global memory; elements from `count` on are left alone.
template <typename T, int kCount>
__device__ __forceinline__ void store_words(T *p, const Vector<T, kCount> &vector, bool whole, int count) {
    if (whole) {
        return store_at_once(p, bits_as<Words<T, kCount>>(vector));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < count) {
            p[i] = vector.values[i];
        }
    }
}

} // namespace infini::cuda
