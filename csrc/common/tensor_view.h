// TensorView: a tensor's address, element type, shape and strides (in elements); non-owning. Checks, C ABI, CPU kernels
// and CUDA kernels all take it as their argument.
#pragma once

#include <cstdint>
#include <string>

#include "dtype.h"

// For small functions shared by files of several instruction sets: always inlined, so that no copy is left for the
// linker to pick. Device code in *.cu files may call them too.
#ifdef __CUDACC__
#define INFINI_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define INFINI_ALWAYS_INLINE __attribute__((always_inline)) inline
#endif

namespace infini {

constexpr int kMaxDims = 8;

struct TensorView {
    void *data = nullptr;                       // may be set in an empty view, and nullptr before memory is bound
    infiniDtype_t dtype = INFINI_DTYPE_INVALID; // INVALID marks an absent optional argument, whatever data is
    int ndim = 0;
    int64_t shape[kMaxDims] = {};
    int64_t strides[kMaxDims] = {};

    // Negative indices count from the last dimension, as in Python.
    INFINI_ALWAYS_INLINE int64_t size(int dim) const { return shape[dim < 0 ? ndim + dim : dim]; }
    INFINI_ALWAYS_INLINE int64_t stride(int dim) const { return strides[dim < 0 ? ndim + dim : dim]; }

    INFINI_ALWAYS_INLINE int64_t numel() const {
        int64_t n = 1;
        for (int i = 0; i < ndim; ++i) {
            n *= shape[i];
        }
        return n;
    }

    template <typename T> INFINI_ALWAYS_INLINE T *as() const { return static_cast<T *>(data); }
};

// The view with dimension `dim` moved to the end.
INFINI_ALWAYS_INLINE TensorView moved_last(const TensorView &view, int dim) {
    TensorView moved = view;
    for (int i = dim; i + 1 < view.ndim; ++i) {
        moved.shape[i] = view.shape[i + 1];
        moved.strides[i] = view.strides[i + 1];
    }
    moved.shape[view.ndim - 1] = view.shape[dim];
    moved.strides[view.ndim - 1] = view.strides[dim];
    return moved;
}

std::string shape_of(const TensorView &view);   // "[2, 4096]"
std::string strides_of(const TensorView &view); // "[4096, 1]"

} // namespace infini
