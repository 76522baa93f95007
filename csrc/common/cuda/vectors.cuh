// Vectors of 16 bytes, the widest a CUDA thread loads and stores at once: 8 halves, 4 floats or 2 doubles. Unaligned
// and partial vectors are accessed element by element, so that the assignment of elements to threads, and with it the
// order of sums, never depends on alignment.
#pragma once

#include "scalar_types.cuh"
#include "../tensor_view.h"

namespace infini::cuda {

template <typename T> constexpr int kWidth = 16 / sizeof(T);

template <typename T, int kCount = kWidth<T>> struct alignas(sizeof(T) * kCount) Vector {
    T values[kCount];
};

// Whether rows of these views (last dimension dense) can be accessed by vectors of 16 bytes.
template <typename... Views> bool vectors_fit(const Views &...views) {
    const auto fits = [](const TensorView &view) {
        bool all = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
        for (int dim = 0; dim + 1 < view.ndim; ++dim) {
            all = all &&
                  (view.shape[dim] <= 1 || view.strides[dim] * static_cast<int64_t>(size_of(view.dtype)) % 16 == 0);
        }
        return all;
    };
    return (fits(views) && ...);
}

// Loads a vector of storage type at p: in one access if `whole` (aligned, complete, contiguous), else the first `count`
// elements, `step` apart, with `fill` for the rest.
template <typename T, int kCount = kWidth<T>>
__device__ __forceinline__ Vector<T, kCount> load(const T *p, bool whole, int count, T fill = T{}, int64_t step = 1) {
    if (whole) {
        return *reinterpret_cast<const Vector<T, kCount> *>(p);
    }
    Vector<T, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        vector.values[i] = i < count ? p[i * step] : fill;
    }
    return vector;
}

// Stores a vector; elements from `count` on are not written.
template <typename T, int kCount>
__device__ __forceinline__ void store(T *p, const Vector<T, kCount> &vector, bool whole, int count, int64_t step = 1) {
    if (whole) {
        *reinterpret_cast<Vector<T, kCount> *>(p) = vector;
        return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < count) {
            p[i * step] = vector.values[i];
        }
    }
}

template <typename T, int kCount>
__device__ __forceinline__ void widen(Compute<T> (&out)[kCount], const Vector<T, kCount> &vector) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        out[i] = widen(vector.values[i]);
    }
}

template <typename T, int kCount>
__device__ __forceinline__ Vector<T, kCount> narrow(const Compute<T> (&values)[kCount]) {
    Vector<T, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        narrow_to(&vector.values[i], values[i]);
    }
    return vector;
}

// Loads kCount elements of any type (kCount a multiple or a divisor of kWidth) in the compute type, and stores them.
template <int kCount, typename T>
__device__ __forceinline__ void load(Compute<T> (&out)[kCount], const T *p, bool whole, int count, int64_t step = 1) {
    constexpr int kPart = kCount < kWidth<T> ? kCount : kWidth<T>;
#pragma unroll
    for (int part = 0; part < kCount; part += kPart) {
        const Vector<T, kPart> vector = load<T, kPart>(p + part * step, whole, count - part, T{}, step);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            out[part + i] = widen(vector.values[i]);
        }
    }
}

template <int kCount, typename T>
__device__ __forceinline__ void store(T *p, const Compute<T> (&values)[kCount], bool whole, int count,
                                      int64_t step = 1) {
    constexpr int kPart = kCount < kWidth<T> ? kCount : kWidth<T>;
#pragma unroll
    for (int part = 0; part < kCount; part += kPart) {
        Vector<T, kPart> vector;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            narrow_to(&vector.values[i], values[part + i]);
        }
        store(p + part * step, vector, whole, count - part, step);
    }
}

} // namespace infini::cuda
