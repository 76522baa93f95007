// linear of many rows in float32 with AVX2: a group of weight rows is packed into L1, in the order in which tiles of x
// read it, and multiplied by all tiles. The order of sums is that of the kernel for few rows.
#pragma once

#include "steps.h"

namespace infini::INFINI_LEVEL {
namespace {

// Unpacked, a tile reads its weight rows from L2 and is limited by that. GMAC/s of one Zen 3 core (52 at most), 2048 ->
// 2816, by hand, in turns, unpacked, packed and MKL: 16 rows 28, 31, 23; 64 rows 34, 37, 36; 256 rows 32, 39, 46. Half
// types, whose rows are half as long, have 37 to 39 unpacked and gain nothing; with SSE the packed form takes 1.7 times
// as long. AVX-512 was not measured.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename W> constexpr bool kPacks = sizeof(W) == sizeof(float);
#else
template <typename W> constexpr bool kPacks = false;
#endif

constexpr int64_t kPackedTiles = 3;     // tiles of x from which packing pays
constexpr int64_t kPackedMaxRows = 128; // rows of x that share one packing of the weight
// A tile has kPackedRows weight rows and up to four rows of x, so 12 accumulators. A group in blocks of kPackedK
// columns takes 24 KiB; smaller groups and other lengths were no faster.
constexpr int kPackedRows = 3;
constexpr int64_t kPackedGroup = 12, kPackedK = 512;

// Packs k elements of kPackedRows weight rows, of which `rows` exist: a step of each, then the next step. Rows that do
// not exist, and steps beyond k, are zeros.
inline void pack_weights(const float *w, int64_t w_stride, int64_t rows, int64_t k, float *packed) {
    for (int64_t r = 0; r < kPackedRows; ++r) {
        const float *row = w + r * w_stride;
        float *to = packed + r * kLanes;
        int64_t i = 0;
        for (; r < rows && i + kLanes <= k; i += kLanes, to += kPackedRows * kLanes) {
            store(to, load(row + i));
        }
        for (; i < k; i += kLanes, to += kPackedRows * kLanes) {
            store(to, r < rows ? load(row + i, static_cast<int>(k - i)) : VecF{});
        }
    }
}

// The cache lines of kPackedRows weight rows that a tile prefetches, because they are packed next: `step` elements
// further after every kPrefetchSteps steps.
struct PackedNext {
    const float *at;
    int64_t stride, step;
};
constexpr int64_t kPrefetchSteps = 4;

// part[m * kPackedGroup + r] = weight row r * row m of x over some steps, or += unless these are the first.
template <int kM>
__attribute__((noinline)) void multiply_packed(const float *w, const float *x, int64_t steps, VecF *part, bool first,
                                               PackedNext next) {
    VecF sums[kPackedRows][kM];
    const auto for_each = [&](const auto &body) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
            for (int r = 0; r < kPackedRows; ++r) {
                body(sums[r][m], part[m * kPackedGroup + r]);
            }
        }
    };
    for_each([&](VecF &sum, const VecF &before) { sum = first ? VecF{} : before; });
    while (steps > 0) {
#pragma GCC unroll 4
        for (int r = 0; r < kPackedRows; ++r) {
            __builtin_prefetch(next.at + r * next.stride, 0, 2); // into L2: L1 holds the group
        }
        next.at += next.step;
        const int64_t some = steps < kPrefetchSteps ? steps : kPrefetchSteps;
        steps -= some;
        for (int64_t i = 0; i < some; ++i, w += kPackedRows * kLanes, x += kM * kLanes) {
            VecF weights[kPackedRows];
#pragma GCC unroll 4
            for (int r = 0; r < kPackedRows; ++r) {
                weights[r] = load(w + r * kLanes);
                keep_in_register(weights[r]);
            }
#pragma GCC unroll 4
            for (int m = 0; m < kM; ++m) {
                VecF row = load(x + m * kLanes);
                keep_in_register(row);
#pragma GCC unroll 4
                for (int r = 0; r < kPackedRows; ++r) {
                    sums[r][m] = fma(weights[r], row, sums[r][m]);
                }
            }
        }
    }
    for_each([&](const VecF &sum, VecF &after) { after = sum; });
}

} // namespace
} // namespace infini::INFINI_LEVEL
