// Rows of x, with any strides, times blocks of weights in tile registers: what drives the kernels of linear and
// linear_packed.
#pragma once

#include "parallel.h"
#include "rows.h"
#include "tile_product.h"

namespace infini::INFINI_LEVEL {
namespace {

// x [..., k] and y [..., n] of bfloat16. block_of(i) is one of `blocks` blocks, as multiply_blocks takes them; x is the
// right operand if they are left ones. write(i, offset, column, sums, lanes) takes results of a row of y that begins at
// `offset`, from that column of block i on.
template <typename BlockOf, typename Write>
void multiply_rows(const TensorView &x, const TensorView &y, int64_t blocks, bool x_is_right, const BlockOf &block_of,
                   const Write &write) {
    const int64_t k = x.size(-1);
    const TensorView *const views[] = {&x, &y};
    const Rows<2> rows(views);
    const int64_t most = pass_rows<bf16>(rows.count(), k);
    const Pass<bf16> largest{most, k};
    const int64_t bytes = blocks * kPairRows * k * 2 * ceil_div(most, kPairRows),
                  threads = parallel_threads(blocks, bytes);
    char *const packed = static_cast<char *>(
        cpu::scratch(static_cast<size_t>(largest.packed_bytes() + threads * largest.scratch_bytes())));
    for (int64_t begin = 0; begin < rows.count(); begin += most) {
        const Pass<bf16> pass = largest.with_rows(rows.count() - begin < most ? rows.count() - begin : most);
        int64_t x_offsets[kPassRows], y_offsets[kPassRows], m = 0;
        rows.visit(begin, begin + pass.m, [&](const int64_t *at) {
            x_offsets[m] = at[0];
            y_offsets[m++] = at[1];
        });
        parallel_for(pass.tiles, pass.m * k * 2, [&](int64_t first, int64_t last) {
            for (int64_t tile = first; tile < last; ++tile) {
                const int64_t row = tile * kTmmRows, left = pass.m - row;
                pack_rows([&](int64_t i) { return x.as<const bf16>() + x_offsets[row + i]; },
                          left < kTmmRows ? left : kTmmRows, k, x_is_right, packed + tile * pass.steps * kTmmBytes);
            }
        });
        parallel_for(threads, bytes, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                multiply_blocks(pass, packed, blocks * part / threads, blocks * (part + 1) / threads, block_of,
                                packed + largest.packed_bytes() + part * largest.scratch_bytes(),
                                [&](int64_t block, int64_t row, int64_t column, VecF sums, auto lanes) {
                                    write(block, y_offsets[row], column, sums, lanes);
                                });
            }
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
