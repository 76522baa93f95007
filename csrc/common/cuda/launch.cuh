// Launches CUDA kernels on the stream of a call's context and throws Error on failure. Included by *.cu files only.
// Kernels are called through launch(), never through <<< >>>, so that the emulation (csrc/emulation) can run them.
//
// On sm_90 and later a kernel may be launched while the one before it in the stream still runs (programmatic dependent
// launch), to hide the launch latency between decode's small kernels. The rules that make this correct:
// * Every kernel, without exception, calls grid_dependency_sync() or grid_dependency_wait() in every thread before
//   anything else. Before it returns, writes of earlier kernels are not visible, and memory that they still read must
//   not be written.
// * The call waits for the whole preceding grid, which has itself waited for the one before: so all earlier work of the
//   stream is done, for reads and for writes, as with serialized launches. A kernel that did not wait would break that
//   chain for all later kernels.
// * Before the call, a kernel may compute indices from its parameters and prefetch to L2. Not to L1 or shared memory:
//   even a weight may be the result of the preceding kernel.
// .ci/check_cuda.py checks the machine code of every kernel: no path reaches global memory, or the end, before the
// wait. The emulation fails if a thread of a kernel does not call it exactly once. A kernel of another library waits
// for ours unless it is launched with this attribute too, and then synchronizes by itself.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../execution_context.h"
#include "../setting.h"
#include "error.cuh"

namespace infini::cuda {

inline cudaStream_t stream_of(const ExecutionContext &context) {
    return static_cast<cudaStream_t>(context.stream);
}

// Blocks are counted in grid.x, whose limit is 2^31 - 1.
constexpr int64_t kMaxGridX = 0x7fffffff;

inline unsigned grid_x(int64_t blocks) {
    if (blocks > kMaxGridX) {
        throw Error(INFINI_STATUS_BAD_TENSOR_SHAPE,
                    message("infini: a CUDA kernel must have at most 2147483647 blocks, got ", blocks));
    }
    return static_cast<unsigned>(blocks);
}

// The setting INFINI_CUDA_PDL, read once. 0 turns programmatic dependent launch off.
inline bool launches_early() {
    static const bool wanted = setting_is_on("INFINI_CUDA_PDL", true);
    return wanted;
}

// Waits until all earlier work is done and visible. Every kernel starts with this or with grid_dependency_sync().
__device__ __forceinline__ void grid_dependency_wait() {
#ifdef INFINI_EMULATION
    emulation::grid_dependency_sync();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel be launched as soon as all blocks of this one have come here or ended.
__device__ __forceinline__ void let_next_launch() {
#if !defined(INFINI_EMULATION) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, for kernels that leave most of the GPU free. After the wait, not before it: the next kernel's blocks would else
// be placed while the kernel before this one still fills the multiprocessors, on those that have room, and run there
// two and three together while others idle. A kernel that fills the GPU lets the next one launch when its main loop is
// over, for the same reason: on an H100 a product of 4096 x 4096 behind another took 15 us instead of 8.5
// (timed by hand: 100 calls in a graph, with and without early launch).
__device__ __forceinline__ void grid_dependency_sync() {
    grid_dependency_wait();
    let_next_launch();
}

#ifndef INFINI_EMULATION
// What is known of a kernel on a device: attributes read from the driver, and the attribute set.
struct Prepared {
    bool waits = false;        // its code is for sm_90 or later, where grid_dependency_sync() is not empty
    size_t shared = 48 * 1024; // the limit of dynamic shared memory that is set, in bytes
    bool asked = false;
};

// Prepares a kernel for launches on the current device with `shared` bytes of dynamic shared memory. Returns whether
// the kernel waits for preceding kernels. Calls the driver once for each kernel and device, and again if a launch needs
// more shared memory.
inline bool prepare(const void *kernel, int device_id, size_t shared) {
    static std::mutex mutex;
    static std::map<std::pair<const void *, int>, Prepared> all;
    const std::lock_guard<std::mutex> lock(mutex);
    Prepared &prepared = all[{kernel, device_id}];
    if (!prepared.asked) {
        // The code decides, not the device's capability: the device may run code for sm_80 that was compiled from PTX.
        cudaFuncAttributes attributes;
        check_cuda("cudaFuncGetAttributes", cudaFuncGetAttributes(&attributes, kernel));
        prepared.waits = attributes.ptxVersion >= 90;
        prepared.asked = true;
    }
    if (shared > prepared.shared) {
        check_cuda("cudaFuncSetAttribute",
                   cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
        prepared.shared = shared;
    }
    return prepared.waits;
}
#endif

// Runs kernel(args...) with `shared` bytes of dynamic shared memory, at most 227 KiB on sm_90 and 163 on sm_80.
template <typename... Parameters>
void launch(const ExecutionContext &context, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            const std::common_type_t<Parameters> &...args) {
    const bool early = launches_early();
#ifdef INFINI_EMULATION
    static_cast<void>(early);
    emulation::launch(kernel, grid, block, shared, stream_of(context), args...);
#else
    const auto function = reinterpret_cast<const void *>(kernel);
    void *pointers[] = {const_cast<void *>(static_cast<const void *>(&args))...};
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream_of(context);
    config.attrs = &attribute;
    config.numAttrs = prepare(function, context.device_id, shared) && early ? 1 : 0;
    check_cuda("a kernel launch", cudaLaunchKernelExC(&config, function, pointers));
#endif
}

// Declares a variable `name` in the block's static shared memory; the second argument is its type: INFINI_SHARED(sums,
// float[32]). Used instead of __shared__, so that the emulation knows the variable.
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
