// The block sizes of the CPU kernel of attention, and the thresholds between its algorithms.
#pragma once

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kRowBlock = 96;  // rows (queries x query heads of a key head) that share one packed block of keys
constexpr int64_t kKeyBlock = 128; // keys that are packed at a time: K, V and scores of a block stay in L2
// Up to this many rows, scores are dot products with K in place, for four rows at a time; with more, packing K first is
// faster. From memory 8 rows of half types gain 1.05 to 1.2 times, 6 lose as much.
constexpr int64_t kMaxDotRows = 8;
// bytes: of an element of q.
constexpr bool scores_by_dots(int64_t rows, int64_t bytes) {
    return rows <= (bytes == 4 ? kMaxDotRows : 4) || rows == kMaxDotRows;
}
// The keys of a block then, for an element size in bytes: their K or V, and the prefetched lines, stay in L1.
constexpr int64_t dot_keys(int64_t bytes) {
    return bytes == 1 ? 128 : 64;
}
// Up to this many rows V is multiplied in place; with more, it is packed first, and bfloat16 is multiplied in tile
// registers where there are any (by peak rates they would be faster with fewer rows too, but decode waits for memory).
constexpr int64_t kDirectRows = 12;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPageKeys = 16; // one key in so many is touched early, because few share a memory page
// Key heads that are processed together where there are few rows: a key's heads are adjacent in most layouts, and in
// that order K and V are read from memory 1.2 times as fast. The limits of heads, and of bytes of a block of keys: the
// L2 cache holds two such blocks.
constexpr int64_t kMaxTogether = 16;
constexpr int64_t kTogetherBytes = 256 * 1024;
// Where there is one block of rows (decode), long sequences are split among the threads, by their length alone: the
// least keys of a split, and the most splits.
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
