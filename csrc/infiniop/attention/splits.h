// How attention's CUDA kernels split the keys of a sequence among blocks (flash-decoding): by its own length, the
// window and the number of multiprocessors alone, so that neither other sequences nor the size of the cache change a
// row's bits.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define INFINI_HOST_DEVICE __host__ __device__
#else
#define INFINI_HOST_DEVICE
#endif

namespace infini::attention {

// Sequences with at most this many rows (queries x query heads of a key head) are split: more rows fill the GPU.
constexpr int64_t kSplitRows = 64;
// The same where only the GPU knows the numbers of queries (q_starts): one tile of rows.
constexpr int64_t kSplitRowsOfMany = 16;

struct Splits {
    int64_t wanted; // for a sequence of many keys: with these alone it fills the GPU
    int64_t count;  // at most, of a sequence that fills its cache; at least 1
};

// keys: that a query sees at most, by its cache and its window. One sequence alone should give each multiprocessor two
// blocks. Fewer than 256 keys, 64 KiB of K and V for a head of 64 halves, do not pay: a split's partial sums are
// written and read again, 4 bytes for each row and column, which is 3 % of K and V for 4 rows.
constexpr int64_t kMinSplitKeys = 256;

inline Splits plan_splits(int64_t keys, int64_t kv_heads, int64_t multiprocessors) {
    const auto ceil_div = [](int64_t a, int64_t b) { return a / b + (a % b != 0); };
    const int64_t wanted = ceil_div(2 * multiprocessors, kv_heads), fit = ceil_div(keys, kMinSplitKeys);
    return {wanted, fit < 1 ? 1 : fit < wanted ? fit : wanted};
}

// How many keys each split of a sequence has, by the keys that its queries see: the cache's capacity does not count, so
// that short sequences are split alike in long and short caches, with the same bits.
INFINI_HOST_DEVICE inline int64_t split_keys(int64_t keys, int64_t wanted) {
    constexpr int64_t kStep = 64;
    const int64_t even = keys / wanted + (keys % wanted != 0), whole = (even + kStep - 1) / kStep * kStep;
    return whole < kMinSplitKeys ? kMinSplitKeys : whole;
}

} // namespace infini::attention
