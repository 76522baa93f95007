// Products of 17 rows of x and more with quantized weights, which unpack on the way to the tensor cores: for
// linear_int8, linear_int4 and int8_gemm where weight_stream.cuh has too few rows to share a weight among, and cuBLAS would read a
// weight that was unpacked to memory.
//
// A tile is 32 or 64 rows of x by 128 rows of the weight, a band of 16 for each of a thread block's 8 warps. Stages of
// 128 bytes of each row of the weight, and of the same columns of x, are copied to shared memory some stages ahead; the
// warps share x. Where a weight has too few rows to give each multiprocessor a tile, k is split among blocks, whose sums
// scale_sums adds in order (weight_tiles.h). A row has the same bits for any number of rows up to 128, and for any
// beyond.
// Limit: memory bandwidth of the weight's bytes, and L2's of x, which is read once for each 128 rows of the weight: on
// paper (H100, 4096 x 14336, 64 rows) 20 us and 10 us for int8, and 12 us of tensor cores.
#pragma once

#include <algorithm>

#include "cuda/launch.cuh"
#include "gemm/scale_sums.h"
#include "weight_formats.cuh"
#include "weight_tiles.h"

namespace infini::weight_tiles {

using weight_stream::GroupSlots;
using weight_stream::kBandRows;
using weight_stream::kWarps;
using weight_stream::Problem;
using weight_stream::Stage;
using weight_stream::Weight;

constexpr int kXRows = 8; // rows of x that the tensor cores take at once
constexpr int kThreads = kWarps * cuda::kWarp;
static_assert(kWeightRows == kWarps * kBandRows && kStageBytes == weight_stream::kStageBytes);

// Where the columns of x lie in a stage: rows of kBytes in chunks of 16, whose order within 128 bytes differs from row
// to row, so that a lane's reads of kLaneBytes from row lane / 4, column lane % 4, have no bank conflicts.
template <typename F> struct XStage {
    static constexpr int kBytes = Stage<F>::kElements * static_cast<int>(sizeof(typename F::X));
    static constexpr int kLaneBytes = F::kLane * static_cast<int>(sizeof(typename F::X));
    static constexpr int kChunks = kBytes / 16; // per row

    static __device__ __forceinline__ int place(int row, int chunk) {
        const int turn = kLaneBytes == 32 ? row & 1 : kLaneBytes == 16 ? (row & 1) << 2 : (row & 3) << 1;
        return row * kBytes + (chunk ^ turn) * 16;
    }
    // Reads a lane's part of a step, from the row lane / 4 of a set of 8 rows.
    static __device__ __forceinline__ void read(uint32_t (&out)[F::kXRegisters], const unsigned char *set, int g, int t,
                                                int step) {
        if constexpr (kLaneBytes >= 16) {
#pragma unroll
            for (int j = 0; j < kLaneBytes / 16; ++j) {
                const int chunk = (step * 4 + t) * (kLaneBytes / 16) + j;
                const auto words = *reinterpret_cast<const cuda::Vector<uint32_t, 4> *>(set + place(g, chunk));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    out[j * 4 + i] = words.values[i];
                }
            }
        } else {
            static_assert(kLaneBytes >= 16 || kLaneBytes == 8);
            const auto words =
                *reinterpret_cast<const cuda::Vector<uint32_t, 2> *>(set + place(g, step * 2 + t / 2) + t % 2 * 8);
            out[0] = words.values[0];
            out[1] = words.values[1];
        }
    }
};

// The block's shared memory is a ring of stages, each of a slot for each warp's weights, then x.
struct Plan {
    int slot_bytes, stage_bytes;
    unsigned parts;              // of k
    int stages;                  // per part
    void *sums;                  // [parts, m, padded n]; nullptr if there is one part
    int64_t sums_row, sums_part; // strides
    GroupSlots groups;
};

// Blocks per multiprocessor: two where the registers suffice.
template <typename F, int kX> constexpr int kBlocks = F::kZeros && kX == 8 ? 1 : 2;

// Stages in the ring: as many as two blocks have room for.
template <typename F, int kX> constexpr int kStages = kX * XStage<F>::kBytes > 2048 ? 2 : 3;

// kX: sets of 8 rows of x in a tile.
template <typename F, int kX>
__global__ void __launch_bounds__(kThreads, kBlocks<F, kX>)
    multiply_tiles(const __grid_constant__ Problem<typename F::X> a, const __grid_constant__ Plan plan) {
    cuda::grid_dependency_wait();
    using X = typename F::X;
    using Sum = typename F::Sum;
    using S = Stage<F>;
    constexpr int kRows = kX * kXRows, kRing = kStages<F, kX>;
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane / 4, t = lane % 4;
    const unsigned number = blockIdx.x / plan.parts, of_k = blockIdx.x - number * plan.parts;
    const uint32_t tile = a.x_tiles.quotient(number);
    const int64_t first_m = static_cast<int64_t>(number - tile * a.x_tiles.divisor) * kRows;
    const Weight &w = a.weight[0];
    const int64_t first_row = static_cast<int64_t>(tile) * kWeightRows + warp * kBandRows;
    const int64_t row_bytes = a.k * F::kBits / 8;
    const int first_stage = static_cast<int>(of_k) * plan.stages,
              all = static_cast<int>((row_bytes + kStageBytes - 1) / kStageBytes),
              stages = all - first_stage < plan.stages ? all - first_stage : plan.stages;
    auto *const memory = cuda::dynamic_shared<unsigned char>();

    weight_stream::WeightCopies<F> weights(lane);
    [[maybe_unused]] weight_stream::GroupCopies groups(lane);
    const bool whole_band = first_row + kBandRows <= w.n;
    weights.move_to(w, first_row);
    if constexpr (F::kGrouped) {
        groups.move_to(a, w, plan.groups, first_row);
    }
    const int whole = row_bytes / kStageBytes;
    const int64_t x_row = a.rows.ndim > 0 ? a.rows.strides[0][0] * static_cast<int64_t>(sizeof(X)) : 0;
    const int x_first = (warp * cuda::kWarp + lane) / XStage<F>::kChunks, // the first row of x that the thread copies
        x_chunk = (warp * cuda::kWarp + lane) % XStage<F>::kChunks, x_to = XStage<F>::place(x_first, x_chunk);
    const unsigned char *const x_from =
        reinterpret_cast<const unsigned char *>(a.x) + (first_m + x_first < a.m ? first_m + x_first : 0) * x_row;
    const auto start = [&](int i) {
        if (i < stages) {
            const int stage = first_stage + i;
            unsigned char *const at = memory + i % kRing * plan.stage_bytes;
            unsigned char *const slot = at + warp * plan.slot_bytes;
            if (whole_band && stage < whole && (!F::kGrouped || plan.groups.copy_bytes > 0)) {
                weights.start(w, stage, slot);
                if constexpr (F::kGrouped) {
                    groups.start(plan.groups, F::kZeros, stage, slot + S::kWeightBytes);
                }
            } else {
                weights.start_any(w, first_row, row_bytes, stage, slot);
                if constexpr (F::kGrouped) {
                    groups.start_any(plan.groups, F::kZeros, stage, slot + S::kWeightBytes);
                }
            }
            // Rows and columns that x does not have are zeros. A thread copies the same chunk of every kStep-th row.
            constexpr int kStep = kThreads / XStage<F>::kChunks;
            static_assert(kThreads % XStage<F>::kChunks == 0 && kStep % 4 == 0);
            const int64_t byte = static_cast<int64_t>(stage) * XStage<F>::kBytes + x_chunk * 16,
                          left = a.k * static_cast<int64_t>(sizeof(X)) - byte;
            const int there = static_cast<int>(left < 16 ? (left > 0 ? left : 0) : 16);
            unsigned char *const to = at + kWarps * plan.slot_bytes + x_to;
#pragma unroll 1 // the addresses would take the registers that sums need
            for (int row = 0; row < kRows; row += kStep) {
                if (kRows % kStep == 0 || x_first + row < kRows) {
                    const int bytes = first_m + x_first + row < a.m ? there : 0;
                    cuda::async_copy(to + row * XStage<F>::kBytes, bytes > 0 ? x_from + row * x_row + byte : x_from,
                                     bytes);
                }
            }
        }
        cuda::async_commit();
    };

    const int part = weight_stream::lane_part<F>(g, t);
    const bool one_step = a.group_shift == 5, two_steps = a.group_shift == 6; // per group; else four
    Sum sums[kX][4] = {};
    const auto multiply = [&](const unsigned char *at) {
        const unsigned char *const slot = at + warp * plan.slot_bytes, *const x = at + kWarps * plan.slot_bytes;
        const auto take = [&](int step, auto(&into)[kX][4], auto &of_x) {
            uint32_t values[kX][F::kXRegisters];
#pragma unroll
            for (int set = 0; set < kX; ++set) {
                XStage<F>::read(values[set], x + set * kXRows * XStage<F>::kBytes, g, t, step);
                F::arrange(values[set]);
                if constexpr (F::kZeros) {
                    F::add_x(values[set], of_x[set]);
                }
            }
            F::template multiply<kX>(slot, part, step, values, into);
        };
        if constexpr (F::kGrouped) {
            using Part = typename F::Part;
            const unsigned char *scales = slot + S::kWeightBytes + g * plan.groups.pitch;
            Part products[kX][4] = {}, of_x[kX][4] = {};
#pragma unroll 1
            for (int step = 0; step < S::kSteps; ++step) {
                take(step, products, of_x);
                if (step % 4 == 3 || one_step || (step % 2 == 1 && two_steps)) { // the group's last step
                    weight_stream::add_group<F>(sums, products, of_x,
                                                weight_stream::read_scales<F::kZeros>(plan.groups, scales));
                    weight_stream::clear(products);
                    weight_stream::clear(of_x);
                    scales += plan.groups.value;
                }
            }
        } else {
            Sum none[kX][4];
#pragma unroll
            for (int step = 0; step < S::kSteps; ++step) {
                take(step, sums, none);
            }
        }
    };
#pragma unroll 1
    for (int i = 0; i < kRing - 1; ++i) {
        start(i);
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
        cuda::async_wait<kRing - 2>();
        __syncthreads(); // the stage has arrived, and all warps are done with the one before
        start(i + kRing - 1);
        multiply(memory + i % kRing * plan.stage_bytes);
    }

    cuda::let_next_launch();
    // The sums go through shared memory, so that the epilogue is a short loop: unrolled it took 20 us (H100), to be read.
    constexpr int kPitch = static_cast<int>(kWeightRows) + 4;
    auto *const tile_sums = reinterpret_cast<Sum *>(memory);
    __syncthreads();
#pragma unroll
    for (int set = 0; set < kX; ++set) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            tile_sums[(set * kXRows + 2 * t + e % 2) * kPitch + warp * kBandRows + g + e / 2 * 8] = sums[set][e];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = warp * cuda::kWarp + lane; i < kRows * kWeightRows; i += kThreads) {
        const int64_t m = first_m + i / kWeightRows, n = static_cast<int64_t>(tile) * kWeightRows + i % kWeightRows;
        if (m < a.m && n < w.n) {
            const Sum sum = tile_sums[i / kWeightRows * kPitch + i % kWeightRows];
            if (plan.sums != nullptr) {
                static_cast<Sum *>(plan.sums)[of_k * plan.sums_part + m * plan.sums_row + n] = sum;
            } else {
                weight_stream::finish(a, w, m, n, static_cast<float>(sum));
            }
        }
    }
}

template <typename F, int kX>
void launch(const ExecutionContext &context, Problem<typename F::X> a, gemm::ScaledSums epilogue, void *workspace) {
    using S = Stage<F>;
    const Weight &w = a.weight[0];
    const Split split(a.m, w.n, a.k * F::kBits / 8);
    Plan plan{};
    plan.groups = S::groups(a);
    plan.slot_bytes = S::slot_bytes(plan.groups);
    plan.stage_bytes = kWarps * plan.slot_bytes + kX * kXRows * XStage<F>::kBytes;
    plan.parts = static_cast<unsigned>(split.parts);
    plan.stages = static_cast<int>(split.stages);
    if (split.parts > 1) {
        plan.sums = workspace;
        plan.sums_row = padded_columns(w.n);
        plan.sums_part = a.m * plan.sums_row;
    }
    const int64_t tiles = a.cut(kX * kXRows, kWeightRows);
    cuda::launch(context, multiply_tiles<F, kX>, cuda::grid_x(tiles * split.parts), dim3(cuda::kWarp, kWarps),
                 static_cast<size_t>(kStages<F, kX> * plan.stage_bytes), a, plan);
    if (split.parts > 1) {
        TensorView &sums = epilogue.sums;
        sums.data = workspace;
        sums.dtype = std::is_same_v<typename F::Sum, float> ? INFINI_DTYPE_F32 : INFINI_DTYPE_I32;
        sums.ndim = 3;
        const int64_t shape[] = {split.parts, a.m, w.n}, strides[] = {plan.sums_part, plan.sums_row, 1};
        std::copy(shape, shape + 3, sums.shape);
        std::copy(strides, strides + 3, sums.strides);
        gemm::scale_sums(context, epilogue);
    }
}

// Whether the product is computed here: not if addresses or rows are not aligned to 16 bytes, or y is strided.
template <typename F> bool takes(const Problem<typename F::X> &a) {
    return fits(a.m, a.weight[0].n, a.k * F::kBits / 8) && a.weights == 1 && a.k > 0 && a.weight[0].whole &&
           a.x_whole && a.rows.ndim <= 1 && a.y_column == 1 && a.beta == 0 && a.residual == nullptr;
}

// y = x @ weight^T with the epilogue of `a`, which `epilogue` repeats (its sums are set here). Call only if takes(a).
// workspace: workspace_bytes(m, n, bytes of a row).
template <typename F>
void multiply(const ExecutionContext &context, const Problem<typename F::X> &a, const gemm::ScaledSums &epilogue,
              void *workspace) {
    if constexpr (F::kZeros) {
        if (a.zeros.data == nullptr) {
            return multiply<typename F::WithoutZeros>(context, a, epilogue, workspace);
        }
    }
    if (a.m <= 4 * kXRows) {
        launch<F, 4>(context, a, epilogue, workspace);
    } else {
        launch<F, 8>(context, a, epilogue, workspace);
    }
}

} // namespace infini::weight_tiles
