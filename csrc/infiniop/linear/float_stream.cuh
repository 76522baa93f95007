// Products of a few rows of float x with weights that are read once, by multiply-adds: dense, int8 and int4. A lane
// handles every 32nd step of k, and the warp reduces its lanes: the order of a sum depends on k alone.
// Limit: memory bandwidth of the weight's bytes for one row of x; from four rows on the multiply-adds.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "weight_stream_problem.cuh"

namespace infini::weight_stream {

constexpr int kFloatRows = 4; // rows of x that share a pass over the weight
constexpr int kFloatStep = 4; // elements per lane and step

// Loads elements first .. first + 3 of a row of the weight as floats; kBits: 32, 8 or 4.
template <int kBits>
__device__ __forceinline__ void read_weights(const Problem<float> &a, const Weight &w, int64_t n, int64_t first,
                                             int count, float (&out)[kFloatStep]) {
    const unsigned char *const row = w.data + n * w.row;
    if constexpr (kBits == 32) {
        if (w.whole && count == kFloatStep) {
            const auto vector = *reinterpret_cast<const cuda::Vector<float, 4> *>(row + first * 4);
#pragma unroll
            for (int i = 0; i < kFloatStep; ++i) {
                out[i] = vector.values[i];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kFloatStep; ++i) {
                out[i] = i < count ? *reinterpret_cast<const float *>(row + (first + i) * w.element) : 0.0f;
            }
        }
    } else if constexpr (kBits == 8) {
        uint32_t bytes = 0;
        if (w.whole && count == kFloatStep) {
            bytes = *reinterpret_cast<const uint32_t *>(row + first);
        } else {
#pragma unroll
            for (int i = 0; i < kFloatStep; ++i) {
                bytes |= i < count ? static_cast<uint32_t>(row[(first + i) * w.element]) << 8 * i : 0u;
            }
        }
#pragma unroll
        for (int i = 0; i < kFloatStep; ++i) {
            out[i] = static_cast<float>(static_cast<int8_t>(bytes >> 8 * i));
        }
    } else {
        uint32_t nibbles = row[first / 2 * w.element];
        nibbles |= count > 2 ? static_cast<uint32_t>(row[(first / 2 + 1) * w.element]) << 8 : 0u;
        const int64_t group = first >> a.group_shift;
        const float scale = a.scales[n * a.scales.stride + group];
        const float zero = a.zeros.data != nullptr ? a.zeros[n * a.zeros.stride + group] : 0.0f;
#pragma unroll
        for (int i = 0; i < kFloatStep; ++i) {
            out[i] = static_cast<float>(static_cast<int>(nibbles >> 4 * i & 15u) - 8) * scale + zero;
        }
    }
}

// A warp handles two rows of the weight; each lane handles every 32nd step of k.
template <int kBits, int kRows>
__global__ void __launch_bounds__(kWarps *cuda::kWarp, 2) stream_floats(const __grid_constant__ Problem<float> a) {
    cuda::grid_dependency_wait();
    constexpr int kOwn = kBandRows / kWarps;
    const int lane = threadIdx.x, warp = threadIdx.y;
    const uint32_t tile = a.x_tiles.quotient(blockIdx.x);
    const int64_t first_m = static_cast<int64_t>(blockIdx.x - tile * a.x_tiles.divisor) * kRows;
    const Weight &w = a.weight[weight_of(a, tile)];
    const int64_t first_row = (tile - w.first_tile) * kBandRows + warp * kOwn;
    if (first_row >= w.n) {
        return;
    }
    const float *x[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
        int64_t at[2];
        a.rows.locate(first_m + m < a.m ? first_m + m : 0, at);
        x[m] = a.x + at[0];
    }
    float sums[kOwn][kRows] = {};
#pragma unroll 4
    for (int64_t first = lane * kFloatStep; first < a.k; first += cuda::kWarp * kFloatStep) {
        const int count = static_cast<int>(a.k - first < kFloatStep ? a.k - first : kFloatStep);
        float weights[kOwn][kFloatStep];
#pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            read_weights<kBits>(a, w, first_row + r < w.n ? first_row + r : first_row, first, count, weights[r]);
        }
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
            float values[kFloatStep];
            cuda::load(values, x[m] + first, a.x_whole && count == kFloatStep, count);
#pragma unroll
            for (int r = 0; r < kOwn; ++r) {
#pragma unroll
                for (int i = 0; i < kFloatStep; ++i) {
                    sums[r][m] += weights[r][i] * values[i];
                }
            }
        }
    }
    cuda::let_next_launch();
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
            const float sum = cuda::warp_reduce<cuda::Sum>(sums[r][m]);
            if (lane == 0 && first_row + r < w.n && first_m + m < a.m) {
                finish(a, w, first_m + m, first_row + r, sum);
            }
        }
    }
}

template <int kBits> void multiply_floats(const ExecutionContext &context, Problem<float> a) {
    const bool one = a.m == 1;
    const unsigned grid = a.cut(one ? 1 : kFloatRows, kBandRows);
    cuda::launch(context, one ? stream_floats<kBits, 1> : stream_floats<kBits, kFloatRows>, grid,
                 dim3(cuda::kWarp, kWarps), 0, a);
}

} // namespace infini::weight_stream
