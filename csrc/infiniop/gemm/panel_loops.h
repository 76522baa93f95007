// gemm with more than a few rows: operands are packed into panels that stay in the caches and are multiplied by
// register tiles. Limit: the multiply-add units.
#pragma once

#include "blocking.h"

namespace infini::INFINI_LEVEL {
namespace {

// Block sizes, for Zen 5: L1 48 KiB, L2 1 MiB per core, L3 32 MiB. kBlockWords of k is in blocking.h.
constexpr int64_t kFewRows = 64;    // rows up to which each panel of b is used right after packing, or b is not packed
constexpr int64_t kStripPanels = 8; // panels packed together, for longer runs of b's rows
constexpr int64_t kBlockTiles = 32; // row tiles whose packed a stays in L2: 512 KiB
constexpr int64_t kBlockColumns = 2048; // columns whose packed b stays in L3: 2 MiB
constexpr int64_t kPassRows = 1024;     // rows that share a packed b; with kBlockColumns 8 MiB of unfinished sums

// Words of a tile's packed rows per word of k if there are several tiles: whole vectors.
constexpr int64_t kTileWidth = (kTileRows + kLanes - 1) / kLanes * kLanes;

template <typename T> void write_tile(const Product<T> &p, int64_t row, int64_t column, int64_t m, const float *sums) {
    const int64_t n = p.n - column < kTileColumns ? p.n - column : kTileColumns;
    T *to = p.c.data + row * p.c.row_stride + column * p.c.column_stride;
    for (int64_t i = 0; i < m; ++i, to += p.c.row_stride, sums += kTileColumns) {
        write_row(p.c, to, sums, n);
    }
}

// ---- few rows, and columns of b that are contiguous: packs all of a, then each panel of b in turn, into L1 ----

// While a panel is multiplied, prefetches the block of b at `next`, one of its columns during each run of words.
template <typename T> Prefetch prefetch_of(const Operand<T> &b, const T *next) {
    constexpr bool kTwoLines = PackedK<T>::kElements * sizeof(T) == 4; // per word
    constexpr int64_t kRuns = kBlockWords / kPrefetchRun, kColumnRuns = kRuns > kTileColumns ? kRuns / kTileColumns : 1;
    return {reinterpret_cast<const char *>(next), kTwoLines ? 128 : 64, kTwoLines ? 64 : 0,
            b.j_stride * static_cast<int64_t>(sizeof(T)) / kColumnRuns};
}

template <typename T> int64_t few_floats(int64_t m, int64_t k) {
    const EvenSplit tiles(m, kTileRows, 1);
    return kBlockWords * kTileColumns + ceil_div(k, PackedK<T>::kElements) * tiles.count * kTileWidth;
}

template <typename T> void multiply_few(const Product<T> &p, float *scratch) {
    constexpr int64_t kElements = PackedK<T>::kElements;
    const EvenSplit blocks = blocks_of<T>(p.k), tiles(p.m, kTileRows, 1);
    const int64_t width = tiles.count > 1 ? kTileWidth : p.m;
    float *b = scratch, *packed = b + kBlockWords * kTileColumns;
    const auto a_block = [&](int64_t block) { return packed + blocks.begin(block) / kElements * tiles.count * width; };
    const auto b_block = [&](int64_t column, int64_t block) {
        return p.b.data + column * p.b.j_stride + blocks.begin(block) * p.b.k_stride;
    };
    for (int64_t block = 0; block < blocks.count; ++block) {
        pack(p.a, p.a.data + blocks.begin(block) * p.a.k_stride, p.m, blocks.length(block), tiles.size, width,
             a_block(block));
    }
    alignas(64) float sums[kFewRows * kTileColumns];
    for (int64_t column = 0; column < p.n; column += kTileColumns) {
        const int64_t columns = p.n - column < kTileColumns ? p.n - column : kTileColumns;
        const int64_t next_column = column + 2 * kTileColumns <= p.n ? column + kTileColumns : column;
        for (int64_t block = 0; block < blocks.count; ++block) {
            const int64_t k = blocks.length(block), words = ceil_div(k, kElements);
            const bool last = block + 1 == blocks.count;
            const Prefetch next = prefetch_of(p.b, last ? b_block(next_column, 0) : b_block(column, block + 1));
            pack(p.b, b_block(column, block), columns, k, kTileColumns, kTileColumns, b);
            const float *a = a_block(block);
            for (int64_t tile = 0; tile < tiles.count; ++tile, a += words * width) {
                const int64_t row = tiles.begin(tile), m = tiles.length(tile);
                float *tile_sums = sums + row * kTileColumns;
                if (tile == 0) {
                    multiply_tile<PackedType<T>, true>(m, a, width, b, words, tile_sums, block == 0, next);
                } else {
                    multiply_tile<PackedType<T>, false>(m, a, width, b, words, tile_sums, block == 0, next);
                }
                if (last) {
                    write_tile(p, row, column, m, tile_sums);
                }
            }
        }
    }
}

// ---- many rows: a block of b in L3, one of a in L2, a panel of b in L1 ----

template <typename T> int64_t many_floats(int64_t m, int64_t n) {
    const EvenSplit passes(m, kPassRows, kTileRows), strips(n, kBlockColumns, kTileColumns);
    return kBlockWords * (strips.size + kBlockTiles * kTileWidth) + passes.size * strips.size;
}

template <typename T> void multiply_many(const Product<T> &p, float *scratch) {
    constexpr int64_t kElements = PackedK<T>::kElements, kTile = kTileRows * kTileColumns;
    constexpr int64_t kStrip = kStripPanels * kTileColumns;
    const EvenSplit blocks = blocks_of<T>(p.k), passes(p.m, kPassRows, kTileRows),
                    strips(p.n, kBlockColumns, kTileColumns);
    float *b = scratch, *a = b + kBlockWords * strips.size, *sums = a + kBlockWords * kBlockTiles * kTileWidth;

    // Multiplies the tiles of some rows (at most kBlockTiles, packed in a) by all columns of a strip.
    const auto multiply_group = [&](int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t block,
                                    float *group_sums, int64_t panel_sums) {
        const int64_t words = ceil_div(blocks.length(block), kElements);
        for (int64_t j = 0; j < columns; j += kTileColumns, group_sums += panel_sums) {
            for (int64_t i = 0; i < rows; i += kTileRows) {
                const int64_t m = rows - i < kTileRows ? rows - i : kTileRows;
                const float *tile_a = a + i / kTileRows * words * kTileWidth;
                float *tile_sums = group_sums + (panel_sums > 0 ? i / kTileRows * kTile : 0);
                multiply_tile<PackedType<T>, false>(m, tile_a, kTileWidth, b + j * words, words, tile_sums, block == 0,
                                                    {});
                if (block + 1 == blocks.count) {
                    write_tile(p, row + i, column + j, m, tile_sums);
                }
            }
        }
    };

    for (int64_t pass = 0; pass < passes.count; ++pass) {
        const EvenSplit groups(passes.length(pass), kBlockTiles * kTileRows, kTileRows);
        // The sums of a panel's tiles are contiguous. With a single block of k no sums are stored.
        const int64_t panel_sums = blocks.count > 1 ? ceil_div(groups.n, kTileRows) * kTile : 0;
        for (int64_t strip = 0; strip < strips.count; ++strip) {
            const int64_t column = strips.begin(strip), columns = strips.length(strip);
            for (int64_t block = 0; block < blocks.count; ++block) {
                const int64_t k = blocks.length(block), words = ceil_div(k, kElements);
                const T *b_from = p.b.data + column * p.b.j_stride + blocks.begin(block) * p.b.k_stride;
                for (int64_t j = 0; j < columns; j += kStrip) {
                    pack(p.b, b_from + j * p.b.j_stride, columns - j < kStrip ? columns - j : kStrip, k, kTileColumns,
                         kTileColumns, b + j * words);
                }
                for (int64_t group = 0; group < groups.count; ++group) {
                    const int64_t row = passes.begin(pass) + groups.begin(group), rows = groups.length(group);
                    const T *a_from = p.a.data + row * p.a.j_stride + blocks.begin(block) * p.a.k_stride;
                    pack(p.a, a_from, rows, k, kTileRows, kTileWidth, a);
                    multiply_group(row, rows, column, columns, block,
                                   sums + (blocks.count > 1 ? groups.begin(group) / kTileRows * kTile : 0), panel_sums);
                }
            }
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
