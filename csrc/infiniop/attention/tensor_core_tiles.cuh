// Shared by attention's tensor core kernels for few and for many rows: tiles of K and V in shared memory, copied by
// cp.async some tiles ahead, and their fragments for mma. T: the half type of q and out. E: of K and V, T or int8. int8
// stays int8 in shared memory, half the bytes, and is widened in registers. An element of ldmatrix is then two columns,
// so that of each 16 columns the even ones come first and then the odd ones; q is put in the same order. The scale of a
// key's row of K is applied to its products, that of its row of V to its probabilities, which then have the range of a
// float and are multiplied in bfloat16.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/mma.cuh"
#include "cuda/half2.cuh"
#include "cuda/packed32.cuh"
#include "kernels.cuh"

namespace infini::attention::nvidia {

constexpr int kWarpKeys = 16, kTileKeys = kWarps * kWarpKeys; // a warp copies 16 keys of each tile

template <typename E> constexpr bool kIsInt8 = std::is_same_v<E, int8_t>;
template <typename T, typename E> using ValueType = std::conditional_t<kIsInt8<E>, bf16, T>;

// The scales of a tile's keys: for each warp's 16 keys those of K, then those of V.
template <typename E> constexpr int kTileScales = kIsInt8<E> ? 2 * kTileKeys : 0;

// The keys of the block; at most kMaxKeys.
__device__ __forceinline__ int keys_of(const WorkTile &u) {
    return u.end > u.begin ? static_cast<int>(u.end - u.begin) : 0;
}

// The swizzle of a row's chunks of 16 bytes in shared memory, against bank conflicts: eight rows of one chunk, and
// eight chunks of one row, fall into eight different 16-byte groups of banks.
template <typename E, int kSize> struct TileLayout {
    static constexpr unsigned kChunks = kSize / cuda::kWidth<E>, kLine = kChunks < 8 ? kChunks : 8;

    // In bytes.
    static __device__ __forceinline__ unsigned at(unsigned row, unsigned chunk) {
        return (row * kChunks + (chunk ^ swizzle(row))) * 16;
    }
    // The offset `rows` and `chunks` beyond `at`, which has zeros in the bits of these two.
    static __device__ __forceinline__ unsigned further(unsigned at, unsigned rows, unsigned chunks) {
        return (at ^ (swizzle(rows) ^ chunks % kLine) * 16) + (rows * kChunks + chunks / kLine * kLine) * 16;
    }

private:
    static __device__ __forceinline__ unsigned swizzle(unsigned row) { return row / (8 / kLine) % kLine; }
};
template <typename E> __device__ __forceinline__ E *by_bytes(E *p, unsigned bytes) {
    using Byte = std::conditional_t<std::is_const_v<E>, const unsigned char, unsigned char>;
    return reinterpret_cast<E *>(reinterpret_cast<Byte *>(p) + bytes);
}
// Chunk number `chunk` of a row from its tile on.
template <int kSize, typename E> __device__ __forceinline__ E *chunk_of(E *tile, unsigned row, unsigned chunk) {
    return by_bytes(tile, TileLayout<std::remove_const_t<E>, kSize>::at(row, chunk));
}

// The lane's part of the addresses of load_keys and load_values. Decode uses K and V as mma's `a`, prefill as `b`
// (kAsB), which differ in the order of the quarters of 16 x 16: in `a` the two halves of the output's dimension (keys
// of K, columns of V) are adjacent, in `b` those of the dimension that is summed over.
template <typename E, int kSize, bool kAsB> struct LaneOffsets {
    unsigned keys, values;

    __device__ __forceinline__ LaneOffsets() {
        const unsigned lane = threadIdx.x % kWarp;
        const unsigned halves_of_keys = TileLayout<E, kSize>::at(lane % 16, lane / 16);
        const unsigned halves_of_columns = TileLayout<E, kSize>::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        keys = !kAsB || kIsInt8<E> ? halves_of_keys : halves_of_columns;
        values = kAsB || kIsInt8<E> ? halves_of_keys : halves_of_columns;
    }
    // Which of the four registers has half `output` of the output's dimension and half `summed` of the other.
    static __device__ __forceinline__ constexpr int place(int output, int summed) {
        return kAsB ? 2 * output + summed : output + 2 * summed;
    }
};

// The row that replaces a key in a block outside the cache: its scores become NaN, and where these are masked its
// values are 0. (K and V of int8: zeros, and these scales.)
struct alignas(16) NoRow {
    uint16_t k[256] = {}, v[256] = {};
    uint32_t k_scale = 0x7fffffff, v_scale = 0; // bits of floats
    constexpr NoRow() {
        for (uint16_t &bits : k) {
            bits = 0x7fff;
        }
    }
};
__device__ const NoRow no_row;

// Copies a chunk from global to shared memory element by element, where it is unaligned.
template <typename E> __device__ __forceinline__ void copy_elements(E *to, const E *from, int count) {
#pragma unroll
    for (int e = 0; e < cuda::kWidth<E>; ++e) {
        to[e] = e < count ? from[e] : E{};
    }
}

// The first row of a sequence's K or V, and its scale; with block tables, of the cache.
template <typename E> struct alignas(16) CacheStart {
    const E *rows;
    const float *scales;
};

// A warp's share of the copies. Lane l < 16 has the address of key l's row of K, lane l + 16 that of its row of V.
template <typename T, typename E, int kSize> class KeyCopy {
public:
    // first_key: this warp's, from u.begin on. starts: two in shared memory, the warp's own, to save registers.
    __device__ __forceinline__ KeyCopy(const Problem<T, E> &p, const WorkTile &u, int first_key, CacheStart<E> *starts)
        : p_(p), table_(p.table_of(u)), start_(starts + threadIdx.x % kWarp / 16), begin_(u.begin), key_(first_key),
          keys_(keys_of(u)) {
        const unsigned lane = threadIdx.x % kWarp;
        to_ = Layout::at(lane / kChunks, lane % kChunks);
        if (lane % 16 == 0) {
            const bool of_k = lane == 0;
            start_->rows = (of_k ? p.k : p.v) + p.start_of(of_k ? p.k_strides : p.v_strides, u);
            if constexpr (kIsInt8<E>) {
                start_->scales =
                    (of_k ? p.k_scales : p.v_scales) + p.start_of(of_k ? p.k_scale_strides : p.v_scale_strides, u);
            }
        }
        __syncwarp();
        locate();
    }

    // Starts to copy the next tile's 16 keys to k, v and scales (of this warp); keys from u.end on become zeros.
    __device__ __forceinline__ void start(E *k, E *v, float *scales) {
        const int lane = threadIdx.x % kWarp;
        const int live = keys_ - key_ < kWarpKeys ? keys_ - key_ : kWarpKeys;
        const auto address = reinterpret_cast<uintptr_t>(row_);
        const auto each = [&](int i, const auto &copy_one) {
            constexpr int kRows = kWarp / kChunks; // at once
            const int row = i * kRows + lane / kChunks;
            const unsigned to = Layout::further(to_, i * kRows, 0);
            const auto from = [&](int of_lane) {
                return reinterpret_cast<const E *>(__shfl_sync(cuda::kAllLanes, address, of_lane) +
                                                   lane % kChunks * 16);
            };
            copy_one(by_bytes(k, to), from(row), row);
            copy_one(by_bytes(v, to), from(row + 16), row);
        };
        constexpr int kEach = kWarpKeys * kChunks / kWarp;
        if (p_.whole_kv && live == kWarpKeys && p_.size == kSize) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                each(i, [](E *to, const E *from, int) { cuda::async_copy(to, from); });
            }
        } else {
            int bytes = (p_.size - lane % kChunks * cuda::kWidth<E>)*static_cast<int>(sizeof(E));
            bytes = bytes < 0 ? 0 : bytes < 16 ? bytes : 16; // of the lane's chunk that are columns of a head
#pragma unroll 1
            for (int i = 0; i < kEach; ++i) {
                each(i, [&](E *to, const E *from, int row) {
                    const int there = row < live ? bytes : 0;
                    if (p_.whole_kv) {
                        cuda::async_copy(to, from, there);
                    } else {
                        copy_elements(to, from, there / static_cast<int>(sizeof(E)));
                    }
                });
            }
        }
        if constexpr (kIsInt8<E>) {
            cuda::async_copy<4>(scales + lane, scale_, lane % 16 < live ? 4 : 0);
        }
        key_ += kTileKeys;
        locate();
    }

private:
    using Layout = TileLayout<E, kSize>;
    static constexpr int kChunks = kSize / cuda::kWidth<E>;

    __device__ __forceinline__ void locate() {
        const int lane = threadIdx.x % kWarp;
        const bool of_k = lane < 16;
        row_ = start_->rows;
        if constexpr (kIsInt8<E>) {
            scale_ = start_->scales;
        }
        if (key_ + lane % 16 >= keys_) {
            return; // not read
        }
        const KeyPlace place = p_.find(table_, begin_ + key_ + lane % 16);
        if (place.outer < 0) {
            row_ = reinterpret_cast<const E *>(of_k && !kIsInt8<E> ? no_row.k : no_row.v);
            scale_ = reinterpret_cast<const float *>(of_k ? &no_row.k_scale : &no_row.v_scale);
            return;
        }
        const auto &strides = of_k ? p_.k_strides : p_.v_strides;
        row_ += place.outer * strides[0] + place.inner * strides[1];
        if constexpr (kIsInt8<E>) {
            const auto &of_scales = of_k ? p_.k_scale_strides : p_.v_scale_strides;
            scale_ += place.outer * of_scales[0] + place.inner * of_scales[1];
        }
    }

    const Problem<T, E> &p_;
    int64_t table_;        // of the sequence
    CacheStart<E> *start_; // of K or V
    const E *row_;         // of the lane's key
    const float *scale_ = nullptr;
    int64_t begin_;
    int key_, keys_; // from `begin_` on: the next tile's first, and how many there are
    unsigned to_;    // the destination of the lane's chunk of the first rows
};

// The keys that all rows of a tile see, counted from u.begin: up to the first row's last, from the last row's window
// on.
struct Visible {
    int from, until;

    template <typename RowScores>
    __device__ __forceinline__ Visible(const RowScores &first, const RowScores &last, int64_t window,
                                       const WorkTile &u) {
        const int64_t end = first.seen < u.end ? first.seen : u.end;
        const int64_t begin = last.seen > window ? last.seen - window : 0;
        from = begin > u.begin ? static_cast<int>((begin < end ? begin : end) - u.begin) : 0;
        until = end > u.begin ? static_cast<int>(end - u.begin) : 0;
    }
    __device__ __forceinline__ bool all(int key, int count) const { return key >= from && key + count <= until; }
};

// Columns 32 * pair to + 31 of 16 keys' rows from k on (a multiple of 8 rows into a tile): two times 16 keys x 16
// columns.
template <typename T, typename E, int kSize, bool kAsB>
__device__ __forceinline__ void load_keys(uint32_t (&out)[2][4], const E *k, LaneOffsets<E, kSize, kAsB> lane,
                                          int pair) {
    using Layout = TileLayout<E, kSize>;
    if constexpr (kIsInt8<E>) {
        uint32_t bytes[4];
        cuda::load_matrices(bytes, by_bytes(k, Layout::further(lane.keys, 0, 2 * pair)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            auto &to = out[i / 2];
            cuda::int8x4_to_half2<T>(to[lane.place(i % 2, 0)], to[lane.place(i % 2, 1)], bytes[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cuda::load_matrices(out[i], by_bytes(k, Layout::further(lane.keys, 0, 4 * pair + 2 * i)));
        }
    }
}

// The same of V.
template <typename T, typename E, int kSize, bool kAsB>
__device__ __forceinline__ void load_values(uint32_t (&out)[2][4], const E *v, LaneOffsets<E, kSize, kAsB> lane,
                                            int pair) {
    using Layout = TileLayout<E, kSize>;
    if constexpr (kIsInt8<E>) {
        uint32_t bytes[4];
        cuda::load_matrices_transposed(bytes, by_bytes(v, Layout::further(lane.values, 0, 2 * pair)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            auto &to = out[i / 2];
            cuda::int8x4_to_half2<ValueType<T, E>>(to[lane.place(0, i % 2)], to[lane.place(1, i % 2)], bytes[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cuda::load_matrices_transposed(out[i], by_bytes(v, Layout::further(lane.values, 0, 4 * pair + 2 * i)));
        }
    }
}

// The column at position `c` of the tensor cores' order.
template <typename E> __device__ __forceinline__ int column_of(int c) {
    return kIsInt8<E> ? c / 16 * 16 + c % 8 * 2 + c / 8 % 2 : c;
}

// Copies the block's rows of q to shared memory, padded with zeros, in the tensor cores' order of columns.
template <int kRows, int kSize, typename T, typename E>
__device__ __forceinline__ void load_q_rows(T *shared_q, const Problem<T, E> &p, const WorkTile &u) {
    constexpr int kChunks = kSize / 8;
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks, column = 8 * chunk;
        cuda::Vector<T> vector{};
        if (row < u.rows) {
            const int64_t at = p.row_at(p.q_strides, u, u.first_row + row);
            vector = cuda::load(p.q + at + column, p.whole_q && column < p.size, p.size - column);
        }
        if constexpr (kIsInt8<E>) {
            cuda::Vector<T, 4> parts[2]; // even columns, odd columns
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                parts[e % 2].values[e / 2] = vector.values[e];
            }
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                T *const to = chunk_of<kSize>(shared_q, row, chunk / 2 * 2 + odd) + chunk % 2 * 4;
                *reinterpret_cast<cuda::Vector<T, 4> *>(to) = parts[odd];
            }
        } else {
            *reinterpret_cast<cuda::Vector<T> *>(chunk_of<kSize>(shared_q, row, chunk)) = vector;
        }
    }
}

// How many halves a probability is a sum of. Exact: a whole float, three of bfloat16 or two of float16. Else as many as
// T itself is exact.
template <typename T, typename E, bool kExact>
constexpr int kParts = kExact                                 ? (std::is_same_v<ValueType<T, E>, bf16> ? 3 : 2)
                       : std::is_same_v<T, f16> && kIsInt8<E> ? 2
                                                              : 1;

// x and y as sums of halves, the largest ones first: pairs as mma takes them, x in the low bits. The last part is
// rounded to nearest: 3 of bf16 lose nothing, 2 of f16 up to 2^-23 or, of tiny numbers in [0, 1], 2^-25 of 1.
template <typename T, int kParts> __device__ __forceinline__ void split(uint32_t (&parts)[kParts], float x, float y) {
#pragma unroll
    for (int i = 0; i + 1 < kParts; ++i) {
        if constexpr (std::is_same_v<T, bf16>) { // 8 bits of the 24, without rounding
            const uint32_t high_x = __float_as_uint(x) & 0xffff0000u, high_y = __float_as_uint(y) & 0xffff0000u;
            parts[i] = high_x >> 16 | high_y;
            x -= __uint_as_float(high_x);
            y -= __uint_as_float(high_y);
        } else {
            parts[i] = cuda::pack_half2<T>(x, y);
            x -= cuda::widen(T{static_cast<uint16_t>(parts[i])});
            y -= cuda::widen(T{static_cast<uint16_t>(parts[i] >> 16)});
        }
    }
    parts[kParts - 1] = cuda::pack_half2<T>(x, y);
}

// A lane's rows, kRows of them: the largest score so far and the sum of probabilities over the lane's keys. Scores are
// p.exp2_unit times what they are here, in powers of two.
template <int kRows> struct Softmax {
    float largest[kRows], sums[kRows];

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            largest[i] = -INFINITY;
            sums[i] = 0;
        }
    }

    // most: a step's largest scores, over all lanes of a row. Calls rescale(factors) to multiply the rows' sums so far
    // where the maximum of any row of the warp has risen. Elsewhere the factors are 1, and skipping them changes no
    // bit.
    template <typename Rescale>
    __device__ __forceinline__ void raise(const float (&most)[kRows], float unit, const Rescale &rescale) {
        bool higher = false;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            higher = higher || most[i] > largest[i];
        }
        if (__any_sync(cuda::kAllLanes, higher)) {
            float factors[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const float now = fmaxf(most[i], largest[i]);
                factors[i] = cuda::fast_exp2((largest[i] - base_of(now)) * unit);
                largest[i] = now;
                sums[i] *= factors[i];
            }
            rescale(factors);
        }
    }

    // Turns scores into exponents of 2. row_of(tile, e): the row of scores[tile][e]. `plain` takes one operation each;
    // the others subtract first, as a mask of a type's lowest number would overflow in the product.
    template <int kTiles, typename P, typename RowOf>
    __device__ __forceinline__ void subtract(float (&scores)[kTiles][4], const P &p, const RowOf &row_of) const {
        const auto each = [&](const auto &change) {
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) {
                float &x = scores[i / 4][i % 4];
                x = change(x, base_of(largest[row_of(i / 4, i % 4)]));
            }
        };
        if (p.plain) {
            each([&](float x, float base) { return __fmaf_rn(x, p.exp2_unit, -base * p.exp2_unit); });
        } else {
            each([&](float x, float base) { return (x - base) * p.exp2_unit; });
        }
    }

    // Sums over the lanes of a row, those that differ in the bits kLanes; `largest` becomes a score.
    template <int... kLanes, typename P> __device__ __forceinline__ void finish(const P &p) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            ((sums[i] += __shfl_xor_sync(cuda::kAllLanes, sums[i], kLanes)), ...);
            if (p.plain) {
                largest[i] *= p.scale;
                sums[i] = largest[i] == INFINITY ? not_a_number() : sums[i]; // a score beyond a float's range
            }
        }
    }
};

} // namespace infini::attention::nvidia
