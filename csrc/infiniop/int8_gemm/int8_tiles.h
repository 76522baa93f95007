// Rows of int8 x times rows of int8 weights in tile registers, for int8_gemm and linear_int8. Sums are exact, so a
// row's bits do not depend on the kernel. Limit: see gemm/tile_product.h.
#pragma once

#include "gemm/tile_rows.h"

namespace infini::INFINI_LEVEL {
namespace {

// The bytes of a row of k int8 elements, rounded up to cache lines.
constexpr int64_t byte_room(int64_t k) {
    return ceil_div(k, kTmmRowBytes) * kTmmRowBytes;
}

// Computes y of m rows of x and n weight rows of k bytes each. row(i, room) as in gemm/tile_rows.h, with byte_room(k)
// bytes of room. Calls output(row, column, sums as floats, lanes).
template <typename Row, typename Epilogue>
void multiply_bytes(int64_t m, int64_t n, int64_t k, const int8_t *weights, int64_t stride, const Row &row,
                    const Epilogue &output) {
    const auto block_of = [&](int64_t i) -> Block<int8_t> {
        const int64_t first = i * kPairRows, left = n - first;
        return {{weights + first * stride, 1, stride, true}, left < kPairRows ? left : kPairRows};
    };
    multiply_tiles<int8_t>(m, k, ceil_div(n, kPairRows), byte_room(k), row, block_of,
                           [&](int64_t block, int64_t at, int64_t column, VecF sums, auto lanes) {
                               output(at, block * kPairRows + column, __builtin_convertvector((VecI)sums, VecF), lanes);
                           });
}

} // namespace
} // namespace infini::INFINI_LEVEL
