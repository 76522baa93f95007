// Heads on CUDA: tensors [tokens, heads, D]. A head's columns are split into slices of two vectors, so that a thread of
// rope has both elements of every pair that it rotates. HeadPlan assigns slices to threads: one head per thread for few
// tokens, two for many. Included by *.cu files only.
#pragma once

#include "launch.cuh"
#include "vectors.cuh"

namespace infini::cuda {

// A thread's slice of a head's columns [first, last): vector i counted from `first`, and vector i from first + apart.
template <typename T> struct Slice {
    int at[2];
    int count[2]; // elements in each vector; 0: none
    bool whole[2];

    // aligned: rows begin at multiples of 16 bytes.
    __device__ __forceinline__ Slice(int first, int last, int apart, int i, bool aligned) {
        constexpr int kElements = kWidth<T>;
        const int middle = first + apart < last ? first + apart : last;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            at[k] = first + k * apart + i * kElements;
            const int left = (k == 0 ? middle : last) - at[k];
            count[k] = left < 0 ? 0 : left < kElements ? left : kElements;
            // Not count == kElements: of that ptxas 13.0 makes the predicate of a VIMNMX.RELU, which an H100 also sets
            // where left is 0: the vector behind the row's end was copied too.
            whole[k] = aligned && (first | apart) % kElements == 0 && left >= kElements;
        }
    }

    __device__ __forceinline__ void read(Vector<T> (&vectors)[2], const T *row) const {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            vectors[k] = load(row + at[k], whole[k], count[k]);
        }
    }
    __device__ __forceinline__ void write(T *row, const Vector<T> (&vectors)[2]) const {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            store(row + at[k], vectors[k], whole[k], count[k]);
        }
    }
};

// The columns of a head as an int, which slices count in.
inline int checked_columns(int64_t columns) {
    constexpr int64_t kMax = int64_t{1} << 30;
    if (columns > kMax) {
        throw Error(INFINI_STATUS_BAD_TENSOR_SHAPE,
                    message("infini: on CUDA a head must have at most ", kMax, " columns, got ", columns));
    }
    return static_cast<int>(columns);
}

// How many slices n columns make, of two vectors of `width` elements each.
INFINI_ALWAYS_INLINE int slices_of(int n, int width) {
    return n / (2 * width) + (n % (2 * width) != 0);
}

constexpr int kHeadThreads = 128; // threads per block, at most
constexpr int kThreadHeads = 2;   // adjacent heads per thread, at most
constexpr int kTileTokens = 32;   // tokens per block, at most

// With at least this many slices (enough threads to fill a GPU) a thread owns two heads, which halves the loads of
// angles and doubles the bytes in flight.
constexpr int64_t kManySlices = 132 * 1024;

// Blocks have threads.x * threads.y threads: x counts a token's units (a slice of `thread_heads` heads each), y tokens.
struct HeadPlan {
    int64_t tokens;
    int64_t heads;
    unsigned slices;  // per head
    unsigned units;   // per token
    unsigned parts;   // blocks per token
    int thread_heads; // 1 or 2
    int tile;         // tokens per block; threads.y of them at a time
    dim3 threads;
    int64_t blocks;

    // wanted_tile: the least number of tokens per block.
    HeadPlan(int64_t tokens, int64_t heads, int slices, int64_t wanted_tile)
        : tokens(tokens), heads(heads), slices(static_cast<unsigned>(slices)) {
        thread_heads = tokens * heads * slices >= kManySlices ? kThreadHeads : 1;
        units = grid_x((heads + thread_heads - 1) / thread_heads * slices);
        threads.x = units < kHeadThreads ? units : kHeadThreads;
        parts = (units + threads.x - 1) / threads.x;
        const int64_t fitting = kHeadThreads / threads.x < kTileTokens ? kHeadThreads / threads.x : kTileTokens;
        threads.y = static_cast<unsigned>(tokens < fitting ? tokens : fitting);
        tile = static_cast<int>(wanted_tile < kTileTokens ? wanted_tile : kTileTokens);
        tile = tile > static_cast<int>(threads.y) ? tile : static_cast<int>(threads.y);
        blocks = (tokens + tile - 1) / tile * parts;
    }

    // ---- the share of the current block and thread ----

    __device__ __forceinline__ int64_t first_token() const { return static_cast<int64_t>(blockIdx.x / parts) * tile; }
    __device__ __forceinline__ int64_t end_token() const {
        const int64_t end = first_token() + tile;
        return end < tokens ? end : tokens;
    }
    // One past the block's last head.
    __device__ __forceinline__ int64_t end_head() const {
        const unsigned last = (blockIdx.x % parts + 1) * threads.x - 1;
        return (static_cast<int64_t>(last / slices) + 1) * thread_heads;
    }
    __device__ __forceinline__ unsigned unit() const { return blockIdx.x % parts * threads.x + threadIdx.x; }
    // False for threads beyond the last unit.
    __device__ __forceinline__ bool has_slice() const { return unit() < units; }
    __device__ __forceinline__ int slice() const { return static_cast<int>(unit() % slices); }
    __device__ __forceinline__ int64_t head() const { return static_cast<int64_t>(unit() / slices) * thread_heads; }
    // Whether the thread owns a slice of its k-th head.
    __device__ __forceinline__ bool owns(int64_t head, int k) const { return k < thread_heads && head + k < heads; }
};

} // namespace infini::cuda
