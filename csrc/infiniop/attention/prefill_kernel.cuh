// Attention of many rows (queries x query heads of a key head) on tensor cores, for halves and int8 caches with heads
// of up to 256: prefill. Each warp has 16 rows; all query heads of a key head share the loads of K and V, and all warps
// of a block share its tiles of 64 keys. The tensor cores are the limit, so probabilities are rounded to the half type,
// as in torch's scaled_dot_product_attention, and multiplied with V once (twice over an int8 cache in float16). kExact
// splits them into parts that sum to a whole float, as decode does, for 1.5 to 2 times the products.
// Limit: 4 flops for each visible (row, key, column), at mma.sync's share of the tensor cores' speed.
#pragma once

#include "tensor_core_tiles.cuh"

namespace infini::attention::nvidia {

constexpr int kWarpRows = 16;

template <typename E, int kSize> struct PrefillShape {
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kStages = 2;
    static constexpr int kStep = kSize == 256 ? 16 : 32; // keys of which a warp has scores at a time
    static constexpr bool kHoldQ = kSize <= 128;         // in registers
    static constexpr int kStage = 2 * kTileKeys * kSize; // elements
    static constexpr size_t kShared =
        kRows * kSize * 2 + kStages * (kStage * sizeof(E) + kTileScales<E> * sizeof(float));
};

// A warp's 16 rows: their sums over the keys so far. The lane has parts of rows lane / 4 and lane / 4 + 8, in mma's
// layout.
template <typename T, typename E, int kSize, bool kExact> struct PrefillRows {
    using Shape = PrefillShape<E, kSize>;
    using V = ValueType<T, E>;
    static constexpr int kParts = nvidia::kParts<T, E, kExact>;

    float out[kSize / 8][4] = {};
    Softmax<2> softmax;
    uint32_t q[Shape::kHoldQ ? kSize / 16 : 1][4];
    LaneOffsets<E, kSize, true> offsets;

    // 16 rows and columns of q from shared memory.
    __device__ __forceinline__ void load_q(uint32_t (&a)[4], const T *shared_q, int part) const {
        const unsigned lane = threadIdx.x % kWarp;
        cuda::load_matrices(a, chunk_of<kSize>(shared_q, lane % 16, 2 * part + lane / 16));
    }

    // Adds the keys `key` to key + kStep - 1, with rows at k and v (a multiple of 8 rows into a tile); `visible`: all
    // rows see all of them. rows: the first of the warp's.
    __device__ __forceinline__ void attend(const Problem<T, E> &p, const T *shared_q,
                                           const typename Problem<T, E>::RowScores *rows, const E *k, const E *v,
                                           const float *scales, int64_t key, bool visible) {
        constexpr int kStep = Shape::kStep;
        const int lane = threadIdx.x % kWarp;
        float scores[kStep / 8][4] = {};
#pragma unroll
        for (int pair = 0; pair < kSize / 32; ++pair) {
            uint32_t loaded[2][4]; // of q, where it is not held
            if constexpr (!Shape::kHoldQ) {
                load_q(loaded[0], shared_q, 2 * pair);
                load_q(loaded[1], shared_q, 2 * pair + 1);
            }
#pragma unroll
            for (int n = 0; n < kStep / 16; ++n) {
                uint32_t b[2][4];
                load_keys<T>(b, k + 16 * n * kSize, offsets, pair);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const auto &a = Shape::kHoldQ ? q[Shape::kHoldQ ? 2 * pair + i : 0] : loaded[i];
                    cuda::mma<T>(scores[2 * n], a, b[i][0], b[i][1]);
                    cuda::mma<T>(scores[2 * n + 1], a, b[i][2], b[i][3]);
                }
            }
        }
        // The scales of keys 8 * n + 2 * (lane % 4) and the next: K's, V's 16 floats further.
        const auto scales_of = [&](int n, int further) {
            const float *const from = scales + n / 2 * 2 * kWarpKeys + n % 2 * 8 + 2 * (lane % 4) + further;
            return *reinterpret_cast<const float2 *>(from);
        };
        if constexpr (kIsInt8<E>) {
#pragma unroll
            for (int n = 0; n < kStep / 8; ++n) {
                const float2 two = scales_of(n, 0);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    scores[n][e] *= e % 2 == 0 ? two.x : two.y;
                }
            }
        }
        if (!visible || !p.plain) {
            const auto &row = rows[lane / 4], &other = rows[lane / 4 + 8];
            const int64_t seen[2] = {row.seen, other.seen};
#pragma unroll
            for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float &x = scores[n][e];
                    const int64_t at = key + 8 * n + 2 * (lane % 4) + e % 2;
                    x = !p.sees(seen[e / 2], at) ? -INFINITY : p.plain ? x : p.score(x, e < 2 ? row : other, at);
                }
            }
        }
        float most[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int n = 0; n < kStep / 8; ++n) {
                most[i] = fmaxf(most[i], fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
            }
            most[i] = fmaxf(most[i], __shfl_xor_sync(cuda::kAllLanes, most[i], 1));
            most[i] = fmaxf(most[i], __shfl_xor_sync(cuda::kAllLanes, most[i], 2));
        }
        softmax.raise(most, p.exp2_unit, [&](const float (&factors)[2]) {
#pragma unroll
            for (int n = 0; n < kSize / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    out[n][e] *= factors[e / 2];
                }
            }
        });
        softmax.subtract(scores, p, [](int, int e) { return e / 2; });
#pragma unroll
        for (int half = 0; half < kStep / 16; ++half) {
            uint32_t parts[kParts][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) { // columns 0 to 7 of the first row, of the second row, then columns 8 to 15
                const int n = 2 * half + i / 2;
                float probabilities[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    probabilities[e] = cuda::fast_exp2(scores[n][i % 2 * 2 + e]);
                }
                softmax.sums[i % 2] += probabilities[0] + probabilities[1];
                if constexpr (kIsInt8<E>) { // a masked key counts nothing, also with an infinite or NaN scale
                    const float2 two = scales_of(n, kWarpKeys);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const bool seen = visible || scores[n][i % 2 * 2 + e] != -INFINITY;
                        probabilities[e] = seen ? probabilities[e] * (e == 0 ? two.x : two.y) : 0.0f;
                    }
                }
                uint32_t of_pair[kParts];
                split<V>(of_pair, probabilities[0], probabilities[1]);
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    parts[part][i] = of_pair[part];
                }
            }
#pragma unroll
            for (int pair = 0; pair < kSize / 32; ++pair) {
                uint32_t b[2][4];
                load_values<T>(b, v + 16 * half * kSize, offsets, pair);
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        cuda::mma<V>(out[4 * pair + 2 * i], parts[part], b[i][0], b[i][1]);
                        cuda::mma<V>(out[4 * pair + 2 * i + 1], parts[part], b[i][2], b[i][3]);
                    }
                }
            }
        }
    }

    // Calls put(i, column, values) with neighbouring columns of the lane's row i: two of each 8, or of int8 four of 16.
    template <typename Put> __device__ __forceinline__ void for_columns(const Put &put) const {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int n = 0; n < kSize / 8; n += kIsInt8<E> ? 2 : 1) {
                if constexpr (kIsInt8<E>) {
                    const float values[4] = {out[n][2 * i], out[n + 1][2 * i], out[n][2 * i + 1],
                                             out[n + 1][2 * i + 1]};
                    put(i, 8 * n + 4 * (lane % 4), values);
                } else {
                    const float values[2] = {out[n][2 * i], out[n][2 * i + 1]};
                    put(i, 8 * n + 2 * (lane % 4), values);
                }
            }
        }
    }

    // Writes the results of the warp's rows, from first_row of the block on. They go through the shared memory of q, so
    // that a lane stores 16 bytes at once.
    __device__ __forceinline__ void write(const Problem<T, E> &p, const WorkTile &u, int first_row, T *shared) const {
        const int lane = threadIdx.x % kWarp;
        float totals[2], inverse[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            totals[i] = u.s.bad ? not_a_number() : softmax.sums[i];
            inverse[i] = 1.0f / totals[i];
        }
        __syncwarp(); // all lanes have read q
        for_columns([&](int i, int column, const auto &values) {
            constexpr int kCount = sizeof(values) / sizeof(float);
            cuda::Vector<T, kCount> vector;
#pragma unroll
            for (int e = 0; e < kCount; ++e) {
                vector.values[e] = cuda::narrow<T>(totals[i] == 0 ? 0.0f : values[e] * inverse[i]);
            }
            T *const to = chunk_of<kSize>(shared, lane / 4 + 8 * i, column / 8) + column % 8;
            *reinterpret_cast<cuda::Vector<T, kCount> *>(to) = vector;
        });
        const int row = first_row + lane % 16;
        const int64_t place = p.row_at(p.out_strides, u, u.first_row + (row < u.rows ? row : 0));
        __syncwarp();
        constexpr int kChunks = kSize / 8;
#pragma unroll
        for (int i = 0; i < kWarpRows * kChunks / kWarp; ++i) {
            const int of_warp = i * (kWarp / kChunks) + lane / kChunks, chunk = lane % kChunks, column = 8 * chunk;
            const int64_t at = __shfl_sync(cuda::kAllLanes, place, of_warp);
            if (first_row + of_warp < u.rows && column < p.size) {
                const auto vector = *reinterpret_cast<const cuda::Vector<T> *>(chunk_of<kSize>(shared, of_warp, chunk));
                cuda::store_packed32(p.out + at + column, vector, p.whole_out, p.size - column);
            }
        }
    }
};

template <typename T, typename E, int kSize, bool kExact>
__global__ void __launch_bounds__(kThreads, kSize == 256 ? 1 : 2)
    attend_many_rows(const __grid_constant__ Problem<T, E> p) {
    cuda::grid_dependency_wait();
    using Shape = PrefillShape<E, kSize>;
    constexpr int kStages = Shape::kStages;
    if (p.starts.data != nullptr && !p.starts_fit()) {
        return write_not_a_number(p);
    }
    INFINI_SHARED(unit, WorkTile); // for use after the keys: registers are scarce
    const WorkTile u = p.unit();
    if (u.rows == 0) {
        return;
    }
    if (threadIdx.x == 0) {
        unit = u;
    }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    // Rows of q, then the stages, a stage all warps' rows of K and those of V, then the stages' scales.
    T *const shared_q = cuda::dynamic_shared<T>();
    E *const tiles = reinterpret_cast<E *>(shared_q + Shape::kRows * kSize);
    float *const scales = reinterpret_cast<float *>(tiles + kStages * Shape::kStage);

    const int keys = keys_of(u);
    INFINI_SHARED(starts, CacheStart<E>[kWarps][2]);
    KeyCopy<T, E, kSize> copy(p, u, warp * kWarpKeys, starts[warp]);
    const auto start = [&](int tile, int stage) { // tile: by its first key
        if (tile < keys) {
            E *const k = tiles + stage * Shape::kStage + warp * kWarpKeys * kSize;
            copy.start(k, k + kTileKeys * kSize, scales + stage * kTileScales<E> + warp * 2 * kWarpKeys);
        }
        cuda::async_commit();
    };
    for (int stage = 0; stage + 1 < kStages; ++stage) {
        start(stage * kTileKeys, stage);
    }

    INFINI_SHARED(rows, typename Problem<T, E>::RowScores[Shape::kRows]);
    if (threadIdx.x < Shape::kRows) {
        rows[threadIdx.x] = p.row_scores(u, u.first_row + threadIdx.x);
    }
    load_q_rows<Shape::kRows, kSize>(shared_q, p, u);
    __syncthreads();
    PrefillRows<T, E, kSize, kExact> mine;
    const int first_row = warp * kWarpRows; // of the block's
    T *const my_q = shared_q + first_row * kSize;
    if constexpr (Shape::kHoldQ) {
#pragma unroll
        for (int part = 0; part < kSize / 16; ++part) {
            mine.load_q(mine.q[part], my_q, part);
        }
    }
    // Keys after the last row's are masked for all. A warp without rows sees nothing.
    const auto &last = rows[first_row + kWarpRows - 1];
    const Visible visible(rows[first_row], last, p.window, u);
    const int64_t end = first_row >= u.rows ? u.begin : last.seen < u.end ? last.seen : u.end;
    const int my_keys = end > u.begin ? static_cast<int>(end - u.begin) : 0;

    for (int tile = 0, stage = 0; tile < keys; tile += kTileKeys) {
        cuda::async_wait<kStages - 2>();
        __syncthreads(); // the tile has arrived, and all warps are done with the previous one
        start(tile + (kStages - 1) * kTileKeys, stage == 0 ? kStages - 1 : stage - 1);
        const E *const k = tiles + stage * Shape::kStage, *const v = k + kTileKeys * kSize;
        const float *const scales_of_tile = scales + stage * kTileScales<E>;
#pragma unroll 1
        for (int step = 0; step < kTileKeys && tile + step < my_keys; step += Shape::kStep) {
            mine.attend(p, my_q, rows + first_row, k + step * kSize, v + step * kSize, scales_of_tile + 2 * step,
                        u.begin + tile + step, visible.all(tile + step, Shape::kStep));
        }
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cuda::let_next_launch();
    mine.softmax.template finish<1, 2>(p);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sink = rows[first_row + lane / 4 + 8 * i].sink;
        mine.softmax.sums[i] += exp_for<T>(sink - base_of(mine.softmax.largest[i]));
    }

    if (p.splits.count == 1) {
        return mine.write(p, unit, first_row, my_q);
    }
    const int64_t places[2] = {p.place_of(unit, unit.first_row + first_row + lane / 4),
                               p.place_of(unit, unit.first_row + first_row + lane / 4 + 8)};
    mine.for_columns([&](int i, int column, const auto &values) {
        if (first_row + lane / 4 + 8 * i < unit.rows && column < p.size) {
            const float total = unit.s.bad ? not_a_number() : mine.softmax.sums[i];
            p.put_partial(places[i], column, values, total, mine.softmax.largest[i]);
        }
    });
}

} // namespace infini::attention::nvidia
