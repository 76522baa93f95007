// keep_in_register(value): holds a loop invariant in a register. Without it the compiler recomputes the value in each
// iteration if a part of the loop is conditional.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace infini::cuda {

#ifdef INFINI_EMULATION

template <typename T> inline void keep_in_register(T &) {}

#else

__device__ __forceinline__ void keep_in_register(int &value) {
    asm volatile("" : "+r"(value));
}
// For a pointer to global memory: without the conversion back, the compiler would emit generic loads, which are slower.
template <typename T> __device__ __forceinline__ void keep_in_register(const T *&pointer) {
    size_t address = __cvta_generic_to_global(pointer);
    asm volatile("" : "+l"(address));
    pointer = static_cast<const T *>(__cvta_global_to_generic(address));
}

#endif

} // namespace infini::cuda
