// Attention of few rows (queries x query heads of a key head, up to 16) on tensor cores, for halves and int8 caches
// with heads of up to 256: decode. All query heads of a key head share the loads of K and V. The warps of a block split
// its keys: each copies 16 keys of every tile of 64 for itself, and keeps its own sums of all rows.
// The products are transposed: scores are K q^T, keys x rows, and the result is V^T p^T, columns x rows. mma's second
// operand has 8 columns, so that up to 8 rows cost half of what 16 do.
// Probabilities are sums of halves that make up a whole float (two of float16, three of bfloat16): only the result is
// rounded. Limit: K and V are read once: 512 bytes a key for a head of 128 halves, 264 in int8 with its scales.
#pragma once

#include "tensor_core_tiles.cuh"

namespace infini::attention::nvidia {

template <typename E, int kSize, int kRowTiles> struct DecodeShape {
    static constexpr int kRows = 8 * kRowTiles;
    static constexpr int kStages = kIsInt8<E> ? (kSize == 256 ? 3 : 4) : kSize == 64 ? 4 : kSize == 128 ? 3 : 2;
    static constexpr bool kHoldQ = kSize * kRowTiles <= 256;                                             // in registers
    static constexpr int kBlocks = kSize == 256 ? 3 - kRowTiles : kRowTiles == 2 || !kIsInt8<E> ? 2 : 3; // of an SM
    static constexpr int kOutStride = kSize + 4; // of floats that are joined: fewer bank conflicts
    static constexpr int kStage = 2 * kWarpKeys * kSize, kWarpStages = kStages * kStage; // elements of a warp
    static constexpr size_t kShared =
        kRows * kSize * 2 + kWarps * kWarpStages * sizeof(E) + kStages * kTileScales<E> * sizeof(float);
    static_assert(kRows * kOutStride * sizeof(float) <= kWarpStages * sizeof(E));
};

// A warp's sums of the block's rows. In mma's layout the lane has of a tile of 8 rows: rows 2 (lane % 4) and the next,
// of keys (or columns) lane / 4 and lane / 4 + 8.
template <typename T, typename E, int kSize, int kRowTiles> struct DecodeRows {
    using Shape = DecodeShape<E, kSize, kRowTiles>;
    using V = ValueType<T, E>;
    static constexpr int kParts = nvidia::kParts<T, E, true>;

    float out[kSize / 16][kRowTiles][4] = {};
    Softmax<2 * kRowTiles> softmax;
    uint32_t q[Shape::kHoldQ ? kSize / 16 : 2][kRowTiles][2];
    LaneOffsets<E, kSize, false> offsets;

    // Columns 32 * pair to + 31 of the rows of q, to q[at] and q[at + 1].
    __device__ __forceinline__ void load_q(int at, const T *shared_q, int pair) {
        const unsigned lane = threadIdx.x % kWarp;
        uint32_t loaded[4];
        if constexpr (kRowTiles == 1) {
            cuda::load_matrices(loaded, chunk_of<kSize>(shared_q, lane % 8, 4 * pair + lane / 8));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                q[at + i / 2][0][i % 2] = loaded[i];
            }
        } else {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const unsigned chunk = 4 * pair + 2 * part + lane / 8 % 2;
                cuda::load_matrices(loaded, chunk_of<kSize>(shared_q, lane % 8 + lane / 16 * 8, chunk));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    q[at + part][i / 2][i % 2] = loaded[i];
                }
            }
        }
    }

    // Adds the keys `key` to key + 15, with rows at k and v; `visible`: all rows see all of them.
    __device__ __forceinline__ void attend(const Problem<T, E> &p, const T *shared_q,
                                           const typename Problem<T, E>::RowScores *rows, const E *k, const E *v,
                                           const float *scales, int64_t key, bool visible) {
        const int lane = threadIdx.x % kWarp;
        float products[2][kRowTiles][4] = {}; // two chains of sums: half the time
#pragma unroll
        for (int pair = 0; pair < kSize / 32; ++pair) {
            const int at = Shape::kHoldQ ? 2 * pair : 0;
            if constexpr (!Shape::kHoldQ) {
                load_q(0, shared_q, pair);
            }
            uint32_t a[2][4];
            load_keys<T>(a, k, offsets, pair);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int tile = 0; tile < kRowTiles; ++tile) {
                    cuda::mma<T>(products[i][tile], a[i], q[at + i][tile][0], q[at + i][tile][1]);
                }
            }
        }
        float scores[kRowTiles][4];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                scores[tile][e] = products[0][tile][e] + products[1][tile][e];
                if constexpr (kIsInt8<E>) {
                    scores[tile][e] *= scales[lane / 4 + e / 2 * 8];
                }
            }
        }
        if (!visible || !p.plain) {
#pragma unroll
            for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const auto &row = rows[8 * tile + 2 * (lane % 4) + e % 2];
                    const int64_t at = key + lane / 4 + e / 2 * 8;
                    float &x = scores[tile][e];
                    x = !p.sees(row.seen, at) ? -INFINITY : p.plain ? x : p.score(x, row, at);
                }
            }
        }
        float most[2 * kRowTiles];
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            most[i] = fmaxf(scores[i / 2][i % 2], scores[i / 2][i % 2 + 2]);
#pragma unroll
            for (int distance = 4; distance < kWarp; distance *= 2) {
                most[i] = fmaxf(most[i], __shfl_xor_sync(cuda::kAllLanes, most[i], distance));
            }
        }
        softmax.raise(most, p.exp2_unit, [&](const float (&factors)[2 *kRowTiles]) {
#pragma unroll
            for (int n = 0; n < kSize / 16; ++n) {
#pragma unroll
                for (int e = 0; e < 4 * kRowTiles; ++e) {
                    out[n][e / 4][e % 4] *= factors[e / 4 * 2 + e % 2];
                }
            }
        });
        softmax.subtract(scores, p, [](int tile, int e) { return 2 * tile + e % 2; });
        uint32_t parts[kParts][kRowTiles][2];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) { // of the keys
                float probabilities[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float exponent = scores[tile][2 * half + i];
                    probabilities[i] = cuda::fast_exp2(exponent);
                    softmax.sums[2 * tile + i] += probabilities[i];
                    if constexpr (kIsInt8<E>) { // a masked key counts nothing, also with an infinite or NaN scale
                        const bool seen = visible || exponent != -INFINITY;
                        probabilities[i] = seen ? probabilities[i] * scales[kWarpKeys + lane / 4 + half * 8] : 0.0f;
                    }
                }
                uint32_t of_pair[kParts];
                split<V>(of_pair, probabilities[0], probabilities[1]);
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    parts[part][tile][half] = cuda::transpose_matrix(of_pair[part]);
                }
            }
        }
#pragma unroll
        for (int pair = 0; pair < kSize / 32; ++pair) {
            uint32_t a[2][4];
            load_values<T>(a, v, offsets, pair);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int tile = 0; tile < kRowTiles; ++tile) {
                        cuda::mma<V>(out[2 * pair + i][tile], a[i], parts[part][tile][0], parts[part][tile][1]);
                    }
                }
            }
        }
    }

    // Stores the lane's sums of the block's first `rows` rows.
    __device__ __forceinline__ void store(float *joined, int rows) const {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            const int row = i / 2 * 8 + 2 * (lane % 4) + i % 2;
            if (row < rows) {
                float *const to = joined + row * Shape::kOutStride;
#pragma unroll
                for (int n = 0; n < kSize / 16; ++n) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        to[column_of<E>(16 * n + lane / 4 + half * 8)] = out[n][i / 2][2 * half + i % 2];
                    }
                }
            }
        }
    }
};

template <typename T, typename E, int kSize, int kRowTiles>
__global__ void __launch_bounds__(kThreads, DecodeShape<E, kSize, kRowTiles>::kBlocks)
    attend_few_rows(const __grid_constant__ Problem<T, E> p) {
    cuda::grid_dependency_wait();
    using Shape = DecodeShape<E, kSize, kRowTiles>;
    constexpr int kRows = Shape::kRows, kStages = Shape::kStages;
    INFINI_SHARED(unit, WorkTile); // for use after the keys: registers are scarce
    const WorkTile u = p.unit();
    if (u.rows == 0) {
        return;
    }
    if (threadIdx.x == 0) {
        unit = u;
    }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    // Rows of q, then each warp's stages, a stage its 16 rows of K and those of V, then the stages' scales.
    T *const shared_q = cuda::dynamic_shared<T>();
    E *const tiles = reinterpret_cast<E *>(shared_q + kRows * kSize), *const mine = tiles + warp * Shape::kWarpStages;
    float *const scales = reinterpret_cast<float *>(tiles + kWarps * Shape::kWarpStages) + warp * 2 * kWarpKeys;

    const int keys = keys_of(u);
    INFINI_SHARED(starts, CacheStart<E>[kWarps][2]);
    KeyCopy<T, E, kSize> copy(p, u, warp * kWarpKeys, starts[warp]);
    const auto start = [&](int tile, int stage) { // tile: by its first key
        if (tile < keys) {
            E *const k = mine + stage * Shape::kStage;
            copy.start(k, k + kWarpKeys * kSize, scales + stage * kTileScales<E>);
        }
        cuda::async_commit();
    };
    for (int stage = 0; stage + 1 < kStages; ++stage) {
        start(stage * kTileKeys, stage);
    }

    INFINI_SHARED(rows, typename Problem<T, E>::RowScores[kRows]);
    if (threadIdx.x < kRows) {
        rows[threadIdx.x] = p.row_scores(u, u.first_row + threadIdx.x);
    }
    load_q_rows<kRows, kSize>(shared_q, p, u);
    __syncthreads();
    DecodeRows<T, E, kSize, kRowTiles> sums_of_rows;
    if constexpr (Shape::kHoldQ) {
#pragma unroll
        for (int pair = 0; pair < kSize / 32; ++pair) {
            sums_of_rows.load_q(2 * pair, shared_q, pair);
        }
    }
    const Visible visible(rows[0], rows[kRows - 1], p.window, u);
    for (int tile = 0, stage = 0; tile < keys; tile += kTileKeys) {
        cuda::async_wait<kStages - 2>();
        __syncwarp(); // the tile has arrived, and all lanes are done with the previous one
        start(tile + (kStages - 1) * kTileKeys, stage == 0 ? kStages - 1 : stage - 1);
        const int key = tile + warp * kWarpKeys;
        if (key < keys) {
            const E *const k = mine + stage * Shape::kStage;
            sums_of_rows.attend(p, shared_q, rows, k, k + kWarpKeys * kSize, scales + stage * kTileScales<E>,
                                u.begin + key, visible.all(key, kWarpKeys));
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cuda::let_next_launch();
    sums_of_rows.softmax.template finish<4, 8, 16>(p);

    INFINI_SHARED(sums, float[kWarps][kRows]);
    INFINI_SHARED(largest, float[kWarps][kRows]);
    constexpr int kWarpFloats = Shape::kWarpStages * static_cast<int>(sizeof(E)) / static_cast<int>(sizeof(float));
    float *const joined = reinterpret_cast<float *>(tiles);
    __syncwarp(); // all lanes are done with the last tile
    sums_of_rows.store(joined + warp * kWarpFloats, unit.rows);
    if (lane < 4) {
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i) {
            const int row = i / 2 * 8 + 2 * lane + i % 2;
            sums[warp][row] = sums_of_rows.softmax.sums[i];
            largest[warp][row] = sums_of_rows.softmax.largest[i];
        }
    }
    __syncthreads();
    for (int row = warp; row < unit.rows; row += kWarps) {
        join_warps(p, unit, unit.first_row + row, rows[row].sink, 0, kSize, &sums[0][row], &largest[0][row], kRows,
                   joined + row * Shape::kOutStride, kWarpFloats);
    }
}

} // namespace infini::attention::nvidia
