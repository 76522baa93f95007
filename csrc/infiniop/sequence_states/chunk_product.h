// Products of the small float matrices of a chunk of tokens, which lie in a cache: gated_delta_rule and ssd.
// Included by *_cpu.cpp files after vec.h.
#pragma once

#include <type_traits>

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Columns in whole vectors of any instruction set.
inline int64_t padded(int64_t n) {
    return (n + 15) / 16 * 16;
}

// A [rows, inner], the product's left operand: element (r, i) at data[r * row + i * step].
struct ChunkLeft {
    const float *data;
    int64_t row, step;
};

template <int kRows, int kVectors, typename Initial, typename Finish>
inline __attribute__((always_inline)) void chunk_tile(int64_t r, int64_t c, ChunkLeft a, const float *b, int64_t pitch,
                                                      int64_t inner, const Initial &initial, const Finish &finish) {
    VecF sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            sums[i][j] = initial(r + i, c + j * kLanes);
        }
    }
    const float *left = a.data + r * a.row;
    b += c;
    for (int64_t k = 0; k < inner; ++k, left += a.step, b += pitch) {
        VecF right[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            right[j] = load(b + j * kLanes);
            keep_in_register(right[j]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
            VecF one = splat(left[i * a.row]);
            keep_in_register(one);
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j) {
                sums[i][j] = fma(one, right[j], sums[i][j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            finish(r + i, c + j * kLanes, sums[i][j]);
        }
    }
}

constexpr int kChunkRows = kManyRegisters ? 8 : 4;

// finish(r, c, initial(r, c) + A[r, :inner] B[:inner, c...]) for rows [r, end) and columns [0, columns), whole vectors.
template <typename Initial, typename Finish>
void chunk_product(int64_t r, int64_t end, int64_t columns, ChunkLeft a, const float *b, int64_t pitch, int64_t inner,
                   const Initial &initial, const Finish &finish) {
    const auto rows = [&](auto vectors, int64_t c) {
        constexpr int kVectors = decltype(vectors)::value;
        int64_t i = r;
        for (; i + kChunkRows <= end; i += kChunkRows) {
            chunk_tile<kChunkRows, kVectors>(i, c, a, b, pitch, inner, initial, finish);
        }
        for (; i < end; ++i) {
            chunk_tile<1, kVectors>(i, c, a, b, pitch, inner, initial, finish);
        }
    };
    int64_t c = 0;
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
        rows(std::integral_constant<int, 2>{}, c);
    }
    if (c < columns) {
        rows(std::integral_constant<int, 1>{}, c);
    }
}

// The usual arguments of chunk_product. They are functions, because each lambda of a kernel's own is compiled once more.
inline auto from_zero() {
    return [](int64_t, int64_t) { return splat(0.0f); };
}

inline auto from_scaled(const float *data, int64_t pitch, float factor) {
    return [=](int64_t r, int64_t c) { return splat(factor) * load(data + r * pitch + c); };
}

inline auto into(float *data, int64_t pitch) {
    return [=](int64_t r, int64_t c, VecF sum) { store(data + r * pitch + c, sum); };
}

// Copies [rows, columns] to [columns, pitch], with zeros beyond `rows`.
inline void transpose_chunk(float *to, int64_t pitch, const float *from, int64_t row, int64_t rows, int64_t columns) {
    for (int64_t c = 0; c < columns; c += 8) { // eight rows of the transposed matrix at a time, for the cache
        const int64_t end = c + 8 < columns ? c + 8 : columns;
        for (int64_t r = 0; r < pitch; ++r) {
            for (int64_t i = c; i < end; ++i) {
                to[i * pitch + r] = r < rows ? from[r * row + i] : 0.0f;
            }
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
