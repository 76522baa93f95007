// The CUDA kernels of topksoftmax and topkrouter. The row is in registers, and the largest values are chosen one after
// another: each thread keeps its best candidate, a reduction over the row finds the best of all, and its owner searches
// for its next one. Limit: for small topk memory bandwidth, a row read once (512 bytes for 256 bf16); else topk
// reductions, 20 to 40 instructions each in a warp, some hundred cycles in a block. A row too long for registers is
// read again by the owner.
// SASS: topk_softmax_rows: LDG.E.128
// SASS: topk_router_rows: LDG.E.128
#include "candidate.h"
#include "cuda/keep_in_register.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rows.cuh"
#include "topk.h"

namespace infini::topk {
namespace {

using cuda::kWarp;

template <typename T> struct Job {
    const T *x;
    float *values;
    int32_t *indices;
    int64_t x_stride, values_stride, indices_stride; // row strides
    int64_t rows, n, k;
    bool whole;        // vector accesses to x are possible
    bool normalize;    // for topksoftmax
    const float *bias; // for topkrouter
    int64_t bias_step;
    float scale;
};

template <typename T> Job<T> job_of(const Args &args) {
    return {args.x.as<const T>(),
            args.values.as<float>(),
            args.indices.as<int32_t>(),
            args.x.stride(0),
            args.values.stride(0),
            args.indices.stride(0),
            args.x.size(0),
            args.x.size(1),
            static_cast<int64_t>(args.topk),
            cuda::vectors_fit(args.x),
            args.normalize,
            args.bias.as<const float>(),
            args.bias.strides[0],
            args.scale};
}

// All candidates are distinct and above 0.
constexpr uint64_t kNone = 0;

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

template <typename T, int kVectors>
__global__ void __launch_bounds__(512, 1) topk_softmax_rows(const __grid_constant__ Job<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kWidth = cuda::kWidth<T>;
    INFINI_SHARED(candidates, uint64_t[kWarp]);
    INFINI_SHARED(sums, float[kWarp]);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool mine = row < a.rows; // threads without a row in the last block still reach the barriers
    cuda::RowPart<T, kVectors> part(a.x + (mine ? row : 0) * a.x_stride, mine ? a.n : 0, a.whole);
    float *const values = a.values + row * a.values_stride;
    int32_t *const indices = a.indices + row * a.indices_stride;

    const auto best_up_to = [&](uint64_t limit) {
        uint64_t best = kNone;
        part.visit([&](int64_t i, int count, float (&v)[kWidth]) {
            // Kept in a register: otherwise the compiler builds all candidates at once and spills them.
            int first = static_cast<int>(i);
            cuda::keep_in_register(first);
            for (int e = 0; e < kWidth; ++e) {
                const uint64_t next = candidate(v[e], first + e);
                best = e < count && next <= limit ? larger(best, next) : best;
            }
        });
        return best;
    };
    uint64_t best = best_up_to(~uint64_t{0});
    float top = 0, total = 0, before = 0;
    for (int64_t i = 0; i < a.k; ++i) {
        const uint64_t chosen = cuda::row_reduce<cuda::Max>(best, candidates);
        if (chosen == best && best != kNone) {
            best = best_up_to(chosen - 1);
        }
        const float x = value_of(chosen);
        if (i == 0) {
            top = x;
            if (!a.normalize) {
                part.visit([&](int64_t, int count, float (&v)[kWidth]) {
                    for (int e = 0; e < kWidth; ++e) {
                        total += e < count ? expf(v[e] - top) : 0;
                    }
                });
                total = cuda::row_reduce<cuda::Sum>(total, sums);
            }
        }
        float exponential = expf(x - top);
        total += a.normalize ? exponential : 0;
        if (i > 0 && exponential > before) { // rounding has swapped adjacent values
            exponential = before;
        }
        before = exponential;
        if (mine && threadIdx.x == 0) {
            values[i] = exponential;
            indices[i] = static_cast<int32_t>(index_of(chosen));
        }
    }
    __syncthreads(); // until the exponentials are written
    for (int64_t i = threadIdx.x; mine && i < a.k; i += blockDim.x) {
        values[i] /= total;
    }
}

// A warp handles a row; each lane has 8 adjacent experts, so that 4 lanes have a group.
constexpr int kRouterRows = 4; // per block

template <typename T>
__global__ void __launch_bounds__(kRouterRows *kWarp) topk_router_rows(const __grid_constant__ Job<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kEach = kExperts / kWarp, kLanes = kGroupSize / kEach;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kRouterRows + threadIdx.y;
    if (row >= a.rows) { // ends the whole warp; the block has no barrier
        return;
    }
    const int lane = static_cast<int>(threadIdx.x);
    float scores[kEach];
    cuda::load(scores, a.x + row * a.x_stride + lane * kEach, a.whole, kEach);
    uint64_t candidates[kEach], first = kNone, second = kNone; // and the best two of the group
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int expert = lane * kEach + e;
        scores[e] = 1 / (1 + expf(-scores[e]));
        candidates[e] = candidate(scores[e] + a.bias[expert * a.bias_step], expert);
        second = larger(second, candidates[e] < first ? candidates[e] : first);
        first = larger(first, candidates[e]);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        const uint64_t other_first = __shfl_xor_sync(cuda::kAllLanes, first, distance);
        const uint64_t other_second = __shfl_xor_sync(cuda::kAllLanes, second, distance);
        second = larger(larger(second, other_second), first < other_first ? first : other_first);
        first = larger(first, other_first);
    }
    const uint64_t group = candidate(value_of(first) + value_of(second), lane / kLanes);
    int rank = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        rank += __shfl_sync(cuda::kAllLanes, group, g * kLanes) > group ? 1 : 0;
    }
    if (rank >= kKeptGroups) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            candidates[e] = candidate(0, lane * kEach + e);
        }
    }

    float *const values = a.values + row * a.values_stride;
    int32_t *const indices = a.indices + row * a.indices_stride;
    float total = 0;
    uint64_t limit = ~uint64_t{0};
    for (int64_t i = 0; i < a.k; ++i) {
        uint64_t best = kNone;
        float score = 0;
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
            const bool better = candidates[e] <= limit && candidates[e] > best;
            best = better ? candidates[e] : best;
            score = better ? scores[e] : score;
        }
        const uint64_t chosen = cuda::warp_reduce<cuda::Max>(best);
        const auto expert = static_cast<int>(index_of(chosen));
        score = __shfl_sync(cuda::kAllLanes, score, expert / kEach);
        total += score;
        limit = chosen - 1;
        if (lane == i % kWarp) {
            values[i] = score;
            indices[i] = expert;
        }
    }
    for (int64_t i = lane; i < a.k; i += kWarp) { // each lane reads what it has written itself
        values[i] = values[i] * a.scale / (total + 1e-9f);
    }
}

template <typename Launch> void with_type(const Args &args, const Launch &launch) {
    infini::cuda::with_float_type(args.x.dtype, [&](auto x) {
        if constexpr (!std::is_same_v<decltype(x), double>) {
            launch(job_of<decltype(x)>(args));
        }
    });
}

void run_softmax_on_cuda(const ExecutionContext &context, const Args &args) {
    with_type(args, [&](const auto &job) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(job.x)>>;
        const cuda::RowPlan plan(job.rows, job.n, cuda::kWidth<T>);
        cuda::with_vectors(plan.vectors, [&](auto vectors) {
            cuda::launch(context, topk_softmax_rows<T, vectors.value>, cuda::grid_x(plan.blocks), plan.block(), 0, job);
        });
    });
}

void run_router_on_cuda(const ExecutionContext &context, const Args &args) {
    with_type(args, [&](const auto &job) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(job.x)>>;
        cuda::launch(context, topk_router_rows<T>, cuda::grid_x((job.rows + kRouterRows - 1) / kRouterRows),
                     dim3(kWarp, kRouterRows), 0, job);
    });
}

const RegisteredKernel<Args> softmax_registered{softmax_kernels, INFINI_DEVICE_NVIDIA, run_softmax_on_cuda};
const RegisteredKernel<Args> router_registered{router_kernels, INFINI_DEVICE_NVIDIA, run_router_on_cuda};

} // namespace
} // namespace infini::topk
