// Attention on CUDA cores: float32, and head sizes beyond the tensor core kernels'. A block has 8 rows and up to 256
// columns of the result; its warps take 32 keys at a time: each lane computes the scores of one key, then each has a
// part of the columns. Heads wider than 256, which are rare, recompute the scores for each 256 columns.
#pragma once

#include "attention_problem.cuh"

namespace infini::attention::nvidia {

template <typename E, int kCount>
__device__ __forceinline__ void floats_of(float (&to)[kCount], const cuda::Vector<E, kCount> &vector) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        to[i] = static_cast<float>(cuda::widen(vector.values[i]));
    }
}

constexpr int kCoreRows = 8, kCoreColumns = 256;

template <typename T, typename E> struct CoreShared {
    float probabilities[kWarps][kWarp][kCoreRows];
    int64_t values_at[kWarps][kWarp], q_at[kCoreRows];
    float out[kWarps][kCoreRows][kCoreColumns];
    typename Problem<T, E>::RowScores rows[kCoreRows];
    float sums[kWarps][kCoreRows], largest[kWarps][kCoreRows];
};

template <typename T, typename E>
__global__ void __launch_bounds__(kThreads, 2) attend_by_cores(const __grid_constant__ Problem<T, E> p) {
    cuda::grid_dependency_sync();
    constexpr int kWidth = cuda::kWidth<T>, kEach = kCoreColumns / kWarp; // columns of a vector, and of a lane
    if (p.starts.data != nullptr && !p.small && !p.starts_fit()) {
        return write_not_a_number(p);
    }
    const WorkTile u = p.unit();
    if (u.rows == 0) {
        return;
    }
    auto &shared = *cuda::dynamic_shared<CoreShared<T, E>>();
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int first_column = static_cast<int>(blockIdx.y) * kCoreColumns;

    if (threadIdx.x < kCoreRows) {
        const int r = threadIdx.x;
        shared.rows[r] = p.row_scores(u, u.first_row + r);
        // Missing rows repeat the first.
        shared.q_at[r] = p.row_at(p.q_strides, u, u.first_row + (r < u.rows ? r : 0));
    }
    __syncthreads();
    float out[kCoreRows][kEach] = {}, sums[kCoreRows], largest[kCoreRows];
    const T *const q = p.q;
#pragma unroll
    for (int r = 0; r < kCoreRows; ++r) {
        sums[r] = 0;
        largest[r] = -INFINITY;
    }
    for (int64_t from = u.begin + warp * kWarp; from < u.end; from += kThreads) {
        const int64_t key = from + lane;
        const int64_t k_at = key < u.end ? p.locate(p.k_strides, u, key) : kNoKey;
        shared.values_at[warp][lane] = key < u.end ? p.locate(p.v_strides, u, key) : kNoKey;
        float scores[kCoreRows] = {}, k_scale = 1, v_scale = 1;
        if (std::is_same_v<E, int8_t> && key < u.end) {
            k_scale = p.scale_of(p.k_scales, p.k_scale_strides, u, key);
            v_scale = p.scale_of(p.v_scales, p.v_scale_strides, u, key);
        }
        if (k_at > kBadBlock) {
            constexpr int kAhead = 4; // vectors of K in flight
            for (int first = 0; first < p.size; first += kAhead * kWidth) {
                cuda::Vector<E, kWidth> k[kAhead];
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    const int column = first + i * kWidth;
                    k[i] = cuda::load<E, kWidth>(p.k + k_at + column, p.whole_kv && column < p.size, p.size - column);
                }
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    const int column = first + i * kWidth;
                    float of_k[kWidth];
                    floats_of(of_k, k[i]);
#pragma unroll
                    for (int r = 0; r < kCoreRows && column < p.size; ++r) {
                        float x[kWidth];
                        cuda::load(x, q + shared.q_at[r] + column, p.whole_q, p.size - column);
#pragma unroll
                        for (int e = 0; e < kWidth; ++e) {
                            scores[r] += x[e] * of_k[e];
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kCoreRows; ++r) {
            const bool sees = key < u.end && p.sees(shared.rows[r].seen, key);
            scores[r] = !sees               ? -INFINITY
                        : k_at == kBadBlock ? not_a_number()
                                            : p.score(scores[r] * k_scale, shared.rows[r], key);
            const float before = largest[r];
            largest[r] = fmaxf(before, cuda::warp_reduce<cuda::Max>(scores[r] == scores[r] ? scores[r] : -INFINITY));
            const float base = base_of(largest[r]), factor = exp_for<T>(before - base);
            const float probability = exp_for<T>(scores[r] - base);
            sums[r] = sums[r] * factor + probability; // of this lane's keys
            shared.probabilities[warp][lane][r] = sees ? probability * v_scale : 0.0f;
#pragma unroll
            for (int e = 0; e < kEach; ++e) {
                out[r][e] *= factor;
            }
        }
        __syncwarp();
        const int count = static_cast<int>(u.end - from < kWarp ? u.end - from : kWarp);
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const int64_t v_at = shared.values_at[warp][i];
#pragma unroll
            for (int part = 0; part < kEach; part += kWidth) {
                const int column = first_column + part * kWarp + lane * kWidth;
                float v[kWidth] = {};
                if (v_at > kBadBlock && column < p.size) {
                    floats_of(v, cuda::load<E, kWidth>(p.v + v_at + column, p.whole_kv, p.size - column));
                }
#pragma unroll
                for (int r = 0; r < kCoreRows; ++r) {
                    const float probability = shared.probabilities[warp][i][r];
#pragma unroll
                    for (int e = 0; e < kWidth; ++e) {
                        out[r][part + e] += probability * v[e];
                    }
                }
            }
        }
        __syncwarp();
    }

    // The warps' sums are combined in shared memory.
#pragma unroll
    for (int r = 0; r < kCoreRows; ++r) {
        sums[r] = cuda::warp_reduce<cuda::Sum>(sums[r]);
        if (lane == 0) {
            shared.sums[warp][r] = sums[r];
            shared.largest[warp][r] = largest[r];
        }
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            shared.out[warp][r][e / kWidth * kWidth * kWarp + lane * kWidth + e % kWidth] = out[r][e];
        }
    }
    __syncthreads();
    for (int r = warp; r < u.rows; r += kWarps) {
        join_warps(p, u, u.first_row + r, shared.rows[r].sink, first_column, kCoreColumns, &shared.sums[0][r],
                   &shared.largest[0][r], kCoreRows, &shared.out[0][r][0], kCoreRows * kCoreColumns);
    }
}

} // namespace infini::attention::nvidia
