// Products of rows of x with weights that are read once from memory: y = x @ weight^T, for linear, fused_linear and
// gemm with few rows, and for the quantized formats. Half types and int8 x use the tensor cores; for float x see
// float_stream.cuh.
//
// A thread block handles 16 rows of the weight, and its 8 warps split k: they take turns at stages of 128 bytes per
// row, which are copied to shared memory some stages ahead (weight_stages.cuh) and multiplied according to their format
// (weight_formats.cuh). The warps' sums are added in order. So the order of a sum depends on k alone (for int4 on the
// group too), and a row of x has the same bits in any batch.
// Limit: memory bandwidth of the weight's bytes, 4.3 TB/s on an H200: 18.6 bytes per clock for each of 132
// multiprocessors, each of which can issue 440 instructions in the time of a stage (2 KB); docs/gpu.md counts them.
// About 23 KB must be in flight per multiprocessor. A block has 64 KB, less if k is short; there are three blocks per
// multiprocessor up to 8 rows of x, two beyond.
#pragma once

#include <algorithm>

#include "cuda/launch.cuh"
#include "float_stream.cuh"
#include "streamed_rows.h"
#include "weight_formats.cuh"

namespace infini::weight_stream {

constexpr int kTileRows = 8; // rows of x that the tensor cores take at once

// The block's shared memory: a ring of slots per warp, reused for the warps' sums at the end.
struct Ring {
    int slot_bytes, warp_bytes;
    GroupSlots groups;
};

// How many steps ahead x is loaded into registers; four tiles have none to spare.
template <typename F, int kTiles>
constexpr int kAhead = kTiles == 4 ? 0 : std::min((F::kGrouped ? 12 : 16) / F::kXRegisters, Stage<F>::kSteps);

// Blocks per multiprocessor. For sm_100 the compiler needs a few more registers than three blocks leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kBlocksOfFewRows = 2;
#else
constexpr int kBlocksOfFewRows = 3;
#endif

template <typename F, int kTiles>
__global__ void __launch_bounds__(kWarps *cuda::kWarp, kTiles == 1 ? kBlocksOfFewRows : 2)
    stream(const __grid_constant__ Problem<typename F::X> a, const __grid_constant__ Ring ring) {
    cuda::grid_dependency_wait();
    using X = typename F::X;
    using Sum = typename F::Sum;
    using S = Stage<F>;
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane / 4, t = lane % 4;
    const uint32_t block = a.x_tiles.quotient(blockIdx.x);
    const int64_t first_m = static_cast<int64_t>(blockIdx.x - block * a.x_tiles.divisor) * (kTiles * kTileRows);
    const Weight &w = a.weight[F::kMaxWeights == 1 ? 0 : weight_of(a, block)];
    // If the last block has fewer than 16 rows, it also reads rows of the previous block, but writes only its own.
    const int64_t own_row = (block - w.first_block) * kBlockRows,
                  first_row = own_row + kBlockRows <= w.n || w.n < kBlockRows ? own_row : w.n - kBlockRows;
    const int64_t row_bytes = a.k * F::kBits / 8;
    auto *const memory = cuda::dynamic_shared<unsigned char>();
    unsigned char *const slots = memory + warp * ring.warp_bytes;

    // Rows beyond the last row of x read the first row again; their sums are not written.
    const unsigned char *x[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const int64_t m = first_m + i * kTileRows + g;
        int64_t at[2];
        a.rows.locate(m < a.m ? m : 0, at);
        x[i] = reinterpret_cast<const unsigned char *>(a.x + at[0] + t * F::kLane);
        cuda::keep_in_register(x[i]);
    }
    // The warp handles stages warp, warp + kWarps, ...; all but the last are whole.
    const auto mine_of = [&](int64_t stages) {
        return static_cast<int>(stages > warp ? (stages - warp + kWarps - 1) / kWarps : 0);
    };
    const int mine = mine_of((row_bytes + kStageBytes - 1) / kStageBytes);
    const bool aligned = w.whole && a.x_whole && (!F::kGrouped || ring.groups.copy_bytes > 0);
    const int whole = aligned && w.n >= kBlockRows ? mine_of(row_bytes / kStageBytes) : 0;

    const WeightCopies<F> weights(w, first_row, lane);
    [[maybe_unused]] const GroupCopies groups(a, w, ring.groups, first_row, lane);
    const auto start = [&](int i, unsigned char *slot) {
        const int stage = warp + i * kWarps;
        if (i < whole) {
            weights.start(w, stage, slot);
            if constexpr (F::kGrouped) {
                groups.start(ring.groups, F::kZeros, stage, slot + S::kWeightBytes);
            }
        } else if (i < mine) {
            weights.start_any(w, first_row, row_bytes, stage, slot);
            if constexpr (F::kGrouped) {
                groups.start_any(ring.groups, F::kZeros, stage, slot + S::kWeightBytes);
            }
        }
        cuda::async_commit();
    };

    int part = lane_part<F>(g, t);
    cuda::keep_in_register(part);
    Sum sums[kTiles][4] = {};
    const bool one_step = a.group_shift == 5, two_steps = a.group_shift == 6; // per group; else four
    const auto multiply = [&](int i, const unsigned char *slot, auto is_whole) {
        constexpr bool kWhole = decltype(is_whole)::value;
        constexpr int kLoaded = kWhole ? kAhead<F, kTiles> : 0, kBuffers = kLoaded > 0 ? kLoaded : 1;
        [[maybe_unused]] constexpr int kUnroll = kWhole && kTiles < 4 ? S::kSteps : 1;
        const int stage = warp + i * kWarps;
        uint32_t values[kBuffers][kTiles][F::kXRegisters];
        const auto load = [&](int step) {
            const int64_t at = static_cast<int64_t>(stage) * S::kElements + step * 4 * F::kLane; // element of k
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                load_x<kWhole, X>(values[step % kBuffers][tile], x[tile] + at * sizeof(X), a.k - at - t * F::kLane);
            }
        };
#pragma unroll
        for (int step = 0; step < kLoaded; ++step) {
            load(step);
        }
        cuda::async_wait<kStages - 1>();
        __syncwarp(); // the stage has arrived
        [[maybe_unused]] const unsigned char *scales = slot + S::kWeightBytes + g * ring.groups.pitch;
        const auto take = [&](int step, auto &into) {
            if constexpr (kLoaded == 0) {
                load(step);
            }
            if constexpr (!kWhole) {
                __syncwarp(); // lanes diverge at the end of k, and mma needs all of them
            }
            auto &mine_of_x = values[step % kBuffers];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                F::arrange(mine_of_x[tile]);
            }
            F::template multiply<kTiles>(slot, part, step, mine_of_x, into);
            if (kLoaded > 0 && step + kLoaded < S::kSteps) {
                load(step + kLoaded);
            }
        };
        if constexpr (F::kGrouped) {
            GroupSums<typename F::Part, kTiles> of_group;
#pragma unroll kUnroll
            for (int step = 0; step < S::kSteps; ++step) {
                take(step, of_group);
                if (step % 4 == 3 || one_step || (step % 2 == 1 && two_steps)) { // the group's last step
                    const GroupScales group = read_scales<F::kZeros>(ring.groups, scales);
                    add_group<F>(sums, of_group, group);
                    of_group = {};
                    scales += ring.groups.value;
                }
            }
        } else {
#pragma unroll kUnroll
            for (int step = 0; step < S::kSteps; ++step) {
                take(step, sums);
            }
        }
        __syncwarp(); // all lanes are done with the slot
    };
#pragma unroll 1
    for (int i = -kStages; i < mine; ++i) {
        unsigned char *const slot = slots + (i & (kStages - 1)) * ring.slot_bytes;
        if (i >= 0) {
            i < whole ? multiply(i, slot, std::true_type{}) : multiply(i, slot, std::false_type{});
        }
        start(i + kStages, slot); // the slot is free again
    }

    cuda::let_next_launch();
    // Adds the warps' sums in the order of the warps.
    constexpr int kPartPitch = kBlockRows + 4, kRows = kTiles * kTileRows;
    cuda::async_wait<0>();
    __syncthreads();
    auto *const parts = reinterpret_cast<Sum *>(memory);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            parts[(warp * kRows + i * kTileRows + 2 * t + e % 2) * kPartPitch + g + e / 2 * 8] = sums[i][e];
        }
    }
    __syncthreads();
    for (int i = warp * cuda::kWarp + lane; i < kRows * kBlockRows; i += kWarps * cuda::kWarp) {
        const int m = i / kBlockRows, row = i % kBlockRows;
        if (first_m + m < a.m && first_row + row < w.n && first_row + row >= own_row) {
            Sum sum = 0;
#pragma unroll
            for (int part = 0; part < kWarps; ++part) {
                sum += parts[(part * kRows + m) * kPartPitch + row];
            }
            finish(a, w, first_m + m, first_row + row, static_cast<float>(sum));
        }
    }
}

template <typename F, int kTiles> void launch(const ExecutionContext &context, Problem<typename F::X> a) {
    using S = Stage<F>;
    constexpr int kRows = kTiles * kTileRows, kPartBytes = kWarps * kRows * (kBlockRows + 4) * 4;
    const unsigned grid = a.share((a.m + kRows - 1) / kRows);
    Ring ring{};
    ring.groups = S::groups(a);
    ring.slot_bytes = S::slot_bytes(ring.groups);
    const int64_t stages = (a.k + S::kElements * kWarps - 1) / (S::kElements * kWarps); // of the first warp
    ring.warp_bytes = ring.slot_bytes * static_cast<int>(stages < kStages ? stages : kStages);
    const int ring_bytes = kWarps * ring.warp_bytes;
    cuda::launch(context, stream<F, kTiles>, grid, dim3(cuda::kWarp, kWarps),
                 static_cast<size_t>(ring_bytes > kPartBytes ? ring_bytes : kPartBytes), a, ring);
}

// kMaxTiles: the most tiles of 8 rows of x per pass over the weight: 1, 2 or 4.
template <typename F, int kMaxTiles> void multiply(const ExecutionContext &context, const Problem<typename F::X> &a) {
    if constexpr (F::kGrouped) {
        if constexpr (F::kZeros) {
            if (a.zeros.data == nullptr) {
                return multiply<typename F::WithoutZeros, kMaxTiles>(context, a);
            }
        }
    }
    if (a.m <= kTileRows) {
        launch<F, 1>(context, a);
    } else if (kMaxTiles <= 2 || a.m <= 2 * kTileRows) {
        launch<F, 2>(context, a);
    } else {
        launch<F, kMaxTiles>(context, a);
    }
}

// ---- used by several ops, so compiled once, in weight_stream.cu ----

constexpr int kInt8Tiles = 4;

extern template void multiply<Dense<bf16>, 2>(const ExecutionContext &, const Problem<bf16> &);
extern template void multiply<Dense<f16>, 2>(const ExecutionContext &, const Problem<f16> &);
extern template void multiply<Int8ByInt8, kInt8Tiles>(const ExecutionContext &, const Problem<int8_t> &);
extern template void multiply_floats<32>(const ExecutionContext &, Problem<float>);

inline void multiply_dense(const ExecutionContext &context, const Problem<bf16> &a) {
    multiply<Dense<bf16>, 2>(context, a);
}
inline void multiply_dense(const ExecutionContext &context, const Problem<f16> &a) {
    multiply<Dense<f16>, 2>(context, a);
}
inline void multiply_dense(const ExecutionContext &context, const Problem<float> &a) {
    multiply_floats<32>(context, a);
}

} // namespace infini::weight_stream
