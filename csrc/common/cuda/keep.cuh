// keep(value): what a loop needs was computed before it and stays in a register. The compiler would rather compute it
// again at each turn, where a part of the loop has a condition.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace infini::cuda {

#ifdef INFINI_EMULATION

template <typename T> inline void keep(T &) {}

#else

__device__ __forceinline__ void keep(int &value) {
    asm volatile("" : "+r"(value));
}
// To global memory: were it not said again, loads would take any address, and longer.
template <typename T> __device__ __forceinline__ void keep(const T *&pointer) {
    size_t address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address));
    pointer = static_cast<const T *>(__cvta_global_to_generic(address));
}

#endif

} // namespace infini::cuda
