// Rows of int8 x times rows of int8 weights in tile registers: what int8_gemm and linear_int8 have in common.
// Sums are exact, so that it does not matter which kernel computes a row.
#pragma once

#include "gemm/tile_product.h"
#include "parallel.h"

namespace infini::INFINI_LEVEL {
namespace {

// y of m rows of x and n weight rows of k bytes each. row(i, q) gives row i of x: a pointer to k bytes, which may be q,
// room for k of them; it is called by several threads. output(row, column, sums as floats, lanes).
template <typename Row, typename Output>
void multiply_bytes(int64_t m, int64_t n, int64_t k, const int8_t *weights, int64_t stride, const Row &row,
                    const Output &output) {
    const int64_t most = pass_rows<int8_t>(m, k), blocks = ceil_div(n, kPairRows), row_bytes = ceil_div(k, 64) * 64;
    const Pass<int8_t> largest{most, k};
    const int64_t work = n * k * ceil_div(most, kPairRows), threads = parallel_threads(INT64_MAX, work);
    const int64_t own = largest.scratch_bytes() > kTmmRows * row_bytes ? largest.scratch_bytes() : kTmmRows * row_bytes;
    char *const packed = static_cast<char *>(cpu::scratch(static_cast<size_t>(largest.packed_bytes() + threads * own)));
    const auto own_scratch = [&](int64_t part) { return packed + largest.packed_bytes() + part * own; };
    for (int64_t begin = 0; begin < m; begin += most) {
        const Pass<int8_t> pass = largest.with_rows(m - begin < most ? m - begin : most);
        parallel_for(threads, work, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                auto *const q = reinterpret_cast<int8_t *>(own_scratch(part));
                for (int64_t tile = pass.tiles * part / threads; tile < pass.tiles * (part + 1) / threads; ++tile) {
                    const int64_t left = pass.m - tile * kTmmRows, rows = left < kTmmRows ? left : kTmmRows;
                    const int8_t *of_tile[kTmmRows];
                    for (int64_t i = 0; i < rows; ++i) {
                        of_tile[i] = row(begin + tile * kTmmRows + i, q + i * row_bytes);
                    }
                    pack_rows([&](int64_t i) { return of_tile[i]; }, rows, k, true,
                              packed + tile * pass.steps * kTmmBytes);
                }
            }
        });
        const auto block_of = [&](int64_t i) -> Block<int8_t> {
            const int64_t first = i * kPairRows, left = n - first;
            return {{weights + first * stride, 1, stride, true}, left < kPairRows ? left : kPairRows};
        };
        parallel_for(threads, work, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                multiply_blocks(pass, packed, blocks * part / threads, blocks * (part + 1) / threads, block_of,
                                own_scratch(part), [&](int64_t i, int64_t at, int64_t column, VecF sums, auto lanes) {
                                    output(begin + at, i * kPairRows + column,
                                           __builtin_convertvector((VecI)sums, VecF), lanes);
                                });
            }
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
