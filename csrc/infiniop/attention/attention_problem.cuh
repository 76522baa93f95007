// Shared by attention's CUDA kernels: the kernel parameter, the work tile of a block, the addresses of keys, the score
// function and the output of a row's sums. Values that only the GPU reads (lengths, block tables, q_starts) are checked
// here: nothing out of bounds is accessed, and rows that depend on an invalid value become NaN.
#pragma once

#include "attention.h"
#include "cuda/int_divider.cuh"
#include "cuda/exp2.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vectors.cuh"
#include "indices.h"
#include "splits.h"

namespace infini::attention::nvidia {

using cuda::kWarp;

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int64_t kMaxKeys = int64_t{1} << 30; // of a block, which counts them in int; rows that see more become NaN
constexpr int64_t kNoKey = INT64_MIN;          // instead of a key's offset: zeros
constexpr int64_t kBadBlock = INT64_MIN + 1;   // its block is outside the cache: NaN

// A sequence of the batch; row = query * group + head in the group, for each key head.
struct Sequence {
    int64_t length;      // its keys
    int64_t first_query; // in its batch entry of q and out, or in all of q
    int64_t queries;
    bool bad; // its length or its queries are invalid: its rows are NaN
};

// The work of a block: a tile of rows of one key head against the keys [begin, end).
struct WorkTile {
    Sequence s;
    int64_t b, kv_head, split, first_row, begin, end;
    int rows; // of the tile; 0: nothing
};

// A key's block (0 without block tables) and its index in the block. outer < 0: the block is outside the cache.
struct KeyPlace {
    int64_t outer, inner;
};

// e^x, with the precision that the output's type needs.
template <typename T> __device__ __forceinline__ float exp_for(float x) {
    if constexpr (sizeof(T) == 4) {
        return expf(x);
    } else {
        return cuda::fast_exp2(x * 1.44269504f);
    }
}

__device__ __forceinline__ float not_a_number() {
    return __int_as_float(0x7fffffff);
}

// The score that is subtracted from all others; 0 while nothing is visible.
__device__ __forceinline__ float base_of(float largest) {
    return largest == -INFINITY ? 0.0f : largest;
}

// T: the element type of q and out. E: the element type of k and v, T or int8_t.
template <typename T, typename E = T> struct Problem {
    T *out;
    const T *q;
    const E *k, *v;
    const float *k_scales, *v_scales; // null: none
    int64_t k_scale_strides[3], v_scale_strides[3];
    int64_t out_strides[3], q_strides[3], k_strides[3], v_strides[3]; // batch or block, token, head
    const void *mask;
    infiniDtype_t mask_dtype; // 0: none
    int64_t mask_strides[4];
    Indices lens, tables, starts;
    int64_t table_stride, block_size, blocks; // table_stride: of a sequence's entries
    const float *slopes;
    int64_t slopes_stride;
    const T *sinks; // null: none
    int64_t sinks_stride;

    int64_t batch, queries, keys, kv_heads, group; // queries: of each sequence, or of all; keys: at most
    cuda::IntDivider<uint64_t> by_group, by_block_size;
    int size;
    bool causal, capped, keeps_empty;
    bool plain;                        // a score is a product times `scale`, above 0, and nothing else
    float exp2_unit;                   // the factor from a score, or if `plain` a product, to an exponent of 2
    int64_t window;                    // keys that a query sees at most; without a limit the largest number
    bool whole_q, whole_kv, whole_out; // 16-byte vectors may be used
    float scale, softcap, cap_factor;

    // How this launch splits the work.
    int tile_rows;
    int64_t row_tiles; // of each sequence; with starts: of all
    bool small;        // with starts: only sequences of at most kSplitRowsOfMany rows, else only the others
    Splits splits;
    int64_t row_limit;    // rows of a sequence in the partial sums
    float *partial_out;   // [batch, kv_heads, row_limit, splits, size]
    float2 *partial_sums; // [batch, kv_heads, row_limit, splits]: the sum and the largest score

    __device__ __forceinline__ int64_t query_of(int64_t row) const {
        return static_cast<int64_t>(by_group.quotient(static_cast<uint64_t>(row)));
    }

    __device__ Sequence sequence(int64_t b) const {
        Sequence s{keys, 0, queries, false};
        if (lens.data != nullptr) {
            s.length = lens[b];
            s.bad = s.length < 0 || s.length > keys;
        }
        if (starts.data != nullptr) {
            const int64_t first = starts[b], end = starts[b + 1];
            const bool fits = first >= 0 && first <= end && end <= queries;
            s.first_query = fits ? first : 0;
            s.queries = fits ? end - first : 0;
            s.bad = s.bad || s.queries > s.length;
        }
        if (s.bad) {
            s.length = 0;
        }
        return s;
    }

    // The block's work tile. To be called by whole warps.
    __device__ WorkTile unit() const {
        WorkTile u{};
        int64_t index = blockIdx.x, tile;
        if (starts.data != nullptr && !small) {
            u.kv_head = index % kv_heads;
            if (!find_tile(index / kv_heads, u.b, tile)) {
                return u;
            }
        } else {
            tile = row_tiles - 1 - index % row_tiles; // the later rows see the most keys: they begin first
            index /= row_tiles;
            u.kv_head = index % kv_heads;
            index /= kv_heads;
            u.split = index % splits.count;
            u.b = index / splits.count;
        }
        u.s = sequence(u.b);
        const int64_t rows = u.s.queries * group;
        u.first_row = tile * tile_rows;
        const bool keep = keeps_empty && u.s.length == 0 && !u.s.bad;
        const int64_t each = splits.count > 1 ? keys_of_split(u.s) : 0;
        u.begin = first_key(u.s, splits.count > 1 ? 0 : u.first_row) + u.split * each;
        const bool behind = splits.count > 1 && u.begin >= u.s.length; // the split is empty and not read
        if (u.first_row >= rows || (small && rows > kSplitRowsOfMany) || keep || behind) {
            return u;
        }
        u.rows = static_cast<int>(rows - u.first_row < tile_rows ? rows - u.first_row : tile_rows);
        u.end = row_scores(u, u.first_row + u.rows - 1).seen;
        if (splits.count > 1 && u.end > u.begin + each) {
            u.end = u.begin + each;
        }
        if (u.end - u.begin > kMaxKeys) {
            u.s.bad = true;
            u.end = u.begin;
        }
        return u;
    }

    // Depends on a query's window, not on the keys that all rows see: independent of the number of queries.
    __device__ int64_t keys_of_split(const Sequence &s) const {
        return split_keys(s.length < window ? s.length : window, splits.wanted);
    }

    // The first key that rows from `row` on see.
    __device__ int64_t first_key(const Sequence &s, int64_t row) const {
        const int64_t seen = s.length - s.queries + query_of(row) + 1;
        return seen > window ? seen - window : 0;
    }

    // Whether q_starts goes from 0 to the number of queries without ever decreasing. By a whole warp.
    __device__ bool starts_fit() const {
        bool fit = starts[0] == 0 && starts[batch] == queries;
        for (int64_t b = threadIdx.x % kWarp; b < batch; b += kWarp) {
            fit = fit && starts[b] <= starts[b + 1];
        }
        return __all_sync(cuda::kAllLanes, fit);
    }

    // The sequence and tile with number `index` of all, skipping sequences of few rows. By a whole warp.
    __device__ bool find_tile(int64_t index, int64_t &b, int64_t &tile) const {
        const int lane = threadIdx.x % kWarp;
        for (int64_t from = 0; from < batch; from += kWarp) {
            int64_t count = 0;
            if (from + lane < batch) {
                const int64_t rows = sequence(from + lane).queries * group;
                count = rows > kSplitRowsOfMany ? (rows + tile_rows - 1) / tile_rows : 0;
            }
            int64_t up_to = count;
            for (int distance = 1; distance < kWarp; distance *= 2) {
                const int64_t before = __shfl_up_sync(cuda::kAllLanes, up_to, distance);
                up_to += lane >= distance ? before : 0;
            }
            const unsigned behind = __ballot_sync(cuda::kAllLanes, index < up_to);
            if (behind != 0) {
                const int found = __ffs(behind) - 1;
                b = from + found;
                tile = __shfl_sync(cuda::kAllLanes, up_to, found) - 1 - index; // the later rows first
                return true;
            }
            index -= __shfl_sync(cuda::kAllLanes, up_to, kWarp - 1);
        }
        return false;
    }

    // The offset of the keys of a sequence and key head in k (or v); with block tables, of the key head in the cache.
    __device__ __forceinline__ int64_t start_of(const int64_t (&strides)[3], const WorkTile &u) const {
        return (tables.data != nullptr ? 0 : u.b * strides[0]) + u.kv_head * strides[2];
    }
    // The offset of the sequence's entries in the block tables.
    __device__ __forceinline__ int64_t table_of(const WorkTile &u) const { return u.b * tables.stride; }
    // The place of a key (< the sequence's length), relative to start_of.
    __device__ __forceinline__ KeyPlace find(int64_t table, int64_t key) const {
        if (tables.data == nullptr) {
            return {0, key};
        }
        const auto block = static_cast<int64_t>(by_block_size.quotient(static_cast<uint64_t>(key)));
        const int64_t outer = tables.at(table + block * table_stride);
        return {outer < blocks ? outer : -1, key - block * block_size};
    }
    // Its offset, or kBadBlock.
    __device__ __forceinline__ int64_t locate(const int64_t (&strides)[3], const WorkTile &u, int64_t key) const {
        const KeyPlace place = find(table_of(u), key);
        return place.outer < 0 ? kBadBlock : start_of(strides, u) + place.outer * strides[0] + place.inner * strides[1];
    }

    // The scale of a key's row of k (or v); 1 for a key in a block outside the cache.
    __device__ __forceinline__ float scale_of(const float *scales, const int64_t (&strides)[3], const WorkTile &u,
                                              int64_t key) const {
        const int64_t at = locate(strides, u, key);
        return at == kBadBlock ? 1.0f : scales[at];
    }

    // The offset of a row (of the sequence and key head) in q or out.
    __device__ __forceinline__ int64_t row_at(const int64_t (&strides)[3], const WorkTile &u, int64_t row) const {
        const int64_t query = query_of(row);
        return (starts.data != nullptr ? 0 : u.b) * strides[0] + (u.s.first_query + query) * strides[1] +
               (u.kv_head * group + row - query * group) * strides[2];
    }

    // Turns products q k of one row into scores.
    struct RowScores {
        int64_t mask_at; // of key 0
        int64_t own;     // the query's own position
        int64_t seen;    // how many keys it sees, those before its window included; may be negative
        float slope;
        float sink; // one more score; -infinity: none, or combine() adds it
    };
    // Infinity becomes NaN, because it gives no probabilities.
    __device__ __forceinline__ float sink_of(int64_t head) const {
        if (sinks == nullptr) {
            return -INFINITY;
        }
        const float sink = cuda::widen(sinks[head * sinks_stride]);
        return sink == INFINITY ? not_a_number() : sink;
    }
    // Rows beyond the tile's last one are like that one.
    __device__ RowScores row_scores(const WorkTile &u, int64_t row) const {
        row = row < u.first_row + u.rows ? row : u.first_row + u.rows - 1;
        const int64_t query = query_of(row), head = u.kv_head * group + row - query * group;
        const int64_t own = u.s.length - u.s.queries + query;
        return {u.b * mask_strides[0] + head * mask_strides[1] + query * mask_strides[2], own,
                causal ? own + 1 : u.s.length, slopes != nullptr ? slopes[head * slopes_stride] : 0.0f,
                splits.count == 1 ? sink_of(head) : -INFINITY};
    }
    // Whether a row that sees the keys before `seen` sees this one: one comparison with 0 and the window.
    __device__ __forceinline__ bool sees(int64_t seen, int64_t key) const {
        return static_cast<uint64_t>(seen - 1 - key) < static_cast<uint64_t>(window);
    }
    __device__ __forceinline__ float score(float product, const RowScores &row, int64_t key) const {
        float x = capped ? softcap * tanhf(product * cap_factor) : product * scale;
        if (mask_dtype != INFINI_DTYPE_INVALID) {
            const int64_t at = row.mask_at + key * mask_strides[3];
            if (mask_dtype == INFINI_DTYPE_BOOL) {
                x = static_cast<const uint8_t *>(mask)[at] != 0 ? x : -INFINITY;
            } else if (mask_dtype == INFINI_DTYPE_F32) {
                x += static_cast<const float *>(mask)[at];
            } else {
                x += cuda::widen(static_cast<const T *>(mask)[at]);
            }
        }
        if (slopes != nullptr) {
            x += row.slope * static_cast<float>(key - row.own);
        }
        return x;
    }

    // Stores kCount columns of a row from `column` on: sums of probability x value, where the probabilities, relative
    // to the largest score, sum up to `total`. With several splits as partial sums for combine(), else as the result.
    // place: the row's place_of().
    template <int kCount>
    __device__ __forceinline__ void put(int64_t place, int column, const float (&values)[kCount], float total,
                                        float largest) const {
        splits.count > 1 ? put_partial(place, column, values, total, largest) : write(place, column, values, total);
    }
    template <int kCount>
    __device__ __forceinline__ void put_partial(int64_t place, int column, const float (&values)[kCount], float total,
                                                float largest) const {
        cuda::store(partial_out + place * size + column, values, size % 4 == 0 && column + kCount <= size,
                    size - column);
        if (column == 0) {
            partial_sums[place] = make_float2(total, largest);
        }
    }
    __device__ __forceinline__ int64_t place_of(const WorkTile &u, int64_t row) const {
        return splits.count > 1 ? ((u.b * kv_heads + u.kv_head) * row_limit + row) * splits.count + u.split
                                : row_at(out_strides, u, row);
    }

    template <int kCount>
    __device__ __forceinline__ void write(int64_t place, int column, const float (&values)[kCount], float total) const {
        const float inverse = 1.0f / total;
        float result[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            result[i] = total == 0 ? 0.0f : values[i] * inverse;
        }
        cuda::store(out + place + column, result, whole_out && column + kCount <= size, size - column);
    }
};

// Combines the warps' sums of a row and its sink, by one warp: the warps' totals and largest scores are `step` apart,
// their columns, `columns` from first_column on, out_step.
template <typename T, typename E>
__device__ void join_warps(const Problem<T, E> &p, const WorkTile &u, int64_t row, float sink, int first_column,
                           int columns, const float *sums, const float *largest, int step, const float *out,
                           int out_step) {
    constexpr int kCount = 4;
    float most = -INFINITY, total = u.s.bad ? not_a_number() : 0.0f, factors[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        most = fmaxf(most, largest[warp * step]);
    }
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        factors[warp] = exp_for<T>(largest[warp * step] - base_of(most));
        total += sums[warp * step] * factors[warp];
    }
    total += exp_for<T>(sink - base_of(most)); // last, as in combine(): the same bits whether it is called or not
    const int64_t place = p.place_of(u, row);
    for (int column = threadIdx.x % kWarp * kCount; column < columns && first_column + column < p.size;
         column += kWarp * kCount) {
        float values[kCount] = {};
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            float part[kCount];
            cuda::load(part, out + warp * out_step + column, true, kCount);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] += part[i] * factors[warp];
            }
        }
        p.put(place, first_column + column, values, total, most);
    }
}

// Sets every row to NaN, for an invalid q_starts. By all blocks.
template <typename T, typename E> __device__ void write_not_a_number(const Problem<T, E> &p) {
    const int64_t heads = p.kv_heads * p.group, rows = p.queries * heads;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        T *out = p.out + row / heads * p.out_strides[1] + row % heads * p.out_strides[2];
        for (int column = threadIdx.x; column < p.size; column += blockDim.x) {
            out[column] = cuda::narrow<T>(not_a_number());
        }
    }
}

// Combines the sums of a row over its splits, each relative to its own largest score. A block has a row.
template <typename T, typename E>
__global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ Problem<T, E> p) {
    cuda::grid_dependency_sync();
    WorkTile u{};
    const int64_t row = blockIdx.x % p.row_limit, line = blockIdx.x / p.row_limit;
    u.kv_head = line % p.kv_heads;
    u.b = line / p.kv_heads;
    u.s = p.sequence(u.b);
    const int64_t rows = u.s.queries * p.group;
    if (row >= rows || rows > p.row_limit || (p.keeps_empty && u.s.length == 0 && !u.s.bad)) {
        return;
    }
    const int64_t first = blockIdx.x * p.splits.count;
    const int64_t keys = u.s.length - p.first_key(u.s, 0);
    const int64_t each = p.keys_of_split(u.s);
    const int live = static_cast<int>((keys + each - 1) / each);
    float largest = -INFINITY, total = u.s.bad ? not_a_number() : 0.0f;
    for (int i = 0; i < live; ++i) {
        largest = fmaxf(largest, p.partial_sums[first + i].y);
    }
    const float base = base_of(largest);
    for (int i = 0; i < live; ++i) {
        const float2 sums = p.partial_sums[first + i];
        total += sums.x * exp_for<T>(sums.y - base);
    }
    total += exp_for<T>(p.sink_of(u.kv_head * p.group + row - p.query_of(row) * p.group) - base);
    const int64_t place = p.row_at(p.out_strides, u, row);
    for (int column = threadIdx.x; column < p.size; column += kThreads) {
        float value[1] = {0.0f};
#pragma unroll 4
        for (int i = 0; i < live; ++i) {
            value[0] += p.partial_out[(first + i) * p.size + column] * exp_for<T>(p.partial_sums[first + i].y - base);
        }
        p.write(place, column, value, total);
    }
}

} // namespace infini::attention::nvidia
