// Products with weights in panels on CUDA: a kernel writes x as int8 to the workspace, with a scale for each run; then
// a thread block multiplies a panel, and its warps take turns at the runs. Results have the bits of the CPU kernels: a
// run's sums are integers, and a thread adds the runs of a result in float, in their order.
// Limit, on paper, for up to 8 rows of x: the memory bandwidth of the weight, 1.0625 bytes per weight of group8 and
// 0.5625 of table4; instructions limit it at nearly the same rate. A warp's step (SASS for sm_90) takes 89 instructions
// for 1088 bytes of group8 and 271 for 1152 bytes of table4: at most 49 and 17 bytes per clock of a multiprocessor,
// where a copy on an H200 moves 18.6. Dot products of 4 bytes (dp4a) took no fewer for a single row. More rows read the
// weight again for every 32, from L2 if it fits, and are limited by scaling the groups' sums, one multiply-add per 16
// products. On an H200, 4096 x 14336, one row:
// 0.50 of a copy's bandwidth with group8 and 0.31 with table4.
// Weights: a Layout; columns(word of a line, part) gives 4 columns as int8 in the Layout's own order; arrange(words of
// 8 columns from a multiple of 8 on) brings x into that order.
#pragma once

#include "cuda/int_divider.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma_int8.cuh"
#include "cuda/packed32.cuh"
#include "cuda/quantize_row.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rows.cuh"
#include "linear/weight_stream_problem.cuh"
#include "panel_weights.h"

namespace infini::panels {
namespace {

// ---- x ----

// The workspace: rows of int8, padded with 0 beyond k to whole runs, then the scales of each row's runs. Within a
// block, the first words (4 columns each) of its 4 groups come first, then their second words, and so on: a lane loads
// one word of each group.
struct QuantizedRuns {
    int64_t rows = 1, k, runs;

    QuantizedRuns(const TensorView &x, int64_t run) : k(x.size(-1)), runs((x.size(-1) + run - 1) / run) {
        for (int dim = 0; dim + 1 < x.ndim; ++dim) {
            rows *= x.shape[dim];
        }
    }
    int64_t integer_bytes(int64_t run) const { return rows * runs * run; }
    int64_t bytes(int64_t run) const { return integer_bytes(run) + rows * runs * static_cast<int64_t>(sizeof(float)); }
};

constexpr int kBlockWords = kBlock / 4;

__device__ __forceinline__ int place_of_word(int word) {
    return word % 4 * kBlockGroups + word / 4;
}

template <typename T> struct RowsOfX {
    const T *x;
    uint32_t *words;
    float *scales;
    int64_t k, runs;
    cuda::RowStrides<1> rows;
    bool whole;                       // vector accesses are possible
    cuda::IntDivider<uint32_t> parts; // thread blocks per row
};

constexpr int kVector = 8; // elements per thread
constexpr int kMostThreads = 256;

template <typename Weights, typename T>
__global__ void __launch_bounds__(kMostThreads) quantize_runs(const __grid_constant__ RowsOfX<T> a) {
    cuda::grid_dependency_sync();
    const uint32_t row = a.parts.quotient(blockIdx.x), part = blockIdx.x - row * a.parts.divisor;
    const int64_t first = (static_cast<int64_t>(part) * blockDim.x + threadIdx.x) * kVector, left = a.k - first;
    int64_t at[1];
    a.rows.locate(row, at);
    float values[kVector];
    cuda::load(values, a.x + at[0] + first, a.whole && left >= kVector,
               static_cast<int>(left < 0         ? 0
                                : left < kVector ? left
                                                 : kVector));
    float most = 0;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
        most = cuda::Max::join(most, fabsf(values[e]));
    }
    const cuda::RowScale scale(cuda::warp_reduce<cuda::Max, Weights::kRun / kVector>(most));
    if (first >= a.runs * Weights::kRun) {
        return;
    }
    uint32_t words[2] = {};
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
        words[e / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(scale.quantize(values[e]))) << 8 * (e % 4);
    }
    Weights::arrange(words);
    const int64_t run = row * a.runs + first / Weights::kRun;
    uint32_t *const to = a.words + (row * a.runs * Weights::kRun + first / kBlock * kBlock) / 4;
    const int word = static_cast<int>(first % kBlock) / 4;
    to[place_of_word(word)] = words[0];
    to[place_of_word(word + 1)] = words[1];
    if (first % Weights::kRun == 0) {
        a.scales[run] = scale.scale();
    }
}

template <typename Weights, typename T>
void quantize_x(const ExecutionContext &context, const TensorView &x, uint32_t *words, float *scales) {
    const TensorView *const views[] = {&x};
    const cuda::RowStrides<1> rows(views);
    const QuantizedRuns to(x, Weights::kRun);
    const int64_t wanted = (to.runs * Weights::kRun / kVector + cuda::kWarp - 1) / cuda::kWarp * cuda::kWarp;
    const int64_t threads = wanted < kMostThreads ? wanted : kMostThreads, parts = (wanted + threads - 1) / threads;
    cuda::launch(context, quantize_runs<Weights, T>, cuda::grid_x(to.rows * parts),
                 dim3(static_cast<unsigned>(threads)), 0,
                 RowsOfX<T>{x.as<const T>(), words, scales, to.k, to.runs, rows, cuda::vectors_fit(x),
                            cuda::IntDivider<uint32_t>(static_cast<uint32_t>(parts))});
}

// ---- products ----

struct Problem {
    const uint8_t *weight;
    const float *scales;
    weight_stream::FloatVector bias;
    const uint32_t *x;
    const float *x_scales;
    int64_t m, n;     // rows of x and of the weight
    int blocks, runs; // per panel, per row of x
    void *y;
    infiniDtype_t y_dtype;
    cuda::RowStrides<1> rows;           // rows of y
    cuda::IntDivider<uint32_t> x_tiles; // thread blocks that share a panel; adjacent, to share the cache
};

constexpr int kTileRows = 8;       // rows of x per tile of the tensor cores
constexpr int kPitch = kPanel + 4; // between rows of x in shared memory; avoids bank conflicts
template <int kTiles> constexpr int kRuns = kTiles == 1 ? 32 : 16; // runs per pass, added at once

// Writes what a run adds to the results of a panel and some tiles of x, [rows of x][kPitch]. Multiplies the 16 columns
// of a group at a time. Lane l holds two adjacent rows of the panel, 2 (l / 4) and the next, in the place of the tensor
// cores' rows l / 4 and l / 4 + 8. kWhole: the weight is aligned.
template <typename Weights, int kTiles, bool kWhole>
__device__ __forceinline__ void multiply_run(const Problem &a, const uint8_t *panel, int64_t first_m, int run,
                                             float *terms) {
    const int lane = threadIdx.x, pair = lane / 4 * 2, t = lane % 4;
    const auto row_of_x = [&](int m) { return first_m + m < a.m ? first_m + m : a.m - 1; };
    int32_t sums[kTiles][4] = {};
#pragma unroll
    for (int b = 0; b < Weights::kRunBlocks; ++b) {
        const int block = run * static_cast<int>(Weights::kRunBlocks) + b;
        // Beyond the panel's last block x is 0, so any block will do.
        const uint8_t *const data = panel + int64_t{block < a.blocks ? block : a.blocks - 1} * Weights::kBlockBytes;
        cuda::Vector<uint32_t, 4> x[kTiles]; // one word per group
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const int64_t row = row_of_x(tile * kTileRows + lane / 4);
            x[tile] = cuda::load_vectorized<cuda::Vector<uint32_t, 4>>(
                a.x + (row * a.runs * Weights::kRunBlocks + block) * kBlockWords + t * kBlockGroups);
        }
#pragma unroll
        for (int g = 0; g < kBlockGroups; ++g) {
            const int line = (g * 4 + t) / Weights::kWordParts, part = t % Weights::kWordParts;
            const auto words =
                cuda::load_packed32<uint8_t, 8>(data + kScaleBytes + line * kLineBytes + pair * 4, kWhole, 8);
            const auto scales = cuda::load<uint8_t, 2>(data + g * kPanel + pair, kWhole, 2);
            const uint32_t upper = Weights::columns(words.values[0], part),
                           lower = Weights::columns(words.values[1], part);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                int32_t products[4];
                cuda::multiply(products, upper, lower, x[tile].values[g]);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    sums[tile][e] += products[e] * static_cast<int8_t>(scales.values[e / 2]);
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int m = tile * kTileRows + t * 2 + i;
            const float x_scale = a.x_scales[row_of_x(m) * a.runs + run];
            *reinterpret_cast<cuda::Vector<float, 2> *>(terms + m * kPitch + pair) = {
                __fmul_rn(x_scale, static_cast<float>(sums[tile][i])),
                __fmul_rn(x_scale, static_cast<float>(sums[tile][2 + i]))};
        }
    }
}

constexpr int kWarps = 8, kThreads = kWarps * cuda::kWarp;
constexpr uintptr_t kAlignment = 8; // of a weight, in bytes, for loads of the words of two rows

// Computes y from one total. Without fused multiply-adds, because the CPU rounds each product too.
__device__ __forceinline__ void finish(const Problem &a, int64_t m, int64_t n, float total) {
    int64_t at[1];
    a.rows.locate(m, at);
    float value = __fmul_rn(total, a.scales[n]);
    if (a.bias.data != nullptr) {
        value = __fadd_rn(value, a.bias[n]);
    }
    switch (a.y_dtype) {
    case INFINI_DTYPE_BF16:
        return weight_stream::write<bf16>(a.y, nullptr, at[0] + n, value);
    case INFINI_DTYPE_F16:
        return weight_stream::write<f16>(a.y, nullptr, at[0] + n, value);
    default:
        return weight_stream::write<float>(a.y, nullptr, at[0] + n, value);
    }
}

template <typename Weights, int kTiles, bool kWhole>
__global__ void __launch_bounds__(kThreads, kTiles == 1 && kWhole ? 3 : 1)
    multiply_panels(const __grid_constant__ Problem a) {
    cuda::grid_dependency_sync();
    INFINI_SHARED(terms, float[kRuns<kTiles>][kTiles * kTileRows * kPitch]);
    constexpr int kRows = kTiles * kTileRows, kResults = kRows * kPanel, kOwn = (kResults + kThreads - 1) / kThreads;
    const uint32_t panel = a.x_tiles.quotient(blockIdx.x);
    const int64_t first_m = static_cast<int64_t>(blockIdx.x - panel * a.x_tiles.divisor) * kRows;
    const uint8_t *const data = a.weight + int64_t{panel} * a.blocks * Weights::kBlockBytes;
    const int thread = static_cast<int>(threadIdx.y * cuda::kWarp + threadIdx.x);
    float totals[kOwn] = {};
    for (int first = 0; first < a.runs; first += kRuns<kTiles>) {
        const int count = a.runs - first < kRuns<kTiles> ? a.runs - first : kRuns<kTiles>;
        for (int i = static_cast<int>(threadIdx.y); i < count; i += kWarps) {
            multiply_run<Weights, kTiles, kWhole>(a, data, first_m, first + i, terms[i]);
        }
        __syncthreads();
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const int result = own * kThreads + thread, row = result % kPanel;
            for (int i = 0; i < count && result < kResults; ++i) {
                totals[own] = __fadd_rn(totals[own], terms[i][result / kPanel * kPitch + row]);
            }
        }
        __syncthreads(); // until all threads have read the terms
    }
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
        const int result = own * kThreads + thread;
        const int64_t m = first_m + result / kPanel, n = static_cast<int64_t>(panel) * kPanel + result % kPanel;
        if (result < kResults && m < a.m && n < a.n) {
            finish(a, m, n, totals[own]);
        }
    }
}

template <typename Weights, int kTiles, bool kWhole> void launch(const ExecutionContext &context, Problem a) {
    constexpr int kRows = kTiles * kTileRows;
    const int64_t tiles = (a.m + kRows - 1) / kRows;
    const unsigned grid = cuda::grid_x((a.n + kPanel - 1) / kPanel * tiles);
    a.x_tiles = cuda::IntDivider<uint32_t>(static_cast<uint32_t>(tiles));
    cuda::launch(context, multiply_panels<Weights, kTiles, kWhole>, grid, dim3(cuda::kWarp, kWarps), 0, a);
}

template <typename Weights> void multiply(const ExecutionContext &context, const Args &args) {
    const QuantizedRuns x(args.x, Weights::kRun);
    auto *const words = static_cast<uint32_t *>(args.workspace);
    auto *const x_scales = reinterpret_cast<float *>(words + x.integer_bytes(Weights::kRun) / 4);
    if (x.runs > 0) {
        cuda::with_float_type(args.x.dtype, [&](auto type) {
            using T = decltype(type);
            if constexpr (sizeof(T) <= 4) {
                quantize_x<Weights, T>(context, args.x, words, x_scales);
            }
        });
    }
    const TensorView *const views[] = {&args.y};
    const Problem problem{args.weight.as<const uint8_t>(),
                          args.scales.as<const float>(),
                          weight_stream::FloatVector(args.bias, 1),
                          words,
                          x_scales,
                          x.rows,
                          args.scales.size(0),
                          // Blocks of 64 columns: a dimension of 2^31 blocks fits in no memory.
                          static_cast<int>(args.weight.size(1)),
                          static_cast<int>(x.runs),
                          args.y.data,
                          args.y.dtype,
                          cuda::RowStrides<1>(views),
                          {}};
    if (reinterpret_cast<uintptr_t>(args.weight.data) % kAlignment != 0) {
        launch<Weights, 1, false>(context, problem);
    } else if (x.rows <= kTileRows) {
        launch<Weights, 1, true>(context, problem);
    } else {
        launch<Weights, 4, true>(context, problem);
    }
}

template <typename Weights> size_t workspace_bytes(const ExecutionContext &, const Args &args) {
    return static_cast<size_t>(QuantizedRuns(args.x, Weights::kRun).bytes(Weights::kRun));
}

} // namespace
} // namespace infini::panels
