// Asynchronous copies from global to shared memory (cp.async): 4, 8 or 16 bytes each, committed and waited for in
// groups. Other threads see a copy after the issuing thread's wait and a barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

namespace infini::cuda {

#ifdef INFINI_EMULATION

// Emulation: copies at the wait, the latest time that is allowed, so that a missing wait shows in tests.
template <int kBytes = 16> inline void async_copy(void *to, const void *from, int bytes = kBytes) {
    emulation::check_aligned(to, kBytes, "cp.async to shared memory");
    emulation::check_aligned(from, kBytes, "cp.async from global memory");
    auto &fiber = *emulation::fiber;
    fiber.copies.push_back({to, from, bytes, kBytes, fiber.groups});
}
inline void async_commit() {
    ++emulation::fiber->groups;
}
template <int kGroups> inline void async_wait() {
    auto &fiber = *emulation::fiber;
    size_t left = 0;
    for (const emulation::AsyncCopy &copy : fiber.copies) {
        if (copy.group + kGroups < fiber.groups) {
            std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
            std::memset(static_cast<char *>(copy.to) + copy.bytes, 0, static_cast<size_t>(copy.size - copy.bytes));
        } else {
            fiber.copies[left++] = copy;
        }
    }
    fiber.copies.resize(left);
}

#else

// Starts to copy the first `bytes` of kBytes bytes and fills the rest with zeros. Both addresses must be aligned to
// kBytes. Copies of 16 bytes bypass L1; smaller ones cannot.
template <int kBytes = 16> __device__ __forceinline__ void async_copy(void *to, const void *from, int bytes = kBytes) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
    const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared), "l"(from), "n"(kBytes), "r"(bytes)
                     : "memory");
    }
}
// Makes a group of the copies started since the last commit. The group may be empty.
__device__ __forceinline__ void async_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Waits until at most the last kGroups groups of this thread are in flight.
template <int kGroups> __device__ __forceinline__ void async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
}

#endif

} // namespace infini::cuda
