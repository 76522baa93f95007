// Rows of x times blocks of weights in tile registers, for the kernels of linear, linear_packed, int8_gemm and the
// quantized linear layers. The threads pack the rows of x of a pass together; then each thread multiplies its blocks.
// Limit: see gemm/tile_product.h.
#pragma once

#include "few_tile_rows.h"
#include "parallel.h"
#include "row_iterator.h"
#include "tile_loops.h"

namespace infini::INFINI_LEVEL {
namespace {

// Computes y of m rows of x, of k elements, and `blocks` blocks of weights. block_of(i) returns a block as TileLoops
// takes it. row(i, room) returns a pointer to row i of x, k elements, which may be in `room`, a buffer of room_bytes (a
// multiple of 64); several threads call it. write(block, row, column, sums, lanes) stores results.
template <typename E, typename Row, typename BlockOf, typename Write, typename Groups = WholeSums>
void multiply_tiles(int64_t m, int64_t k, int64_t blocks, int64_t room_bytes, const Row &row, const BlockOf &block_of,
                    const Write &write, Groups groups = {}) {
    const bool x_is_right = blocks > 0 && block_of(0).is_left();
    constexpr Weights kWeights = decltype(block_of(int64_t{0}))::kWeights;
    const int64_t most = pass_rows(m, k * static_cast<int64_t>(sizeof(E)), kWeights);
    const Pass<E> largest{most, k, kWeights};
    const int64_t work = blocks * kPairRows * k * static_cast<int64_t>(sizeof(E)) * largest.pairs;
    const int64_t threads = parallel_threads(blocks > largest.tiles ? blocks : largest.tiles, work);
    const int64_t needs = largest.scratch_bytes() + groups.scratch_bytes(), rooms = kTmmRows * room_bytes;
    const int64_t own = needs > rooms ? needs : rooms;
    int64_t x_bytes = largest.packed_bytes();
    if constexpr (kWeights == Weights::kGrouped) {
        x_bytes += groups.x_bytes(largest);
    }
    char *const packed = static_cast<char *>(cpu::scratch(static_cast<size_t>(x_bytes + threads * own)));
    const auto own_scratch = [&](int64_t part) { return packed + x_bytes + part * own; };
    if constexpr (kWeights == Weights::kGrouped) {
        groups.set_memory(largest, packed + largest.packed_bytes());
    }
    for (int64_t begin = 0; begin < m; begin += most) {
        const Pass<E> pass = largest.with_rows(m - begin < most ? m - begin : most);
        parallel_for(threads, pass.packed_bytes(), [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                char *const room = own_scratch(part);
                for (int64_t tile = pass.tiles * part / threads; tile < pass.tiles * (part + 1) / threads; ++tile) {
                    const int64_t left = pass.m - tile * kTmmRows, rows = left < kTmmRows ? left : kTmmRows;
                    const E *of_tile[kTmmRows];
                    for (int64_t i = 0; i < rows; ++i) {
                        of_tile[i] = row(begin + tile * kTmmRows + i, room + i * room_bytes);
                        if constexpr (kWeights == Weights::kGrouped) {
                            groups.sum_row(tile * kTmmRows + i, of_tile[i]);
                        }
                    }
                    pack_rows([&](int64_t i) { return of_tile[i]; }, rows, k, x_is_right,
                              packed + pass.packed_tile(tile), kPackedStep);
                }
            }
        });
        parallel_for(threads, work, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                multiply_blocks(
                    pass, packed, blocks * part / threads, blocks * (part + 1) / threads, block_of, own_scratch(part),
                    [&](int64_t block, int64_t at, int64_t column, VecF sums, auto lanes) {
                        write(block, begin + at, column, sums, lanes);
                    },
                    groups);
            }
        });
    }
}

// Writes the offsets at which rows of x and y start, from row `begin` on.
inline void offsets(const RowIterator<2> &rows, int64_t begin, int64_t count, int64_t *of_x, int64_t *of_y) {
    rows.visit(begin, begin + count, [&](const int64_t *at) {
        *of_x++ = at[0];
        *of_y++ = at[1];
    });
}

// The same for x [..., k] and y [..., n] of bfloat16 with any strides. write(block, offset, column, sums, lanes) stores
// results of the row of y at `offset`.
template <typename BlockOf, typename Write, typename Groups = WholeSums>
void multiply_rows(const TensorView &x, const TensorView &y, int64_t blocks, const BlockOf &block_of,
                   const Write &write, const Groups &groups = {}) {
    const TensorView *const views[] = {&x, &y};
    const RowIterator<2> rows(views);
    if constexpr (std::is_same_v<decltype(block_of(int64_t{0})), Block<bf16>>) {
        if (rows.count() > 0 && rows.count() <= kFewTileRows) {
            return with_few_rows(rows.count(), [&](auto m) {
                int64_t x_at[kFewTileRows], y_at[kFewTileRows];
                offsets(rows, 0, m, x_at, y_at);
                multiply_few_rows<m>(
                    x.size(-1), blocks, [&](int64_t row, int64_t i) { return x.as<const bf16>()[x_at[row] + i]; },
                    block_of,
                    [&](int64_t block, int64_t row, int64_t column, VecF sums, auto lanes) {
                        write(block, y_at[row], column, sums, lanes);
                    });
            });
        }
    }
    const int64_t most = pass_rows(rows.count(), x.size(-1) * 2, decltype(block_of(int64_t{0}))::kWeights);
    int64_t x_offsets[kMaxRows], y_offsets[kMaxRows];
    for (int64_t begin = 0; begin < rows.count(); begin += most) {
        const int64_t m = rows.count() - begin < most ? rows.count() - begin : most;
        offsets(rows, begin, m, x_offsets, y_offsets);
        multiply_tiles<bf16>(
            m, x.size(-1), blocks, 0, [&](int64_t row, char *) { return x.as<const bf16>() + x_offsets[row]; },
            block_of,
            [&](int64_t block, int64_t row, int64_t column, VecF sums, auto lanes) {
                write(block, y_offsets[row], column, sums, lanes);
            },
            groups);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
