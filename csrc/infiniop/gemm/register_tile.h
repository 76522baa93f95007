// The register tile of gemm, and the epilogue that writes its sums to c.
// A tile is up to kTileRows rows by kTileColumns columns of c; its sums are row-major, kTileColumns floats each.
#pragma once

#include <type_traits>

#include "pack_panels.h"

namespace infini::INFINI_LEVEL {
namespace {

// One accumulator per row and vector of columns. With the vectors of b and one word of a they fit into the 32 vector
// registers of AVX-512 or NEON, or the 16 of AVX2 and SSE.
#if defined(__AVX512F__)
constexpr int kTileRows = 14, kTileVectors = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileVectors = 2;
#elif defined(__aarch64__)
constexpr int kTileRows = 6, kTileVectors = 4; // each word of a takes a load, so many columns per word are better
#else
constexpr int kTileRows = 4, kTileVectors = 2;
#endif
constexpr int kTileColumns = kTileVectors * kLanes;

// The addresses prefetched while a tile is computed, because they are packed next: two cache lines per word of k, the
// second `second` bytes after the first. They advance by `step` bytes per word, and after every kPrefetchRun words by
// `run` bytes from the start of that run.
struct Prefetch {
    const char *at;
    int64_t step, second, run;
};
constexpr int64_t kPrefetchRun = 8;

// Selects how two words are multiplied: as floats or as pairs, whatever type was packed.
template <typename T> using PackedType = std::conditional_t<PackedK<T>::kElements == 1, float, T>;

// sums = a @ b over `words` words of k (`first`), or sums += a @ b. Per word of k, a has kM words, a_width apart, and b
// kTileColumns words.
template <int kM, bool kPrefetch, typename T>
__attribute__((noinline)) void multiply_tile(const float *a, int64_t a_width, const float *b, int64_t words,
                                             float *sums, bool first, Prefetch next) {
    VecF sum[kM][kTileVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) {
            sum[m][v] = VecF{};
            if (!first) {
                __builtin_prefetch(sums + m * kTileColumns + v * kLanes, 1);
            }
        }
    }
    for (int64_t run = 0; run < words; run += kPrefetchRun, next.at += next.run) {
        const char *line = next.at;
        const int64_t end = words - run < kPrefetchRun ? words - run : kPrefetchRun;
        for (int64_t i = 0; i < end; ++i, a += a_width, b += kTileColumns, line += next.step) {
            VecF column[kTileVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kTileVectors; ++v) {
                column[v] = load(b + v * kLanes);
                keep_in_register(column[v]);
            }
            if constexpr (kPrefetch) {
                __builtin_prefetch(line, 0, 2); // into L2: L1 holds the panels
                __builtin_prefetch(line + next.second, 0, 2);
            }
#pragma GCC unroll 16
            for (int m = 0; m < kM; ++m) {
                VecF row = splat(a[m]);
                keep_in_register(row);
#pragma GCC unroll 4
                for (int v = 0; v < kTileVectors; ++v) {
                    sum[m][v] = PackedK<T>::multiply_add(row, column[v], sum[m][v]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) {
            float *at = sums + m * kTileColumns + v * kLanes;
            store(at, first ? sum[m][v] : load(at) + sum[m][v]);
        }
    }
}

// The same with a row count known at run time; T: a PackedType.
template <typename T, bool kPrefetch, int kM = 1>
void multiply_tile(int64_t m, const float *a, int64_t a_width, const float *b, int64_t words, float *sums, bool first,
                   const Prefetch &next) {
    if constexpr (kM < kTileRows) {
        if (m > kM) {
            return multiply_tile<T, kPrefetch, kM + 1>(m, a, a_width, b, words, sums, first, next);
        }
    }
    multiply_tile<kM, kPrefetch, T>(a, a_width, b, words, sums, first, next);
}

// The output matrix c: element (i, j) is data[i * row_stride + j * column_stride].
template <typename T> struct Output {
    T *data;
    int64_t row_stride, column_stride;
    float alpha, beta;
};

template <typename T, typename Lanes>
INFINI_ALWAYS_INLINE void write_vector(const Output<T> &c, T *to, VecF sums, Lanes lanes) {
    VecF value = sums * splat(c.alpha);
    if (c.beta != 0) {
        value = fma(load_at(to, 0, lanes), splat(c.beta), value);
    }
    store_at(to, 0, value, lanes);
}

// c = alpha * sums + beta * c for n elements of a row of c.
template <typename T> void write_row(const Output<T> &c, T *to, const float *sums, int64_t n) {
    if (c.column_stride == 1) {
        for_each_vector(n, [&](int64_t j, auto lanes) { write_vector(c, to + j, load_at(sums, j, lanes), lanes); });
        return;
    }
    for (int64_t j = 0; j < n; ++j, to += c.column_stride) { // c is a single row, or strided
        write_vector(c, to, load(sums + j, 1), 1);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
