// Integer division by a divisor known on the host, by multiplication and shift: the GPU's own 64-bit division is a call
// of some 70 instructions. Included by *.cu files only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace infini::cuda {

// N is uint32_t or uint64_t; dividends and the divisor (at least 1) are below 2^31 or 2^63.
template <typename N> struct IntDivider {
    N divisor = 1, factor = 1;
    int shift = 0;

    IntDivider() = default;
    explicit IntDivider(N by) : divisor(by) {
        using Wide = std::conditional_t<sizeof(N) == 4, uint64_t, unsigned __int128>;
        while (Wide{1} << shift < by) {
            ++shift;
        }
        factor = static_cast<N>((Wide{1} << 8 * sizeof(N)) * ((Wide{1} << shift) - by) / by + 1);
    }

    __device__ __forceinline__ N quotient(N n) const { return (high_product(n, factor) + n) >> shift; }

private:
    static __device__ __forceinline__ uint32_t high_product(uint32_t a, uint32_t b) { return __umulhi(a, b); }
    static __device__ __forceinline__ uint64_t high_product(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
};

} // namespace infini::cuda
