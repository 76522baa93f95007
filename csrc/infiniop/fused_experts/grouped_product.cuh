// Products of rows of x with the weights of several experts in one launch: row p of the result is row p / divisor of x
// times the weight of the expert that p was sorted to. A thread block computes a tile of 64 rows of a weight by 8 or 64
// rows of x, which have one expert; blocks beyond the number of tiles, which only the device knows, end at once. Stages
// of 128 bytes of k are copied to shared memory, two ahead. Half types use the tensor cores, with the weight as the
// operand of 16 rows, so that few rows of x waste little. The order of a sum depends on k alone: a row has the same bits
// in any batch.
// Limit for few rows: memory bandwidth of the chosen weights; for many the tensor cores, about half of whose rate
// mma.sync with these tiles can reach on paper.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/reduce.cuh"
#include "cuda/scalar_types.cuh"
#include "cuda/vectors.cuh"

namespace infini::fused_experts {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * cuda::kWarp;
constexpr int kRowsOfWeight = 64; // of a tile
constexpr int kXRows = 8;         // that the tensor cores take at once
constexpr int kManySets = 8;      // sets of 8 rows of x in a tile of many rows
constexpr int kStages = 3;        // in shared memory
constexpr int kStageBytes = 128;  // of a row
constexpr int kPad = 16;          // between rows, against bank conflicts

template <typename T> constexpr int kElements = kStageBytes / static_cast<int>(sizeof(T)); // of k in a stage

// Rows of x of one expert: the pairs at positions [first, end) of the sorted ones.
struct Tile {
    int expert, first, end;
};

struct Groups {
    const int *pairs; // sorted by expert
    const Tile *tiles;
    const int *count; // of tiles
    unsigned most;    // that there can be
};

template <typename T> struct Product {
    T *y; // [pairs, n], contiguous
    const T *x, *weight, *bias;
    int64_t x_row, divisor; // pair p has row p / divisor of x
    int64_t expert, row;    // strides of the weight; row: of its rows, or of its columns if those are adjacent
    int64_t bias_expert;
    int64_t n, k;
    bool x_whole, weight_whole; // rows are aligned to 16 bytes
    Groups groups;
};

// Copies `count` of the 16 / sizeof(T) elements of a chunk to shared memory, and zeros for the others.
template <typename T> __device__ __forceinline__ void copy_chunk(T *to, const T *from, int64_t count, bool whole) {
    constexpr int kWidth = cuda::kWidth<T>;
    if (whole && count >= kWidth) {
        cuda::async_copy(to, from);
        return;
    }
    const int there = count < 0 ? 0 : count < kWidth ? static_cast<int>(count) : kWidth;
    *reinterpret_cast<cuda::Vector<T> *>(to) = cuda::load(from, false, there);
}

// A stage of the weight in shared memory: [64 rows][elements of k], or [elements of k][64 rows] of adjacent columns.
template <typename T, bool kColumns> struct WeightStage {
    static constexpr int kRows = kColumns ? kElements<T> : kRowsOfWeight;
    static constexpr int kAlong = kColumns ? kRowsOfWeight : kElements<T>;
    static constexpr int kPitch = kAlong + kPad / static_cast<int>(sizeof(T)), kSize = kRows * kPitch;
    static constexpr int kChunks = kAlong / cuda::kWidth<T>; // of a row

    static __device__ void copy(T *to, const Product<T> &a, const T *weight, int64_t first_n, int64_t first_k) {
        const int64_t row = kColumns ? first_k : first_n, along = kColumns ? first_n : first_k;
        const int64_t rows = (kColumns ? a.k : a.n) - row, left = (kColumns ? a.n : a.k) - along;
#pragma unroll
        for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
            const int r = i / kChunks, at = i % kChunks * cuda::kWidth<T>;
            const bool there = r < rows && at < left;
            const T *const from = weight + (there ? (row + r) * a.row + along + at : 0);
            copy_chunk(to + r * kPitch + at, from, there ? left - at : 0, a.weight_whole);
        }
    }
};

template <typename T, int kSets> struct XStage {
    static constexpr int kRows = kSets * kXRows, kPitch = kElements<T> + kPad / static_cast<int>(sizeof(T)),
                         kSize = kRows * kPitch, kChunks = kElements<T> / cuda::kWidth<T>;

    static __device__ void copy(T *to, const Product<T> &a, const Tile &tile, int64_t first_k) {
        const int64_t left = a.k - first_k;
#pragma unroll
        for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
            const int r = i / kChunks, at = i % kChunks * cuda::kWidth<T>;
            const bool there = tile.first + r < tile.end && at < left;
            const int64_t row = there ? a.groups.pairs[tile.first + r] / a.divisor : 0;
            const T *const from = a.x + (there ? row * a.x_row + first_k + at : 0);
            copy_chunk(to + r * kPitch + at, from, there ? left - at : 0, a.x_whole);
        }
    }
};

// A block's sums, of its tile: each thread adds the products of a stage to its own, and puts them into [rows of x][64].
template <typename T, int kSets, bool kColumns> struct TensorCoreSums {
    static_assert(sizeof(T) == 2);
    using W = WeightStage<T, kColumns>;
    using X = XStage<T, kSets>;
    float sums[kSets][4] = {};

    __device__ void add(const T *weight, const T *x) {
        const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp,
                  warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
        constexpr int kStep = 16; // of k
#pragma unroll
        for (int first = 0; first < kElements<T>; first += 2 * kStep) {
            uint32_t a[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int k = first + half * kStep;
                if constexpr (kColumns) {
                    cuda::load_matrices_transposed(a[half], weight + (k + lane / 16 * 8 + lane % 8) * W::kPitch +
                                                                warp * 16 + lane / 8 % 2 * 8);
                } else {
                    cuda::load_matrices(a[half], weight + (warp * 16 + lane % 16) * W::kPitch + k + lane / 16 * 8);
                }
            }
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                uint32_t b[4];
                cuda::load_matrices(b, x + (set * kXRows + lane % 8) * X::kPitch + first + lane / 8 * 8);
                cuda::mma<T>(sums[set], a[0], b[0], b[1]);
                cuda::mma<T>(sums[set], a[1], b[2], b[3]);
            }
        }
    }

    __device__ void put(float *to) const {
        const int lane = static_cast<int>(threadIdx.x) % cuda::kWarp,
                  warp = static_cast<int>(threadIdx.x) / cuda::kWarp;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = set * kXRows + lane % 4 * 2 + e % 2;
                to[row * kRowsOfWeight + warp * 16 + lane / 4 + e / 2 * 8] = sums[set][e];
            }
        }
    }
};

template <int kSets, bool kColumns> struct FloatSums {
    using W = WeightStage<float, kColumns>;
    using X = XStage<float, kSets>;
    static constexpr int kParts = kThreads / kRowsOfWeight, kOwn = kSets * kXRows / kParts; // rows of x of a thread
    float sums[kOwn] = {};

    __device__ void add(const float *weight, const float *x) {
        const int n = static_cast<int>(threadIdx.x) % kRowsOfWeight,
                  part = static_cast<int>(threadIdx.x) / kRowsOfWeight;
#pragma unroll 1
        for (int k = 0; k < kElements<float>; k += 4) {
            cuda::Vector<float> w;
            if constexpr (kColumns) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    w.values[i] = weight[(k + i) * W::kPitch + n];
                }
            } else {
                w = *reinterpret_cast<const cuda::Vector<float> *>(weight + n * W::kPitch + k);
            }
#pragma unroll
            for (int row = 0; row < kOwn; ++row) {
                const auto v = *reinterpret_cast<const cuda::Vector<float> *>(x + (part * kOwn + row) * X::kPitch + k);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[row] = fmaf(w.values[i], v.values[i], sums[row]);
                }
            }
        }
    }

    __device__ void put(float *to) const {
        const int n = static_cast<int>(threadIdx.x) % kRowsOfWeight,
                  part = static_cast<int>(threadIdx.x) / kRowsOfWeight;
#pragma unroll
        for (int row = 0; row < kOwn; ++row) {
            to[(part * kOwn + row) * kRowsOfWeight + n] = sums[row];
        }
    }
};

template <typename T, int kSets, bool kColumns>
using Sums = std::conditional_t<sizeof(T) == 2, TensorCoreSums<T, kSets, kColumns>, FloatSums<kSets, kColumns>>;

template <typename T, int kSets, bool kColumns> constexpr int product_bytes() {
    constexpr int kStage = (WeightStage<T, kColumns>::kSize + XStage<T, kSets>::kSize) * static_cast<int>(sizeof(T));
    constexpr int kSums = kSets * kXRows * kRowsOfWeight * static_cast<int>(sizeof(float));
    return kStages * kStage > kSums ? kStages * kStage : kSums;
}

template <typename T, int kSets, bool kColumns>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 3)
    multiply_groups(const __grid_constant__ Product<T> a) {
    cuda::grid_dependency_sync();
    using W = WeightStage<T, kColumns>;
    using X = XStage<T, kSets>;
    const int number = static_cast<int>(blockIdx.x % a.groups.most); // tiles of an expert are neighbours
    if (number >= *a.groups.count) {                                 // the whole block
        return;
    }
    const Tile tile = a.groups.tiles[number];
    const int64_t first_n = static_cast<int64_t>(blockIdx.x / a.groups.most) * kRowsOfWeight;
    const T *const weight = a.weight + tile.expert * a.expert;
    T *const memory = cuda::dynamic_shared<T>();
    const int64_t stages = (a.k + kElements<T> - 1) / kElements<T>;
    const auto slot = [&](int64_t stage) { return memory + stage % kStages * (W::kSize + X::kSize); };
    const auto copy = [&](int64_t stage) {
        if (stage < stages) {
            W::copy(slot(stage), a, weight, first_n, stage * kElements<T>);
            X::copy(slot(stage) + W::kSize, a, tile, stage * kElements<T>);
        }
        cuda::async_commit();
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        copy(stage);
    }
    Sums<T, kSets, kColumns> sums;
    for (int64_t stage = 0; stage < stages; ++stage) {
        cuda::async_wait<kStages - 2>();
        __syncthreads(); // the stage has arrived for all, and all are done with the one before
        copy(stage + kStages - 1);
        sums.add(slot(stage), slot(stage) + W::kSize);
    }
    __syncthreads();
    auto *const results = reinterpret_cast<float *>(memory);
    sums.put(results);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kSets * kXRows * kRowsOfWeight; i += kThreads) {
        const int64_t n = first_n + i % kRowsOfWeight;
        const int position = tile.first + i / kRowsOfWeight;
        if (position < tile.end && n < a.n) {
            const float bias = a.bias == nullptr ? 0.0f : cuda::widen(a.bias[tile.expert * a.bias_expert + n]);
            cuda::narrow_to(a.y + static_cast<int64_t>(a.groups.pairs[position]) * a.n + n, results[i] + bias);
        }
    }
}

template <typename T, int kSets, bool kColumns>
void launch_product(const ExecutionContext &context, const Product<T> &a) {
    const int64_t bands = (a.n + kRowsOfWeight - 1) / kRowsOfWeight;
    cuda::launch(context, multiply_groups<T, kSets, kColumns>, cuda::grid_x(bands * a.groups.most), dim3(kThreads),
                 product_bytes<T, kSets, kColumns>(), a);
}

// sets: 1 or kManySets, as the tiles of a.groups were cut.
template <typename T> void multiply(const ExecutionContext &context, const Product<T> &a, int sets, bool columns) {
    if (a.n == 0 || a.groups.most == 0) {
        return;
    }
    if (sets == 1) {
        columns ? launch_product<T, 1, true>(context, a) : launch_product<T, 1, false>(context, a);
    } else {
        columns ? launch_product<T, kManySets, true>(context, a) : launch_product<T, kManySets, false>(context, a);
    }
}

} // namespace
} // namespace infini::fused_experts
