// How attention's CUDA kernels split the keys of a sequence among blocks (flash-decoding): from the shape of one
// sequence, the window and the number of multiprocessors alone, so that neither other sequences nor lengths change a
// row's bits.
#pragma once

#include <cstdint>

namespace infini::attention {

// Sequences with at most so many rows (queries x query heads of a key head) are split: above, rows fill the GPU.
constexpr int64_t kSplitRows = 64;
// Where each sequence has a number of queries of its own, that only the GPU knows (q_starts): one tile of rows.
constexpr int64_t kSplitRowsOfMany = 16;

struct Splits {
    int64_t keys;  // of each split; the last may have fewer
    int64_t count; // for a sequence that fills its cache; at least 1
};

// capacity: keys that a query can see. One sequence alone should give each multiprocessor two blocks. 256 keys, 64
// KiB of K and V for a head of 64 halves, are the least that pays: a split's partial sums are written and read again, 4
// bytes for each row and column, which is 3 % of K and V for 4 rows.
inline Splits plan_splits(int64_t capacity, int64_t kv_heads, int64_t multiprocessors) {
    constexpr int64_t kLeastKeys = 256, kStep = 64;
    const auto ceil_div = [](int64_t a, int64_t b) { return a / b + (a % b != 0); };
    const int64_t wanted = ceil_div(2 * multiprocessors, kv_heads);
    const int64_t even = ceil_div(ceil_div(capacity, wanted), kStep) * kStep;
    const int64_t keys = even < kLeastKeys ? kLeastKeys : even;
    return {keys, capacity <= keys ? 1 : ceil_div(capacity, keys)};
}

} // namespace infini::attention
