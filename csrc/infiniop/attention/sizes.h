// The table of sizes of the attention kernel: how much is taken at a time, and from where on another way is faster.
#pragma once

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kRowBlock = 96;  // rows (queries x query heads of a key head) that share one packed block of keys
constexpr int64_t kKeyBlock = 128; // keys that are packed at a time: K, V and scores of a block stay in L2
// With so few rows their scores are dot products with K where it lies, for four rows at a time; otherwise packing K
// first costs less. From memory 8 rows of half types gain 1.05 to 1.2 times, 6 lose as much.
constexpr int64_t kMostDotRows = 8;
// bytes: of an element of q.
constexpr bool scores_by_dots(int64_t rows, int64_t bytes) {
    return rows <= (bytes == 4 ? kMostDotRows : 4) || rows == kMostDotRows;
}
// Keys at a time then, of elements of so many bytes: K or V of so many, and what is fetched meanwhile, stay in L1.
constexpr int64_t dot_keys(int64_t bytes) {
    return bytes == 1 ? 128 : 64;
}
// Up to so many rows V is multiplied where it lies; above, it is packed first, and where there are tile registers these
// multiply bfloat16 (by the peaks they would pay with fewer rows, too, but not for decode that waits for memory).
constexpr int64_t kDirectRows = 12;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPageKeys = 16; // one of so many is touched long before: few share a page of memory
// Key heads that are taken together where there are few rows: the heads of a key lie side by side in most layouts, and
// in that order K and V come from memory 1.2 times as fast. So many at most, and so many bytes of a block of keys: the
// L2 cache holds two such blocks.
constexpr int64_t kMostTogether = 16;
constexpr int64_t kTogetherBytes = 256 * 1024;
// Where there is one block of rows (decode), long sequences are split for the threads, by their length alone: into
// pieces of at least so many keys, and into at most so many pieces.
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kMaxSplits = 16;
constexpr int64_t kFlopsPerByte = 8; // of arithmetic that takes as long as one byte of traffic, for parallel_for

// Register tiles: rows x vectors of accumulators, as many as the machine's 32 or 16 registers hold.
constexpr int kTileRows = 6;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kTileColumns = kTileVectors * kLanes;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

constexpr int64_t round_up(int64_t a, int64_t b) {
    return ceil_div(a, b) * b;
}

} // namespace
} // namespace infini::INFINI_LEVEL
