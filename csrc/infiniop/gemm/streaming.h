// gemm with a few rows: b is multiplied without packing, in the same order of sums as in register tiles. Limit: memory
// bandwidth; every element of b is read once.
#pragma once

#include "blocking.h"

namespace infini::INFINI_LEVEL {
namespace {

// Rows that share a pass over b: one accumulator each; in the second case plus kLanes transposed words.
constexpr int kRowsAlongJ = kManyRegisters ? 16 : 8, kRowsAlongK = kManyRegisters ? 8 : 4;
constexpr int64_t kStreamElements = 8; // elements of k per load and store of the sums

// How many columns of b are added to the sums at a time. With one row of a, memory is the limit: b is read in long runs
// of whole cache lines, which suit the hardware prefetcher, and the sums stay in L2. With more rows the sums stay in
// L1, and software prefetches b's next rows.
template <int kM> constexpr int kVectors = kM == 1 ? 8 : 1;         // vectors of columns at once
template <int kM> constexpr int64_t kSums = kM == 1 ? 16384 : 4096; // rows times columns
constexpr int64_t kMaxSums = kSums<1>;

// sums += a @ b for kWords words of k and kCount vectors of columns (the last may be partial).
template <int kM, int kWords, int kCount, typename T, typename Lanes>
INFINI_ALWAYS_INLINE void add_words(const float *a, const T *b, int64_t k_stride, int64_t left, Lanes lanes,
                                    float *sums, int64_t sums_stride) {
    using W = PackedK<T>;
    constexpr int kLine = kCount > 1 ? W::kLineVectors : 1;
    VecF sum[kM][kCount];
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 16
        for (int v = 0; v < kCount; ++v) {
            sum[m][v] = load(sums + m * sums_stride + v * kLanes);
        }
    }
#pragma GCC unroll 16
    for (int w = 0; w < kWords; ++w) {
        const T *row = b + w * W::kElements * k_stride;
        if constexpr (kM > 1) {
            for (int e = 0; e < W::kElements; ++e) {
                __builtin_prefetch(row + (kWords * W::kElements + e) * k_stride);
            }
        }
        VecF words[kCount];
#pragma GCC unroll 16
        for (int v = 0; v < kCount; v += kLine) {
            if constexpr (kLine > 1) {
                W::line_along_j(row + v * kLanes, k_stride, left - w * W::kElements, words + v);
            } else {
                words[v] = W::along_j(row + v * kLanes, k_stride, left - w * W::kElements, lanes);
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            const VecF factor = splat(a[w * kM + m]);
#pragma GCC unroll 16
            for (int v = 0; v < kCount; ++v) {
                sum[m][v] = W::multiply_add(factor, words[v], sum[m][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 16
        for (int v = 0; v < kCount; ++v) {
            store(sums + m * sums_stride + v * kLanes, sum[m][v]);
        }
    }
}

// The same for a strip of columns.
template <int kM, int kWords, typename T>
void add_words(const float *a, const T *b, int64_t k_stride, int64_t left, int64_t columns, float *sums,
               int64_t sums_stride) {
    int64_t j = 0;
    constexpr int64_t kColumns = kVectors<kM> * kLanes;
    for (; kVectors<kM> > 1 && j + kColumns <= columns; j += kColumns) {
        add_words<kM, kWords, kVectors<kM>>(a, b + j, k_stride, left, Full{}, sums + j, sums_stride);
    }
    for_each_vector(columns - j, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        add_words<kM, kWords, 1>(a, b + j + i, k_stride, left, lanes, sums + j + i, sums_stride);
    });
}

template <int kM, typename T> void multiply_along_j(const Product<T> &p, const float *a, float *sums) {
    constexpr int64_t kElements = PackedK<T>::kElements,
                      kWords = (kM <= 8 ? kStreamElements : kStreamElements / 2) / kElements;
    const int64_t k_stride = p.b.k_stride;
    const EvenSplit blocks = blocks_of<T>(p.k), strips(p.n, kSums<kM> / kM / kTileColumns * kTileColumns, kTileColumns);
    float *const total = sums + kMaxSums;
    for (int64_t strip = 0; strip < strips.count; ++strip) {
        const int64_t columns = strips.length(strip);
        const T *b = p.b.data + strips.begin(strip);
        const float *words = a;
        for (int64_t block = 0; block < blocks.count; ++block) {
            std::memset(sums, 0, sizeof(float) * static_cast<size_t>(strips.size * kM));
            int64_t left = blocks.length(block);
            for (; left >= kWords * kElements; left -= kWords * kElements) {
                add_words<kM, kWords>(words, b, k_stride, left, columns, sums, strips.size);
                words += kWords * kM;
                b += kWords * kElements * k_stride;
            }
            for (; left > 0; left -= kElements) {
                add_words<kM, 1>(words, b, k_stride, left, columns, sums, strips.size);
                words += kM;
                b += kElements * k_stride;
            }
            for (int64_t j = 0; j < strips.size * kM; j += kLanes) {
                store(total + j, block == 0 ? load(sums + j) : load(total + j) + load(sums + j));
            }
        }
        for (int m = 0; m < kM; ++m) {
            write_row(p.c, p.c.data + m * p.c.row_stride + strips.begin(strip) * p.c.column_stride,
                      total + m * strips.size, columns);
        }
    }
}

// Transposes kLanes contiguous columns in registers and multiplies them, for all whole steps of k. `sums` gets the sums
// of the last block of k, which may be incomplete; `total` gets those of the earlier blocks. Prefetches the next kRun
// elements of each column, at the end those of `next`: a whole run of one column per step, which the hardware
// prefetcher then follows. No further ahead, because columns at power-of-two distances compete for the same sets of L1.
template <int kM, typename T>
__attribute__((noinline)) void multiply_columns(const T *b, const T *next, int64_t stride, const float *a,
                                                const EvenSplit &blocks, VecF *sums, VecF *total) {
    using W = PackedK<T>;
    constexpr int64_t kRun = kLanes * kStep<T>;
    VecF sum[kM];
    for (int64_t block = 0, i = 0; block < blocks.count; ++block) {
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            if (block > 0) {
                total[m] = block > 1 ? total[m] + sum[m] : sum[m];
            }
            sum[m] = VecF{};
        }
        for (const int64_t end = i + blocks.length(block) - kStep<T>; i <= end; i += kStep<T>) {
            const int64_t step = i / kStep<T> % kLanes, start = i - step * kStep<T> + kRun;
            const T *ahead = (start < blocks.n ? b + start : next) + step * stride;
#pragma GCC unroll 16
            for (int64_t e = 0; e < kRun; e += kStep<T>) {
                __builtin_prefetch(ahead + e);
            }
            VecF raw[kLanes];
            load_transposed(b + i, stride, kLanes, Full{}, raw);
#pragma GCC unroll 16
            for (int r = 0; r < kLanes; ++r) {
                const VecF first = W::template part<0>(raw[r]);
#pragma GCC unroll 16
                for (int m = 0; m < kM; ++m) {
                    sum[m] = W::multiply_add(splat(a[m]), first, sum[m]);
                }
                a += kM;
                if constexpr (W::kParts == 2) {
                    const VecF second = W::template part<1>(raw[r]);
#pragma GCC unroll 16
                    for (int m = 0; m < kM; ++m) {
                        sum[m] = W::multiply_add(splat(a[m]), second, sum[m]);
                    }
                    a += kM;
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
        sums[m] = sum[m];
    }
}

// The same at an edge: fewer columns than a vector has, or fewer elements of k.
template <int kM, typename T>
void add_edge(const Product<T> &p, const T *b, int64_t columns, const float *a, int64_t k, VecF *sums) {
    alignas(64) float panel[kBlockWords * kLanes];
    pack(p.b, b, columns, k, kLanes, kLanes, panel);
    for (int64_t w = 0; w < ceil_div(k, PackedK<T>::kElements); ++w, a += kM) {
        for (int m = 0; m < kM; ++m) {
            sums[m] = PackedK<T>::multiply_add(splat(a[m]), load(panel + w * kLanes), sums[m]);
        }
    }
}

template <int kM, typename T> void multiply_along_k(const Product<T> &p, const float *a) {
    constexpr int64_t kElements = PackedK<T>::kElements;
    const EvenSplit blocks = blocks_of<T>(p.k);
    const int64_t stride = p.b.j_stride, last_block = blocks.begin(blocks.count - 1);
    const int64_t whole = last_block + blocks.length(blocks.count - 1) / kStep<T> * kStep<T>;
    for (int64_t column = 0; column < p.n; column += kLanes) {
        const T *b = p.b.data + column * stride;
        const int64_t columns = p.n - column < kLanes ? p.n - column : kLanes;
        VecF total[kM] = {}, sums[kM] = {};
        if (columns == kLanes) {
            multiply_columns<kM>(b, column + 2 * kLanes <= p.n ? b + kLanes * stride : b, stride, a, blocks, sums,
                                 total);
            add_edge<kM>(p, b + whole, columns, a + whole / kElements * kM, p.k - whole, sums);
        } else {
            for (int64_t block = 0; block < blocks.count; ++block) {
                for (int m = 0; m < kM; ++m) {
                    total[m] = block > 1 ? total[m] + sums[m] : sums[m];
                    sums[m] = VecF{};
                }
                const int64_t begin = blocks.begin(block);
                add_edge<kM>(p, b + begin, columns, a + begin / kElements * kM, blocks.length(block), sums);
            }
        }
        for (int m = 0; m < kM; ++m) {
            alignas(64) float row[kLanes];
            store(row, blocks.count > 1 ? total[m] + sums[m] : sums[m]);
            write_row(p.c, p.c.data + m * p.c.row_stride + column * p.c.column_stride, row, columns);
        }
    }
}

// The scratch floats of multiply_streaming: a word per row and word of k, plus the sums if b is read along j.
template <typename T> int64_t streaming_words(int64_t m, int64_t k) {
    return ceil_div(m * ceil_div(k, PackedK<T>::kElements), kLanes) * kLanes;
}

template <typename T> int64_t streaming_floats(const Product<T> &p, int64_t m) {
    return streaming_words<T>(m, p.k) + (p.b.along_k ? 0 : 2 * kMaxSums);
}

// At most kRows rows.
template <int kRows, bool kAlongK, int kM = 1, typename T> void multiply_rows(const Product<T> &p, float *a) {
    if constexpr (kM < kRows) {
        if (p.m > kM) {
            return multiply_rows<kRows, kAlongK, kM + 1>(p, a);
        }
    }
    pack(p.a, p.a.data, kM, p.k, kM, kM, a);
    if constexpr (kAlongK) {
        multiply_along_k<kM>(p, a);
    } else {
        multiply_along_j<kM>(p, a, a + streaming_words<T>(kM, p.k));
    }
}

template <typename T> bool streams(const Product<T> &p, int64_t m) {
    return m <= (p.b.along_k ? kRowsAlongK : kRowsAlongJ);
}

template <typename T> void multiply_streaming(const Product<T> &p, float *a) {
    if (p.b.along_k) {
        multiply_rows<kRowsAlongK, true>(p, a);
    } else {
        multiply_rows<kRowsAlongJ, false>(p, a);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
