// Attention's two products in tile registers: tile_products.h. K and V are packed once for all rows of a block; a row
// is summed 32 elements at a time from the first on, independent of the rows and columns in the same tiles.
// Limit: 16 cycles for 16 x 16 sums of 32 products, 1024 flops a cycle and core; a visible pair of row and key takes 8
// flops for each column, for probabilities are multiplied in three parts. Never timed on a CPU with AMX.
#include "gemm/tile_product.h"
#include "tile_products.h"

namespace infini::INFINI_LEVEL {
namespace {

using attention::TileProduct;
using attention::TileProducts;

static_assert(attention::kTileSide == kTmmRows && attention::kTileDepth == kTileStep<bf16> &&
              attention::kTilePacked == kTmmBytes);

void configure() {
    tiles_configure(full_tiles());
}

int64_t at_most(int64_t n, int64_t limit) {
    return n < limit ? n : limit;
}

void pack_keys(const bf16 *const *k, int64_t keys, int64_t size, char *to) {
    const int64_t tile_bytes = ceil_div(size, kTileStep<bf16>) * kTmmBytes;
    for (int64_t key = 0; key < keys; key += kTmmRows, to += tile_bytes) {
        pack_rows([&](int64_t i) { return k[key + i]; }, at_most(keys - key, kTmmRows), size, true, to);
    }
}

void pack_values(const bf16 *const *v, int64_t keys, int64_t size, char *to) {
    const int64_t pairs = ceil_div(keys, kTileStep<bf16>) * kTmmRows;
    for (int64_t column = 0; column < size; column += kTmmRows) {
        const int64_t columns = at_most(size - column, kTmmRows);
        for (int64_t pair = 0; pair < pairs; ++pair, to += kTmmRowBytes) {
            const int64_t key = 2 * pair;
            const bool has_next = key + 1 < keys;
            if (!has_next || columns < kTmmRows) {
                std::memset(to, 0, kTmmRowBytes);
            }
            if (key < keys) {
                interleave(v[key] + column, has_next ? v[key + 1] - v[key] : 0, has_next, columns, to);
            }
        }
    }
}

// The product of kLeft by kRight tiles; their sums are at `sums`.
template <int kLeft, int kRight> void multiply_tiles(const TileProduct &p, const char *right, float *sums) {
    const auto at = [&](int tile) { return sums + tile / 2 * kTmmRows * p.sums_pitch + tile % 2 * kTmmRows; };
    each_sum<kLeft, kRight>([&](auto tile) {
        if (p.add) {
            tile_load<tile>(at(tile), p.sums_pitch * 4);
        } else {
            tile_zero<tile>();
        }
    });
    for (int64_t part = 0; part < p.parts; ++part) {
        TileSource l{p.left + part * p.part_pitch, p.left_pitch, kTmmRowBytes, kTmmRows * p.left_pitch};
        TileSource r{right, kTmmRowBytes, kTmmBytes, p.right_pitch};
        for (int64_t step = 0; step < p.steps; ++step, l.data += l.step, r.data += r.step) {
            multiply_step<bf16, kLeft, kRight>(l, r);
        }
    }
    each_sum<kLeft, kRight>([&](auto tile) { tile_store<tile>(at(tile), p.sums_pitch * 4); });
}

void multiply(const TileProduct &p) {
    const bool two_left = p.row_tiles == 2;
    for (int64_t column = 0; column < p.column_tiles; column += 2) {
        const bool two_right = column + 1 < p.column_tiles;
        const auto tiles = two_left    ? two_right ? &multiply_tiles<2, 2> : &multiply_tiles<2, 1>
                           : two_right ? &multiply_tiles<1, 2>
                                       : &multiply_tiles<1, 1>;
        tiles(p, p.right + column * p.right_pitch, p.sums + column * kTmmRows);
    }
}

constexpr TileProducts kProducts = {configure, tiles_release, pack_keys, pack_values, multiply};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::attention::INFINI_LEVEL::find_tile_products(const TileProducts *&products) {
    products = &infini::INFINI_LEVEL::kProducts;
}
