// Attention's two products in tile registers, q k^T and probabilities V of bfloat16; attention_cpu.cpp computes the
// rest by vector instructions, with and without tiles. attention_tiles.cpp has a table of functions for the registers,
// and one for their emulation.
#pragma once

#include "cpu_capability.h"
#include "dtype.h"

namespace infini::attention {

constexpr int64_t kTileSide = 16;     // rows of a tile of sums, and its columns
constexpr int64_t kTileDepth = 32;    // elements of bfloat16 in a row of the left operand: what is summed in a step
constexpr int64_t kTilePacked = 1024; // bytes of a packed tile

// sums = or += left right for one or two tiles of rows. Rows of left beyond the valid ones do not affect them.
struct TileProduct {
    const char *left;     // the first row; row-major
    int64_t left_pitch;   // bytes from row to row
    int64_t parts;        // of left, which are added up: right is multiplied with each of them
    int64_t part_pitch;   // bytes from part to part
    int64_t row_tiles;    // 1 or 2
    const char *right;    // packed: the steps of 16 columns, a tile each
    int64_t right_pitch;  // bytes from 16 columns to the next ones
    int64_t column_tiles; // 1 or more
    int64_t steps;        // 1 or more
    float *sums;
    int64_t sums_pitch; // floats from row to row
    bool add;
};

struct TileProducts {
    // Configure and release the calling thread's tiles, once in a call of attention.
    void (*configure)();
    void (*release)();
    // Pack as right operands; zeros beyond the last key or column.
    // q k^T: [keys / 16, size / 32] tiles, each quotient rounded up. Summed over the head size.
    void (*pack_keys)(const bf16 *const *k, int64_t keys, int64_t size, char *to);
    // probabilities V: [size / 16, keys / 32] tiles. Summed over the keys.
    void (*pack_values)(const bf16 *const *v, int64_t keys, int64_t size, char *to);
    void (*multiply)(const TileProduct &product);
};

// Sets a pointer to the table of the tiles in use.
INFINI_TILE_KERNEL(find_tile_products, TileProducts *)

// That table, or null if there are no tiles. Looked up outside of the vector kernels, which contain no code that may
// throw.
const TileProducts *tile_products();

} // namespace infini::attention
