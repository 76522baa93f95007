// Reductions over the threads of a warp, and over the threads of a block that share a row. The order of operations
// depends only on the number of threads; every thread gets the result.
#pragma once

#include <cuda_runtime.h>

namespace infini::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
    template <typename C> static __device__ __forceinline__ C join(C a, C b) { return a + b; }
};
struct Max {
    template <typename C> static __device__ __forceinline__ C join(C a, C b) {
        return a > b || a != a ? a : b;
    } // keeps NaN
};
struct Min {
    template <typename C> static __device__ __forceinline__ C join(C a, C b) { return a < b || a != a ? a : b; }
};

// Reduces over kLanes adjacent lanes, a power of two.
template <typename Join, int kLanes = kWarp, typename C> __device__ __forceinline__ C warp_reduce(C value) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        value = Join::join(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

// The sums of kCount values, a power of two, over the lanes of a warp: lane i gets that of values[i % kCount]. In each
// step half of the values change lanes, so all sums together take little more than one. Changes `values`.
template <int kCount, typename C> __device__ __forceinline__ C column_sums(C (&values)[kCount]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int half = kCount / 2; half > 0; half /= 2) {
        const bool upper = (lane & half) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const C kept = upper ? values[half + i] : values[i], given = upper ? values[i] : values[half + i];
            values[i] = kept + __shfl_xor_sync(kAllLanes, given, half);
        }
    }
    C sum = values[0];
#pragma unroll
    for (int distance = kCount; distance < kWarp; distance *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    return sum;
}

// Reduces over the blockDim.x threads (a multiple of 32) with the same threadIdx.y. `shared`: one value per warp of the
// block, which no thread may still be reading. All threads of the block must call it.
template <typename Join, typename C> __device__ __forceinline__ C row_reduce(C value, C *shared) {
    value = warp_reduce<Join>(value);
    const int warps = blockDim.x / kWarp;
    if (warps == 1) {
        return value;
    }
    C *mine = shared + threadIdx.y * warps;
    if (threadIdx.x % kWarp == 0) {
        mine[threadIdx.x / kWarp] = value;
    }
    __syncthreads();
    C result = mine[0];
    for (int warp = 1; warp < warps; ++warp) {
        result = Join::join(result, mine[warp]);
    }
    __syncthreads(); // `shared` may be written again
    return result;
}

} // namespace infini::cuda
