// Attention on tensor cores, for halves with heads of up to 256: each warp has 16 rows (queries x query heads of a key
// head), so that all query heads of a key head share what is read of K and V, which cp.async brings some tiles ahead.
// Few rows (decode): the warps share the keys, each with tiles and sums of its own. More (prefill): each warp has rows
// of its own, and all share a tile of 64 keys. Prefill is bound by the tensor cores, so probabilities are rounded to the
// half type there, as in torch's scaled_dot_product_attention, and are one product with V. Decode is bound by memory and
// takes them in parts that make up a whole float (two of float16, three of bfloat16): there the result is rounded once.
// kExact does so in prefill too, for 1.5 to 2 times the products.
// Limits: decode reads K and V once, 512 bytes a key for a head of 128, while it does 4 x 16 x 128 x 2 flops for it: a
// seventh of what the tensor cores of an H200 could meanwhile. Prefill does 4 flops for each visible (row, key, column).
#pragma once

#include "cuda/async_copy.h"
#include "cuda/mma.h"
#include "cuda/pairs.h"
#include "kernels.cuh"

namespace infini::attention::nvidia {

constexpr int kWarpRows = 16, kWarpKeys = 16, kBlockKeys = kWarps * kWarpKeys;

// kShareKeys: the warps share the keys, not the rows.
template <int kSize, bool kShareKeys> struct TensorCoreShape {
    static constexpr int kRows = kShareKeys ? kWarpRows : kWarps * kWarpRows; // of a block
    static constexpr int kStages = kShareKeys ? (kSize == 64 ? 4 : kSize == 128 ? 3 : 2) : 2;
    static constexpr int kStep = kShareKeys || kSize == 256 ? 16 : 32; // keys whose scores a warp has at a time
    static constexpr bool kHoldQ = kSize <= 128;                       // in registers
    static constexpr int kOutStride = kSize + 8; // of floats that are joined: fewer bank conflicts
    static constexpr size_t kShared = (kRows + kStages * 2 * kBlockKeys) * kSize * 2;
    static_assert(!kShareKeys || kWarpRows * kOutStride * 4 <= kStages * 2 * kWarpKeys * kSize * 2);
};

// Chunk (of 8 elements) number `chunk` of row `row`, in an order without bank conflicts for rows or columns of chunks.
template <int kSize> __device__ __forceinline__ int chunk_at(int row, int chunk) {
    return row * kSize + ((chunk ^ (row & 7)) << 3);
}

// What stands for a key in a block outside the cache: its scores become NaN, and where these are masked its values
// count nothing.
struct alignas(16) NoRow {
    uint16_t k[256] = {}, v[256] = {};
    constexpr NoRow() {
        for (uint16_t &bits : k) {
            bits = 0x7fff;
        }
    }
};
__device__ const NoRow no_row;

// 8 elements from global to shared memory one by one, where vectors may not be accessed. count: how many there are.
template <typename T> __device__ __forceinline__ void copy_elements(T *to, const T *from, int count) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        to[e] = e < count ? from[e] : T{};
    }
}

// x and y (in [0, 1]) as sums of halves: parts[0] the largest ones, ... Pairs as mma takes them, x in the low bits. One
// part is the nearest half, and the rest is lost.
template <typename T, bool kExact> constexpr int kParts = !kExact ? 1 : std::is_same_v<T, bf16> ? 3 : 2;

template <typename T> __device__ __forceinline__ void split(uint32_t (&parts)[1], float x, float y, T) {
    parts[0] = cuda::pair_of<T>(x, y);
}
__device__ __forceinline__ void split(uint32_t (&parts)[3], float x, float y, bf16) {
#pragma unroll
    for (int i = 0; i < 3; ++i) { // 8 bits of the 24 each time: nothing is left
        const uint32_t high_x = __float_as_uint(x) & 0xffff0000u, high_y = __float_as_uint(y) & 0xffff0000u;
        parts[i] = high_x >> 16 | high_y;
        x -= __uint_as_float(high_x);
        y -= __uint_as_float(high_y);
    }
}
__device__ __forceinline__ void split(uint32_t (&parts)[2], float x, float y, f16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) { // 11 bits and a sign each time: 2^-23 or, of tiny ones, 2^-25 of 1 is lost
        const f16 high_x = cuda::narrow<f16>(x), high_y = cuda::narrow<f16>(y);
        parts[i] = high_x.bits | static_cast<uint32_t>(high_y.bits) << 16;
        x -= cuda::widen(high_x);
        y -= cuda::widen(high_y);
    }
}

// A warp's 16 rows: their sums over the keys so far. The lane has of rows lane / 4 and lane / 4 + 8 what mma gives it.
template <typename T, int kSize, bool kShareKeys, bool kExact> struct WarpRows {
    using Shape = TensorCoreShape<kSize, kShareKeys>;
    static constexpr int kParts = nvidia::kParts<T, kExact>;

    float out[kSize / 8][4] = {};
    float largest[2] = {-INFINITY, -INFINITY}, sums[2] = {}; // sums: over this lane's keys
    uint32_t q[Shape::kHoldQ ? kSize / 16 : 1][4];
    const typename Problem<T>::RowScores *rows; // of these two, 8 apart, in shared memory: registers are few

    // 16 rows and columns of q from shared memory.
    __device__ __forceinline__ void load_q(uint32_t (&a)[4], const T *shared_q, int part) const {
        const int lane = threadIdx.x % kWarp;
        cuda::load_matrices(a, shared_q + chunk_at<kSize>(lane % 16, 2 * part + lane / 16));
    }

    // The keys `key` to key + kStep - 1, whose rows begin at k and v (a multiple of 8 rows into a tile); `visible`: all
    // rows see them all.
    __device__ __forceinline__ void attend(const Problem<T> &p, const T *shared_q, const T *k, const T *v, int64_t key,
                                           bool visible) {
        constexpr int kStep = Shape::kStep;
        const int lane = threadIdx.x % kWarp;
        float scores[kStep / 8][4] = {};
#pragma unroll
        for (int part = 0; part < kSize / 16; ++part) {
            if constexpr (!Shape::kHoldQ) {
                load_q(q[0], shared_q, part);
            }
            const auto &a = q[Shape::kHoldQ ? part : 0];
#pragma unroll
            for (int n = 0; n < kStep / 16; ++n) {
                uint32_t b[4];
                cuda::load_matrices(b, k + chunk_at<kSize>(16 * n + lane % 8 + lane / 16 * 8, 2 * part + lane / 8 % 2));
                cuda::mma<T>(scores[2 * n], a, b[0], b[1]);
                cuda::mma<T>(scores[2 * n + 1], a, b[2], b[3]);
            }
        }

        const bool plain = p.mask_dtype == INFINI_DTYPE_INVALID && p.slopes == nullptr && !p.capped;
        const int64_t seen[2] = {rows[0].seen, rows[8].seen};
        float most[2] = {-INFINITY, -INFINITY};
        if (plain && visible) { // most tiles of most calls: no branch for an element
#pragma unroll
            for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    scores[n][e] *= p.scale;
                    most[e / 2] = fmaxf(most[e / 2], scores[n][e]);
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float &x = scores[n][e];
                    const int64_t at = key + 8 * n + 2 * (lane % 4) + e % 2;
                    if (!visible && !p.sees(seen[e / 2], at)) {
                        x = -INFINITY;
                    } else {
                        x = plain ? x * p.scale : p.score(x, rows[e / 2 * 8], at);
                    }
                    most[e / 2] = fmaxf(most[e / 2], x);
                }
            }
        }
        float base[2], factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            most[i] = fmaxf(most[i], __shfl_xor_sync(cuda::kAllLanes, most[i], 1));
            most[i] = fmaxf(most[i], __shfl_xor_sync(cuda::kAllLanes, most[i], 2));
            most[i] = fmaxf(most[i], largest[i]);
            base[i] = base_of(most[i]);
            factor[i] = exp_for<T>(largest[i] - base[i]);
            largest[i] = most[i];
            sums[i] *= factor[i];
        }
#pragma unroll
        for (int n = 0; n < kSize / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                out[n][e] *= factor[e / 2];
            }
        }
#pragma unroll
        for (int half = 0; half < kStep / 16; ++half) {
            uint32_t parts[kParts][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) { // columns 0 to 7 of the first row, of the second row, then columns 8 to 15
                const auto &pair = scores[2 * half + i / 2];
                const float x = exp_for<T>(pair[i % 2 * 2] - base[i % 2]);
                const float y = exp_for<T>(pair[i % 2 * 2 + 1] - base[i % 2]);
                sums[i % 2] += x + y;
                uint32_t of_pair[kParts];
                split(of_pair, x, y, T{});
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    parts[part][i] = of_pair[part];
                }
            }
#pragma unroll
            for (int n = 0; n < kSize / 16; ++n) {
                uint32_t b[4];
                cuda::load_matrices_transposed(b, v + chunk_at<kSize>(16 * half + lane % 16, 2 * n + lane / 16));
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    cuda::mma<T>(out[2 * n], parts[part], b[0], b[1]);
                    cuda::mma<T>(out[2 * n + 1], parts[part], b[2], b[3]);
                }
            }
        }
    }

    // Sums over all keys of the warp, in every lane of a row.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (float &sum : sums) {
            sum += __shfl_xor_sync(cuda::kAllLanes, sum, 1);
            sum += __shfl_xor_sync(cuda::kAllLanes, sum, 2);
        }
    }
};

template <typename T, int kSize, bool kShareKeys, bool kExact>
__global__ void __launch_bounds__(kThreads, kSize == 256 ? 1 : 2)
    attend_by_tensor_cores(const __grid_constant__ Problem<T> p) {
    using Shape = TensorCoreShape<kSize, kShareKeys>;
    constexpr int kChunks = kSize / 8, kStages = Shape::kStages;
    if (!kShareKeys && p.starts != nullptr && !p.starts_fit()) {
        return write_not_a_number(p);
    }
    const Unit u = p.unit();
    if (u.rows == 0) {
        return;
    }
    T *const shared_q = cuda::dynamic_shared<T>(), *const tiles = shared_q + Shape::kRows * kSize;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    // A stage has the keys' rows of K, then those of V: of this warp's keys alone, or of all warps'.
    constexpr int kTileKeys = kShareKeys ? kWarpKeys : kBlockKeys;
    const auto tile_at = [&](int64_t tile) {
        const int stage = static_cast<int>(tile % kStages);
        return tiles + ((kShareKeys ? warp * kStages : 0) + stage) * 2 * kTileKeys * kSize;
    };
    // What the warp copies of a tile: 16 keys. Lane l knows where in K key l lies, or in V key l - 16.
    const auto first_key = [&](int64_t tile) { return u.begin + tile * kBlockKeys + warp * kWarpKeys; };
    const auto locate = [&](int64_t tile) {
        const int64_t key = first_key(tile) + lane % 16;
        const T *const all = lane < 16 ? p.k : p.v;
        if (key >= u.end) {
            return all; // not read
        }
        const int64_t at = p.locate(lane < 16 ? p.k_strides : p.v_strides, u, key);
        return at == kBadBlock ? reinterpret_cast<const T *>(lane < 16 ? no_row.k : no_row.v) : all + at;
    };
    const int64_t count = u.end <= u.begin ? 0 : (u.end - u.begin + kBlockKeys - 1) / kBlockKeys;
    const T *next = locate(0);
    const auto copy = [&](int64_t tile) {
        if (tile < count) {
            T *const k = tile_at(tile) + (kShareKeys ? 0 : warp * kWarpKeys * kSize), *const v = k + kTileKeys * kSize;
            const int64_t left = u.end - first_key(tile);
            const int live = left < kWarpKeys ? static_cast<int>(left) : kWarpKeys;
            const auto address = reinterpret_cast<uintptr_t>(next);
            constexpr int kEach = kWarpKeys * kChunks / kWarp;
            const auto each = [&](int i, const auto &copy_one) {
                const int row = i * (kWarp / kChunks) + lane / kChunks, chunk = lane % kChunks;
                const int to = chunk_at<kSize>(row, chunk), there = row < live ? p.size - 8 * chunk : 0;
                copy_one(k + to, reinterpret_cast<const T *>(__shfl_sync(cuda::kAllLanes, address, row)) + 8 * chunk,
                         there);
                copy_one(v + to,
                         reinterpret_cast<const T *>(__shfl_sync(cuda::kAllLanes, address, row + 16)) + 8 * chunk,
                         there);
            };
            if (p.whole_kv) {
#pragma unroll
                for (int i = 0; i < kEach; ++i) {
                    each(i, [](T *to, const T *from, int there) { cuda::async_copy(to, from, there > 0 ? 16 : 0); });
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < kEach; ++i) {
                    each(i, copy_elements<T>);
                }
            }
            next = locate(tile + 1);
        }
        cuda::async_commit();
    };
    for (int tile = 0; tile + 1 < kStages; ++tile) {
        copy(tile);
    }

    INFINI_SHARED(rows, typename Problem<T>::RowScores[Shape::kRows]);
    if (threadIdx.x < Shape::kRows) {
        rows[threadIdx.x] = p.row_scores(u, u.first_row + threadIdx.x);
    }
    for (int i = threadIdx.x; i < Shape::kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, column = i % kChunks * 8;
        cuda::Vector<T> vector{};
        if (row < u.rows) {
            const int64_t at = p.row_at(p.q_strides, u, u.first_row + row);
            vector = cuda::load(p.q + at + column, p.whole_q && column < p.size, p.size - column);
        }
        *reinterpret_cast<cuda::Vector<T> *>(shared_q + chunk_at<kSize>(row, i % kChunks)) = vector;
    }
    __syncthreads();
    WarpRows<T, kSize, kShareKeys, kExact> mine;
    const int first_row = kShareKeys ? 0 : warp * kWarpRows; // of the block's
    const T *const my_q = shared_q + first_row * kSize;
    if constexpr (Shape::kHoldQ) {
#pragma unroll
        for (int part = 0; part < kSize / 16; ++part) {
            mine.load_q(mine.q[part], my_q, part);
        }
    }
    mine.rows = rows + first_row + lane / 4;
    // All rows see what the warp's first row sees and the last one's window, the latest, has; what is too late for the
    // last one is so for all. Rows that are not there see nothing.
    const int my_rows = u.rows - first_row < kWarpRows ? u.rows - first_row : kWarpRows;
    const int64_t least = my_rows < kWarpRows ? 0 : rows[first_row].seen;
    const int64_t last = my_rows <= 0 ? 0 : rows[first_row + my_rows - 1].seen;
    const int64_t end = last < u.end ? last : u.end;

    for (int64_t tile = 0; tile < count; ++tile) {
        cuda::async_wait<kStages - 2>();
        if constexpr (kShareKeys) { // the tile is there, and nobody reads the one before any more
            __syncwarp();
        } else {
            __syncthreads();
        }
        copy(tile + kStages - 1);
        const T *const k = tile_at(tile), *const v = k + kTileKeys * kSize;
#pragma unroll 1
        for (int step = 0; step < kTileKeys; step += Shape::kStep) {
            const int64_t key = u.begin + tile * kBlockKeys + (kShareKeys ? warp * kWarpKeys : 0) + step;
            if (key < end) {
                const bool visible =
                    key + Shape::kStep <= least && key + Shape::kStep <= u.end && last - key <= p.window;
                mine.attend(p, my_q, k + step * kSize, v + step * kSize, key, visible);
            }
        }
    }
    mine.finish();

    if constexpr (kShareKeys) {
        INFINI_SHARED(sums, float[kWarps][kWarpRows]);
        INFINI_SHARED(largest, float[kWarps][kWarpRows]);
        float *const joined = reinterpret_cast<float *>(tiles);
        constexpr int kWarpFloats = kStages * kWarpKeys * kSize; // of its stages
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane / 4 + 8 * i;
            if (row < u.rows) {
                sums[warp][row] = mine.sums[i];
                largest[warp][row] = mine.largest[i];
#pragma unroll
                for (int n = 0; n < kSize / 8; ++n) {
                    const float pair[2] = {mine.out[n][2 * i], mine.out[n][2 * i + 1]};
                    cuda::store(joined + warp * kWarpFloats + row * Shape::kOutStride + 8 * n + 2 * (lane % 4), pair,
                                true, 2);
                }
            }
        }
        __syncthreads();
        for (int row = warp; row < u.rows; row += kWarps) {
            join_warps(p, u, u.first_row + row, 0, kSize, &sums[0][row], &largest[0][row], kWarpRows,
                       joined + row * Shape::kOutStride, kWarpFloats);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + lane / 4 + 8 * i;
            const float total = u.s.bad ? not_a_number() : mine.sums[i];
            const int64_t place = p.place_of(u, u.first_row + row);
#pragma unroll
            for (int n = 0; n < kSize / 8; ++n) {
                const int column = 8 * n + 2 * (lane % 4);
                if (row < u.rows && column < p.size) {
                    const float pair[2] = {mine.out[n][2 * i], mine.out[n][2 * i + 1]};
                    p.put(place, column, pair, total, mine.largest[i]);
                }
            }
        }
    }
}

template <typename T, int kSize> Kernels<T> tensor_core_kernels_of_size() {
    using Few = TensorCoreShape<kSize, true>;
    using Many = TensorCoreShape<kSize, false>;
    return {attend_by_tensor_cores<T, kSize, true, true>,
            attend_by_tensor_cores<T, kSize, false, false>,
            attend_by_tensor_cores<T, kSize, false, true>,
            Few::kRows,
            Many::kRows,
            Few::kShared,
            Many::kShared,
            1};
}

template <typename T> Kernels<T> tensor_core_kernels_of(int64_t size) {
    return size <= 64    ? tensor_core_kernels_of_size<T, 64>()
           : size <= 128 ? tensor_core_kernels_of_size<T, 128>()
                         : tensor_core_kernels_of_size<T, 256>();
}

} // namespace infini::attention::nvidia
