// Launching CUDA kernels: on the stream of current_place, every error an Error. Included by *.cu files only.
// Kernels are called through launch(), never through <<< >>>, so that the emulation (csrc/emulation) can run them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../place.h"
#include "error.h"

namespace infini::cuda {

inline cudaStream_t stream() {
    return static_cast<cudaStream_t>(current_place.stream);
}

// Blocks are counted in grid.x, which may have 2^31 - 1 of them.
constexpr int64_t kMaxGridX = 0x7fffffff;

inline unsigned grid_x(int64_t blocks) {
    if (blocks > kMaxGridX) {
        throw Error(INFINI_STATUS_BAD_TENSOR_SHAPE,
                    message("infini: a CUDA kernel must have at most 2147483647 blocks, got ", blocks));
    }
    return static_cast<unsigned>(blocks);
}

#ifndef INFINI_EMULATION
constexpr size_t kSharedWithoutAsking = 48 * 1024;

// Lets a kernel have so much dynamic shared memory on the current device. The driver is asked once for each kernel and
// device, and again where a launch wants more.
inline void allow_shared(const void *kernel, size_t bytes) {
    static std::mutex mutex;
    static std::map<std::pair<const void *, int>, size_t> allowed;
    const std::lock_guard<std::mutex> lock(mutex);
    size_t &most = allowed[{kernel, current_place.id}];
    if (bytes > most) {
        must("cudaFuncSetAttribute",
             cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
        most = bytes;
    }
}
#endif

// Runs kernel(args...) with `shared` bytes of dynamic shared memory, at most 227 KiB on sm_90 and 163 on sm_80.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            const std::common_type_t<Parameters> &...args) {
#ifdef INFINI_EMULATION
    emulation::launch(kernel, grid, block, shared, stream(), args...);
#else
    if (shared > kSharedWithoutAsking) {
        allow_shared(reinterpret_cast<const void *>(kernel), shared);
    }
    void *pointers[] = {const_cast<void *>(static_cast<const void *>(&args))...};
    must("a kernel launch",
         cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, block, pointers, shared, stream()));
#endif
}

// Declares a variable `name` in the block's static shared memory; the rest is its type: INFINI_SHARED(sums, float[32]).
// Instead of __shared__, as the emulation has to know which memory that is.
template <typename T> using Type = T;
#ifdef INFINI_EMULATION
#define INFINI_SHARED(name, ...)                                                                                       \
    static ::infini::cuda::Type<__VA_ARGS__> name;                                                                     \
    static uint64_t name##_block = 0;                                                                                  \
    ::infini::emulation::poison_once(&name, sizeof name, name##_block)
#else
#define INFINI_SHARED(name, ...) __shared__::infini::cuda::Type<__VA_ARGS__> name
#endif

// The block's dynamic shared memory, aligned to 16 bytes.
template <typename T> __device__ __forceinline__ T *dynamic_shared() {
#ifdef INFINI_EMULATION
    return static_cast<T *>(emulation::dynamic_shared());
#else
    extern __shared__ __align__(16) unsigned char memory[];
    return reinterpret_cast<T *>(memory);
#endif
}

} // namespace infini::cuda
