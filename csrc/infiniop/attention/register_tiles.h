// c = a b, or c += a b, by register tiles; the rows of b are evenly spaced, or at any addresses: those of K and V. Also
// prefetches the next block.
#pragma once

#include "kv_prefetcher.h"
#include "packing.h"

namespace infini::INFINI_LEVEL {
namespace {

template <typename T> struct Dense {
    const T *first;
    int64_t stride;
    const T *operator[](int64_t i) const { return first + i * stride; }
    Dense from(int64_t i) const { return {first + i * stride, stride}; }
    void at_row(int64_t) const {}
};

template <typename T> struct Scattered {
    // Every kEach rows a line of each stream is prefetched: on average as many lines as a tile reads.
    static constexpr int64_t kEach =
        KvPrefetcher<T>::kStreams * kLineBytes / (kTileColumns * static_cast<int64_t>(sizeof(T)));
    static_assert(kEach > 0);
    const T *const *rows;
    int64_t column;
    KvPrefetcher<T> &ahead;
    const T *operator[](int64_t i) const { return rows[i] + column; }
    Scattered from(int64_t i) const { return {rows + i, column, ahead}; }
    void at_row(int64_t i) const {
        if (i % kEach == 0) {
            ahead.fetch();
        }
    }
};

// ---- c [rows, vectors] = or += a [rows, depth] b [depth, vectors] ----

// Two vectors of columns at a time: in order or, if that is cheaper, the even columns and then the odd ones; then the
// sums in registers are deinterleaved too.
template <typename B> struct Columns {
    static constexpr bool kDeinterleaved = false;
};

#if defined(__AVX512F__)

template <> struct Columns<Scattered<bf16>> {
    static constexpr bool kDeinterleaved =
        true; // a shift and a mask make two vectors of floats, instead of two of each
    static void load(const bf16 *p, VecF &even, VecF &odd) {
        const __m512i pairs = _mm512_loadu_si512(p);
        even = (VecF)_mm512_slli_epi32(pairs, 16);
        odd = (VecF)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    }
    static void deinterleave(VecF &a, VecF &b) {
        const VecF even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        b = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        a = even;
    }
    static void interleave(VecF &even, VecF &odd) {
        const VecF low = zip_low(even, odd);
        odd = zip_high(even, odd);
        even = low;
    }
};

#endif

// The loops are unrolled by pragma because the compiler's own unrolling comes too late to keep the sums in registers.
template <int kRows, int kVectors, bool kAdd, typename A, typename B>
void tile(const A *a, int64_t a_stride, const B &b, int64_t depth, float *c, int64_t c_stride) {
    constexpr bool kDeinterleaved = Columns<B>::kDeinterleaved && kVectors % 2 == 0;
    VecF sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            sums[r][i] = kAdd ? load(c + r * c_stride + i * kLanes) : VecF{};
        }
        if constexpr (kDeinterleaved) {
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; i += 2) {
                Columns<B>::deinterleave(sums[r][i], sums[r][i + 1]);
            }
        }
    }
    for (int64_t at = 0; at < depth; ++at) {
        b.at_row(at);
        const auto *b_row = b[at];
        decltype(load(b_row)) right[kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            if constexpr (!kDeinterleaved) {
                right[i] = load(b_row + i * kLanes);
            } else if (i % 2 == 0) {
                Columns<B>::load(b_row + i * kLanes, right[i], right[i + 1]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const A left = a[r * a_stride + at];
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; ++i) {
                sums[r][i] = multiply_add(left, right[i], sums[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        if constexpr (kDeinterleaved) {
#pragma GCC unroll 8
            for (int i = 0; i < kVectors; i += 2) {
                Columns<B>::interleave(sums[r][i], sums[r][i + 1]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            store(c + r * c_stride + i * kLanes, sums[r][i]);
        }
    }
}

template <bool kAdd, typename A, typename B> struct RegisterTiles {
    using Function = void (*)(const A *, int64_t, const B &, int64_t, float *, int64_t);

    template <int kVectors> static Function of_rows(int64_t rows) {
        switch (rows) {
        case 1:
            return tile<1, kVectors, kAdd, A, B>;
        case 2:
            return tile<2, kVectors, kAdd, A, B>;
        case 3:
            return tile<3, kVectors, kAdd, A, B>;
        case 4:
            return tile<4, kVectors, kAdd, A, B>;
        case 5:
            return tile<5, kVectors, kAdd, A, B>;
        default:
            return tile<kTileRows, kVectors, kAdd, A, B>;
        }
    }

    static Function of(int64_t rows, int64_t vectors) {
        switch (vectors) {
        case 1:
            return of_rows<1>(rows);
#if defined(__AVX512F__)
        case 2:
            return of_rows<2>(rows);
        case 3:
            return of_rows<3>(rows);
#endif
        default:
            return of_rows<kTileVectors>(rows);
        }
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
