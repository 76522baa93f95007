// Products of rows of x with weights that are read once from memory: y = x @ weight^T, for linear, fused_linear and
// gemm with few rows, and for the quantized formats. Half types and int8 x use the tensor cores; for float x see
// float_stream.cuh.
//
// The product is cut into tiles of 8, 16 or 32 rows of x by 16 rows of the weight. A thread block computes one tile after
// another. Its 8 warps split k: they take turns at stages of 128 bytes per row, which are copied to shared memory some
// stages ahead, also of the next tile (weight_stages.cuh), and multiplied according to their format
// (weight_formats.cuh). The warps' sums are added in order. So the order of a sum depends on k alone (for int4 on the
// group too), and a row of x has the same bits in any batch.
//
// Limit: memory bandwidth of the weight's bytes, 4.3 TB/s on an H200: 18.6 bytes per clock for each of 132
// multiprocessors, each of which can issue 440 instructions in the time of a stage (2 KB); docs/gpu.md counts them.
// About 23 KB must be in flight per multiprocessor. Beyond 8 rows of x the latency of x, which each warp loads from the
// L2 cache for itself. Tried on an H100 and slower: 32 or 64 rows of the weight for each part of x that was loaded.
#pragma once

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/multiprocessors.cuh"
#include "float_stream.cuh"
#include "streamed_rows.h"
#include "weight_formats.cuh"

namespace infini::weight_stream {

constexpr int kXRows = 8; // rows of x that the tensor cores take at once

// Blocks per multiprocessor, by their registers and shared memory. For sm_80 and sm_100 the compiler needs a few more
// registers than three blocks leave.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
constexpr int kBlocksOfFewRows = 2;
#else
constexpr int kBlocksOfFewRows = 3;
#endif
template <int kX> constexpr int kBlocks = kX == 1 ? kBlocksOfFewRows : 2;

constexpr int kStages = 2; // per warp, in flight or in use; a power of two. With 4, int8 took a tenth longer (H100)

// The block's shared memory: a ring of slots per warp, then the warps' sums.
struct Ring {
    int slot_bytes, warp_bytes;
    int sums_at;
    GroupSlots groups;
};

// How many steps ahead x is loaded into registers; four sets of rows have none to spare.
template <typename F, int kX>
constexpr int kAhead = kX == 4 ? 0
                               : std::min(F::kZeros     ? 1
                                          : F::kGrouped ? 2
                                                        : 16 / F::kXRegisters,
                                          Stage<F>::kSteps);

// kX: sets of 8 rows of x in a tile.
template <typename F, int kX>
__global__ void __launch_bounds__(kWarps *cuda::kWarp, kBlocks<kX>)
    stream(const __grid_constant__ Problem<typename F::X> a, const __grid_constant__ Ring ring) {
    cuda::grid_dependency_wait();
    using X = typename F::X;
    using Sum = typename F::Sum;
    using S = Stage<F>;
    const int lane = threadIdx.x, warp = threadIdx.y, g = lane / 4, t = lane % 4;
    auto *const memory = cuda::dynamic_shared<unsigned char>();
    unsigned char *const slots = memory + warp * ring.warp_bytes;
    const auto slot_of = [&](int i) { return slots + (i & (kStages - 1)) * ring.slot_bytes; };

    // Where a tile is. If a weight's last tile lacks rows, it also reads rows of the one before, but writes only its own.
    struct Tile {
        const Weight &w;
        int64_t first_m, own_row, first_row;
    };
    const auto locate = [&](uint32_t number) -> Tile {
        const uint32_t tile = a.x_tiles.quotient(number);
        const Weight &w = a.weight[F::kMaxWeights == 1 ? 0 : weight_of(a, tile)];
        const int64_t own_row = (tile - w.first_tile) * kBandRows;
        return {w, static_cast<int64_t>(number - tile * a.x_tiles.divisor) * (kX * kXRows), own_row,
                own_row + kBandRows <= w.n || w.n < kBandRows ? own_row : w.n - kBandRows};
    };

    // The warp handles stages warp, warp + kWarps, ... of a tile; all but the last are whole.
    const int64_t row_bytes = a.k * F::kBits / 8;
    const auto mine_of = [&](int64_t stages) {
        return static_cast<int>(stages > warp ? (stages - warp + kWarps - 1) / kWarps : 0);
    };
    const int mine = mine_of((row_bytes + kStageBytes - 1) / kStageBytes);
    const auto whole_of = [&](const Weight &w) {
        const bool aligned = w.whole && a.x_whole && (!F::kGrouped || ring.groups.copy_bytes > 0);
        return aligned && w.n >= kBandRows ? mine_of(row_bytes / kStageBytes) : 0;
    };

    // Copies: the next stage of this tile, or the first one of the block's next tile.
    WeightCopies<F> weights(lane);
    [[maybe_unused]] GroupCopies groups(lane);
    uint32_t copied_tile = mine > 0 ? blockIdx.x : a.tiles;
    const Weight *copied_weight = a.weight; // of copied_tile
    int copied = 0, copied_whole = 0;       // its stages, and how many of them are whole
    const auto turn_to_copied_tile = [&] {
        if (copied_tile < a.tiles) {
            const Tile tile = locate(copied_tile);
            copied_weight = &tile.w;
            weights.move_to(tile.w, tile.first_row);
            if constexpr (F::kGrouped) {
                groups.move_to(a, tile.w, ring.groups, tile.first_row);
            }
            copied = 0;
            copied_whole = whole_of(tile.w);
        }
    };
    const auto start = [&](unsigned char *slot) {
        if (copied_tile < a.tiles) {
            const int stage = warp + copied * kWarps;
            if (copied < copied_whole) {
                const Weight &w = F::kMaxWeights == 1 ? a.weight[0] : *copied_weight;
                weights.start(w, stage, slot);
                if constexpr (F::kGrouped) {
                    groups.start(ring.groups, F::kZeros, stage, slot + S::kWeightBytes);
                }
            } else {
                const Tile tile = locate(copied_tile);
                weights.start_any(tile.w, tile.first_row, row_bytes, stage, slot);
                if constexpr (F::kGrouped) {
                    groups.start_any(ring.groups, F::kZeros, stage, slot + S::kWeightBytes);
                }
            }
            if (++copied == mine) {
                copied_tile += gridDim.x;
                turn_to_copied_tile();
            }
        }
        cuda::async_commit();
    };

    const unsigned char *x[kX];
    int part = lane_part<F>(g, t);
    cuda::keep_in_register(part);
    const bool one_step = a.group_shift == 5, two_steps = a.group_shift == 6; // per group; else four
    const auto multiply = [&](int i, const unsigned char *slot, Sum(&sums)[kX][4], auto is_whole) {
        constexpr bool kWhole = decltype(is_whole)::value;
        constexpr int kLoaded = kWhole ? kAhead<F, kX> : 0, kBuffers = kLoaded > 0 ? kLoaded : 1;
        [[maybe_unused]] constexpr int kUnroll = kWhole && kX < 4 ? S::kSteps : 1;
        const int stage = warp + i * kWarps;
        uint32_t values[kBuffers][kX][F::kXRegisters];
        const auto load = [&](int step) {
            const int64_t at = static_cast<int64_t>(stage) * S::kElements + step * 4 * F::kLane; // element of k
#pragma unroll
            for (int tile = 0; tile < kX; ++tile) {
                load_x<kWhole, X>(values[step % kBuffers][tile], x[tile] + at * sizeof(X), a.k - at - t * F::kLane);
            }
        };
#pragma unroll
        for (int step = 0; step < kLoaded; ++step) {
            load(step);
        }
        cuda::async_wait<kStages - 1>();
        __syncwarp(); // the stage has arrived
        const auto take = [&](int step, auto(&into)[kX][4], auto &of_x) {
            if constexpr (kLoaded == 0) {
                load(step);
            }
            if constexpr (!kWhole) {
                __syncwarp(); // lanes diverge at the end of k, and mma needs all of them
            }
            auto &mine_of_x = values[step % kBuffers];
#pragma unroll
            for (int tile = 0; tile < kX; ++tile) {
                F::arrange(mine_of_x[tile]);
                if constexpr (F::kZeros) {
                    F::add_x(mine_of_x[tile], of_x[tile]);
                }
            }
            F::template multiply<kX>(slot, part, step, mine_of_x, into);
            if (kLoaded > 0 && step + kLoaded < S::kSteps) {
                load(step + kLoaded);
            }
        };
        if constexpr (F::kGrouped) {
            using Part = typename F::Part;
            const unsigned char *scales = slot + S::kWeightBytes + g * ring.groups.pitch;
            Part products[kX][4] = {}, of_x[kX][4] = {};
#pragma unroll kUnroll
            for (int step = 0; step < S::kSteps; ++step) {
                take(step, products, of_x);
                if (step % 4 == 3 || one_step || (step % 2 == 1 && two_steps)) { // the group's last step
                    add_group<F>(sums, products, of_x, read_scales<F::kZeros>(ring.groups, scales));
                    clear(products);
                    clear(of_x);
                    scales += ring.groups.value;
                }
            }
        } else {
            Sum none[kX][4];
#pragma unroll kUnroll
            for (int step = 0; step < S::kSteps; ++step) {
                take(step, sums, none);
            }
        }
        __syncwarp(); // all lanes are done with the slot
    };

    turn_to_copied_tile();
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
        start(slot_of(i));
    }
    int taken = 0; // stages
#pragma unroll 1
    for (uint32_t number = blockIdx.x; number < a.tiles; number += gridDim.x) {
        int whole;
        {
            const Tile tile = locate(number);
            whole = whole_of(tile.w);
            // Rows beyond the last row of x read the first row again; their sums are not written.
#pragma unroll
            for (int i = 0; i < kX; ++i) {
                const int64_t m = tile.first_m + i * kXRows + g;
                int64_t at[2];
                a.rows.locate(m < a.m ? m : 0, at);
                x[i] = reinterpret_cast<const unsigned char *>(a.x + at[0] + t * F::kLane);
                cuda::keep_in_register(x[i]);
            }
        }
        Sum sums[kX][4] = {};
#pragma unroll 1
        for (int i = 0; i < mine; ++i, ++taken) {
            unsigned char *const slot = slot_of(taken);
            i < whole ? multiply(i, slot, sums, std::true_type{}) : multiply(i, slot, sums, std::false_type{});
            start(slot); // it is free again
        }
        if (number + gridDim.x >= a.tiles) {
            cuda::let_next_launch();
        }

        // Adds the warps' sums in the order of the warps.
        constexpr int kPitch = kBandRows + 4, kRows = kX * kXRows;
        auto *const parts = reinterpret_cast<Sum *>(memory + ring.sums_at);
        const Tile tile = locate(number);
#pragma unroll
        for (int i = 0; i < kX; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                parts[(warp * kRows + i * kXRows + 2 * t + e % 2) * kPitch + g + e / 2 * 8] = sums[i][e];
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = warp * cuda::kWarp + lane; i < kRows * kBandRows; i += kWarps * cuda::kWarp) {
            const int64_t m = tile.first_m + i / kBandRows, row = tile.first_row + i % kBandRows;
            if (m < a.m && row < tile.w.n && row >= tile.own_row) {
                Sum sum = 0;
#pragma unroll
                for (int from = 0; from < kWarps; ++from) {
                    sum += parts[(from * kRows + i / kBandRows) * kPitch + i % kBandRows];
                }
                finish(a, tile.w, m, row, static_cast<float>(sum));
            }
        }
        __syncthreads(); // before the next tile's sums
    }
}

template <typename F, int kX> void launch(const ExecutionContext &context, Problem<typename F::X> a) {
    using S = Stage<F>;
    constexpr int kSumBytes = kWarps * kX * kXRows * (kBandRows + 4) * 4;
    const unsigned tiles = a.cut(kX * kXRows, kBandRows),
                   at_once = static_cast<unsigned>(cuda::multiprocessors(context)) * kBlocks<kX>;
    Ring ring{};
    ring.groups = S::groups(a);
    ring.slot_bytes = S::slot_bytes(ring.groups);
    ring.warp_bytes = ring.slot_bytes * kStages;
    ring.sums_at = kWarps * ring.warp_bytes;
    cuda::launch(context, stream<F, kX>, std::min(tiles, at_once), dim3(cuda::kWarp, kWarps),
                 static_cast<size_t>(ring.sums_at + kSumBytes), a, ring);
}

// kMostX: the most sets of 8 rows of x in a tile: 2 or 4.
template <typename F, int kMostX> void multiply(const ExecutionContext &context, const Problem<typename F::X> &a) {
    if constexpr (F::kZeros) {
        if (a.zeros.data == nullptr) {
            return multiply<typename F::WithoutZeros, kMostX>(context, a);
        }
    }
    if (a.m <= kXRows) {
        launch<F, 1>(context, a);
    } else if (kMostX == 2 || a.m <= 2 * kXRows) {
        launch<F, 2>(context, a);
    } else {
        launch<F, kMostX>(context, a);
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
