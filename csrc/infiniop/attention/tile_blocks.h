// A block of rows and a block of keys in tile registers: the calls of tile_products.h by Attention. Scores and results
// are row-major as without tiles. K and V are packed for the block of rows; q is the left operand and only copied, so
// that no score has to be transposed.
// Probabilities keep the precision that they have in float: each is multiplied as the sum of three bfloat16. Rounded to
// one it would add as much error as storing the result does, and to two more than the ops promise where a sum cancels.
#pragma once

#include "packing.h"
#include "tile_products.h"

namespace infini::INFINI_LEVEL {
namespace {

using attention::TileProduct;
using attention::TileProducts;

constexpr int64_t kPairedRows = 2 * attention::kTileSide; // rows that are multiplied at once

// Configures the calling thread's tiles for a scope, if products is not null.
class ConfiguredTiles {
public:
    explicit ConfiguredTiles(const TileProducts *products) : products_(products) {
        if (products_ != nullptr) {
            products_->configure();
        }
    }
    ~ConfiguredTiles() {
        if (products_ != nullptr) {
            products_->release();
        }
    }
    ConfiguredTiles(const ConfiguredTiles &) = delete;
    ConfiguredTiles &operator=(const ConfiguredTiles &) = delete;

private:
    const TileProducts *products_;
};

// The bytes of a row of q, or of packed K: elements up to a multiple of kTileDepth.
constexpr int64_t tile_row_bytes(int64_t size) {
    return round_up(size, attention::kTileDepth) * static_cast<int64_t>(sizeof(bf16));
}

inline void copy_row_for_tiles(char *to, const bf16 *row, int64_t size) {
    const auto bytes = static_cast<size_t>(size) * sizeof *row;
    std::memcpy(to, row, bytes);
    std::memset(to + bytes, 0, static_cast<size_t>(tile_row_bytes(size)) - bytes);
}

// K or V as rows of bfloat16. int8 is converted to `memory`, [keys, size], with the addresses in `rows`.
inline const bf16 *const *as_bfloat16(const bf16 *const *from, int64_t, int64_t, bf16 *, const bf16 **) {
    return from;
}

inline const bf16 *const *as_bfloat16(const int8_t *const *from, int64_t keys, int64_t size, bf16 *memory,
                                      const bf16 **rows) {
    for (int64_t key = 0; key < keys; ++key, memory += size) {
        for_each_vector(size, [&](int64_t i, auto lanes) { store_at(memory, i, load_at(from[key], i, lanes), lanes); });
        rows[key] = memory;
    }
    return rows;
}

// Groups of rows that are multiplied at once: body(row, count).
template <typename Body> void for_each_row_pair(int64_t rows, const Body &body) {
    for (int64_t row = 0; row < rows; row += kPairedRows) {
        body(row, rows - row < kPairedRows ? rows - row : kPairedRows);
    }
}

// scores [rows, kKeyBlock] = q K^T, for each group of rows as many keys as seen(its last row) says. q: rows as
// copy_row_for_tiles leaves them. k: room for kKeyBlock such rows.
template <typename Seen>
void score_in_tiles(const TileProducts &tiles, const char *q, int64_t rows, const bf16 *const *k_rows, int64_t keys,
                    int64_t size, char *k, const Seen &seen, float *scores) {
    const int64_t pitch = tile_row_bytes(size), steps = ceil_div(size, attention::kTileDepth);
    tiles.pack_keys(k_rows, keys, size, k);
    for_each_row_pair(rows, [&](int64_t row, int64_t count) {
        const int64_t column_tiles = ceil_div(seen(row + count - 1), attention::kTileSide);
        if (column_tiles > 0) {
            tiles.multiply({q + row * pitch, pitch, 1, 0, ceil_div(count, attention::kTileSide), k,
                            steps * attention::kTilePacked, column_tiles, steps, scores + row * kKeyBlock, kKeyBlock,
                            false});
        }
    });
}

constexpr int64_t kParts = 3; // of a probability: 8 bits each, together all 24
constexpr int64_t kPartBytes = kKeyBlock * static_cast<int64_t>(sizeof(bf16)); // from part to part of a row
constexpr int64_t kPartsBytes = kParts * kPartBytes;                           // from row to row

// Splits a row's first n probabilities, a multiple of kTileDepth, into parts: each is the remainder, rounded.
inline void split_probabilities(const float *row, int64_t n, char *parts) {
    for (int64_t i = 0; i < n; i += kLanes) {
        VecF rest = load(row + i);
        for (int64_t part = 0; part < kParts; ++part) {
            store(reinterpret_cast<bf16 *>(parts + part * kPartBytes) + i, rest);
            const VecF rounded = round_to<bf16>(rest);
            // An infinite one, by the scales of int8, has no remainder.
            rest = select(abs(rounded) < splat(INFINITY), rest - rounded, VecF{});
        }
    }
}

// out [at most kPairedRows, width] += probabilities V for the keys from `begin` to `end`; the probabilities in parts, 0
// up to the next multiple of kTileDepth. v: `keys` of them, packed.
inline void add_values_in_tiles(const TileProducts &tiles, const char *parts, int64_t rows, int64_t begin, int64_t end,
                                const char *v, int64_t keys, int64_t size, float *out, int64_t width) {
    constexpr int64_t kStepBytes = attention::kTileDepth * static_cast<int64_t>(sizeof(bf16));
    const int64_t first = begin / attention::kTileDepth, steps = ceil_div(end, attention::kTileDepth) - first;
    if (steps > 0) {
        tiles.multiply({parts + first * kStepBytes, kPartsBytes, kParts, kPartBytes,
                        ceil_div(rows, attention::kTileSide), v + first * attention::kTilePacked,
                        ceil_div(keys, attention::kTileDepth) * attention::kTilePacked,
                        ceil_div(size, attention::kTileSide), steps, out, width, true});
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
