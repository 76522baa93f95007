// Products of bfloat16 or int8 in tile registers, for the *_tiles.cpp kernels: y = x @ w^T, where y is [m, n] and a block
// is 32 columns of y, or 32 rows of w. What passes by the blocks, x, is packed beforehand; a block of w is read piece by
// piece where it lies, or copied into L1. One of the two is the left operand of the tile instructions, rows of k; the
// other is the right one, words of two or four elements of k, each for 16 columns beside each other.
// An element of y is summed 64 bytes of k at a time from 0 on, whatever the operands' roles, the shapes and threads: in
// float, or exactly in int32.
// Limit: 16 cycles for 16 x 16 products of 64 bytes of k; with few rows of x, the memory bandwidth of w.
// Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008, for the loops.
#pragma once

#include <type_traits>

#include "tile_registers.h"
#include "words.h"

namespace infini::INFINI_LEVEL {
namespace {

// Elements of k in a step: the row of a tile. E: bf16 or int8_t.
template <typename E> constexpr int64_t kTileStep = kTmmRowBytes / static_cast<int64_t>(sizeof(E));

constexpr int64_t kPairRows = 2 * kTmmRows;        // two tiles: rows of x, or of w, that are multiplied at once
constexpr int64_t kTileSums = kTmmRows * kTmmRows; // words of a tile of sums
constexpr int64_t kPairSums = 4 * kTileSums;

// How loops are cut, from the sizes of caches (L1 48 KiB, L2 2 MiB); not measured on a CPU with AMX.
constexpr int64_t kDirectPairs = 3;        // pairs of tiles of x up to which w is multiplied where it lies
constexpr int64_t kPieceSteps = 16;        // beyond, it is copied in pieces of so many steps: 32 KiB
constexpr int64_t kStripBytes = 512 << 10; // unfinished sums, which stay in L2,
constexpr int64_t kStripBlocks = 8;        // of at most so many blocks
constexpr int64_t kPassRows = 1024;        // rows of x that are packed at once,
constexpr int64_t kPassBytes = 16 << 20;   // as long as they take no more than this

// m rows of x that pass by together, and k elements of each. How w is cut follows from the largest pass of a product.
template <typename E> struct Pass {
    int64_t m, k;
    bool in_place = true; // whether w can be multiplied where it lies
    int64_t steps = ceil_div(k, kTileStep<E>), tiles = ceil_div(m, kTmmRows), pairs = ceil_div(tiles, 2);
    bool whole = in_place && pairs <= kDirectPairs;
    int64_t piece = whole || steps < kPieceSteps ? steps : kPieceSteps; // steps of a block that are multiplied at once
    int64_t strip = piece == steps ? 1 : blocks_in(kStripBytes);        // blocks whose sums wait for the next piece

    // The same with no more rows.
    Pass with_rows(int64_t rows) const {
        Pass pass = *this;
        pass.m = rows;
        pass.tiles = ceil_div(rows, kTmmRows);
        pass.pairs = ceil_div(pass.tiles, 2);
        return pass;
    }
    int64_t packed_bytes() const { return tiles * steps * kTmmBytes; }
    // Of a thread: a piece of w with a step of its own for the end of k, then sums.
    int64_t piece_bytes() const { return (piece + 1) * 2 * kTmmBytes; }
    int64_t scratch_bytes() const { return piece_bytes() + strip * pairs * kPairSums * 4; }

private:
    int64_t blocks_in(int64_t bytes) const {
        const int64_t fit = bytes / (pairs * kPairSums * 4 + 1);
        return fit < 1 ? 1 : fit < kStripBlocks ? fit : kStripBlocks;
    }
};

// Rows are split evenly into passes of so many.
template <typename E> int64_t pass_rows(int64_t rows, int64_t k) {
    const int64_t fit = kPassBytes / (ceil_div(k, kTileStep<E>) * kTmmRowBytes + 1);
    const int64_t most = fit < kPairRows ? kPairRows : fit < kPassRows ? fit : kPassRows;
    return rows > 0 ? ceil_div(rows, ceil_div(rows, most)) : 0;
}

// Two tiles over some steps. `tail`: the last step, where k ends within it, as packed tiles.
struct TileSource {
    const char *data;
    int64_t pitch, step, tile; // bytes from row to row, from step to step, from tile to tile
    const char *tail = nullptr;

    // The same from a later step on, where there is no tail.
    TileSource from(int64_t first) const { return {data + first * step, pitch, step, tile}; }
};

// What is prefetched into L2 meanwhile: in every step, a line of each row; or, where a line lasts for `every` steps (a
// power of two), of every such row in turns.
struct Ahead {
    const char *data = nullptr;
    int64_t pitch = 0, step = 0, rows = 0, every = 1, phase = 0;

    // The same from a later step on.
    Ahead from(int64_t first) const { return {data + first * step, pitch, step, rows, every, phase + first}; }
};

template <typename E, int kSum, int kLeft, int kRight> void tile_dot() {
    if constexpr (sizeof(E) == 2) {
        tile_dot_bfloat16<kSum, kLeft, kRight>();
    } else {
        tile_dot_int8<kSum, kLeft, kRight>();
    }
}

// Calls body(tile) for the sums of kLeft by kRight tiles: tile / 2 is the left tile's number, tile % 2 the right one's.
template <int kLeft, int kRight, typename Body> INFINI_ALWAYS_INLINE void each_sum(const Body &body) {
    body(std::integral_constant<int, 0>{});
    if constexpr (kRight == 2) {
        body(std::integral_constant<int, 1>{});
    }
    if constexpr (kLeft == 2) {
        body(std::integral_constant<int, 2>{});
    }
    if constexpr (kLeft == 2 && kRight == 2) {
        body(std::integral_constant<int, 3>{});
    }
}

// One step of them.
template <typename E, int kLeft, int kRight>
INFINI_ALWAYS_INLINE void multiply_step(const TileSource &left, const TileSource &right) {
    tile_load<4>(left.data, left.pitch);
    tile_load<6>(right.data, right.pitch);
    tile_dot<E, 0, 4, 6>();
    if constexpr (kRight == 2) {
        tile_load<7>(right.data + right.tile, right.pitch);
        tile_dot<E, 1, 4, 7>();
    }
    if constexpr (kLeft == 2) {
        tile_load<5>(left.data + left.tile, left.pitch);
        tile_dot<E, 2, 5, 6>();
        if constexpr (kRight == 2) {
            tile_dot<E, 3, 5, 7>();
        }
    }
}

// sums[left tile][right tile] over some steps, added to what is there unless these are the first.
template <typename E, int kLeft, int kRight>
__attribute__((noinline)) void multiply_pair(const TileSource &left, const TileSource &right, int64_t steps,
                                             float *sums, bool first, const Ahead &ahead) {
    each_sum<kLeft, kRight>([&](auto tile) {
        if (first) {
            tile_zero<tile>();
        } else {
            tile_load<tile>(sums + tile * kTileSums, kTmmRowBytes);
        }
    });
    const bool has_tail = left.tail != nullptr || right.tail != nullptr;
    TileSource l = left, r = right;
    const char *line = ahead.data;
    for (int64_t i = has_tail ? 1 : 0; i < steps; ++i, l.data += l.step, r.data += r.step, line += ahead.step) {
        for (int64_t row = (ahead.phase + i) & (ahead.every - 1); row < ahead.rows; row += ahead.every) {
            __builtin_prefetch(line + row * ahead.pitch, 0, 2);
        }
        multiply_step<E, kLeft, kRight>(l, r);
    }
    if (has_tail) {
        multiply_step<E, kLeft, kRight>(left.tail != nullptr ? TileSource{left.tail, kTmmRowBytes, 0, kTmmBytes} : l,
                                        right.tail != nullptr ? TileSource{right.tail, kTmmRowBytes, 0, kTmmBytes} : r);
    }
    each_sum<kLeft, kRight>([&](auto tile) { tile_store<tile>(sums + tile * kTileSums, kTmmRowBytes); });
}

// ---- packing ----

// Transposes the 16 x 16 words of a tile: a left operand becomes a right one, and the other way round.
inline void transpose_tile(const char *from, char *to) {
    for (int64_t i = 0; i < kTmmRows; i += kLanes) {
        for (int64_t j = 0; j < kTmmRows; j += kLanes) {
            VecF words[kLanes];
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                words[lane] = load(reinterpret_cast<const float *>(from + (i + lane) * kTmmRowBytes) + j);
            }
            transpose(words);
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                store(reinterpret_cast<float *>(to + (j + lane) * kTmmRowBytes) + i, words[lane]);
            }
        }
    }
}

// `elements` of k of a row, and zeros behind them.
template <typename E> void copy_row(const E *from, int64_t elements, char *to) {
    if (elements == kTileStep<E>) {
        std::memcpy(to, from, kTmmRowBytes);
        return;
    }
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(E));
    std::memcpy(to, from, static_cast<size_t>(bytes));
    std::memset(to + bytes, 0, static_cast<size_t>(kTmmRowBytes - bytes));
}

// Words of an element of k and the next one, which may be missing, for `rows` rows that are adjacent in memory.
inline void interleave(const bf16 *from, int64_t k_stride, bool has_next, int64_t rows, char *to) {
#if defined(__AVX512BF16__)
    const int64_t left = has_next ? 2 : 1;
    store(reinterpret_cast<float *>(to), rows == kTmmRows
                                             ? Words<bf16>::along_j(from, k_stride, left, Full{})
                                             : Words<bf16>::along_j(from, k_stride, left, static_cast<int>(rows)));
#else
    for (int64_t row = 0; row < rows; ++row, to += 4) {
        std::memcpy(to, from + row, 2);
        if (has_next) {
            std::memcpy(to + 2, from + k_stride + row, 2);
        }
    }
#endif
}

// Packs `elements` of k of at most 16 `rows` of x as the tile of a right or left operand; what is not there is 0.
template <typename E>
void pack_tile(const Operand<E> &x, const E *from, int64_t rows, int64_t elements, bool right, char *to) {
    alignas(64) char other[kTmmBytes]; // the operand that it is by nature, if that is not what it shall be
    char *const tile = x.along_k == right ? other : to;
    if (x.along_k) {
        for (int64_t row = 0; row < rows; ++row) {
            copy_row(from + row * x.j_stride, elements, tile + row * kTmmRowBytes);
        }
        std::memset(tile + rows * kTmmRowBytes, 0, static_cast<size_t>((kTmmRows - rows) * kTmmRowBytes));
    } else if constexpr (sizeof(E) == 2) {
        std::memset(tile, 0, elements == kTileStep<E> && rows == kTmmRows ? 0 : kTmmBytes);
        for (int64_t i = 0; i < elements; i += 2) {
            interleave(from + i * x.k_stride, x.k_stride, elements - i > 1, rows, tile + i / 2 * kTmmRowBytes);
        }
    }
    if (tile == other) {
        transpose_tile(other, to);
    }
}

// All steps of a tile.
template <typename E>
void pack_steps(const Operand<E> &x, const E *from, int64_t rows, int64_t k, bool right, char *to) {
    for (int64_t i = 0; i < k; i += kTileStep<E>, to += kTmmBytes) {
        pack_tile(x, from + i * x.k_stride, rows, k - i < kTileStep<E> ? k - i : kTileStep<E>, right, to);
    }
}

// The same for rows that begin anywhere, their elements of k side by side: row(i) is a pointer to the i-th.
template <typename Row> void pack_rows(const Row &row, int64_t rows, int64_t k, bool right, char *to) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(row(0))>>;
    alignas(64) char left[kTmmBytes];
    for (int64_t i = 0; i < k; i += kTileStep<E>, to += kTmmBytes) {
        char *const tile = right ? left : to;
        for (int64_t m = 0; m < rows; ++m) {
            copy_row(row(m) + i, k - i < kTileStep<E> ? k - i : kTileStep<E>, tile + m * kTmmRowBytes);
        }
        std::memset(tile + rows * kTmmRowBytes, 0, static_cast<size_t>((kTmmRows - rows) * kTmmRowBytes));
        if (right) {
            transpose_tile(left, to);
        }
    }
}

// ---- a block of w ----

// Up to 32 rows of w (bytes: with k adjacent). The left operand if k is adjacent in memory; else the right one, for that is how it lies almost.
template <typename E> struct Block {
    Operand<E> rows; // from the first on
    int64_t count;

    static constexpr bool kInPlace = true; // whether source() can do without copying

    // The steps from `first` on: in place, or copied to `to`.
    TileSource source(const Pass<E> &pass, int64_t first, int64_t steps, char *to) const {
        const bool right = !rows.along_k;
        const int64_t k = pass.k - first * kTileStep<E>, full = k / kTileStep<E> < steps ? k / kTileStep<E> : steps;
        const E *const from = rows.data + first * kTileStep<E> * rows.k_stride;
        char *const tail = to + pass.piece * 2 * kTmmBytes;
        const auto copy = [&](int64_t step, char *at) {
            const int64_t left = k - step * kTileStep<E>;
            for (int64_t row = 0; row < kPairRows; row += kTmmRows, at += kTmmBytes) {
                const int64_t there = count - row < 0 ? 0 : count - row < kTmmRows ? count - row : kTmmRows;
                pack_tile(rows, from + step * kTileStep<E> * rows.k_stride + (there > 0 ? row * rows.j_stride : 0),
                          there, left < kTileStep<E> ? left : kTileStep<E>, right, at);
            }
        };
        const bool copies = !pass.whole || count < kPairRows;
        for (int64_t step = 0; copies && step < full; ++step) {
            copy(step, to + step * 2 * kTmmBytes);
        }
        if (full < steps) {
            copy(full, tail);
        }
        const char *const last = full < steps ? tail : nullptr;
        if (copies) {
            return {to, kTmmRowBytes, 2 * kTmmBytes, kTmmBytes, last};
        }
        const int64_t pitch = rows.j_stride * static_cast<int64_t>(sizeof(E));
        return {reinterpret_cast<const char *>(from), pitch, kTmmRowBytes, kTmmRows * pitch, last};
    }

    // What of it is prefetched while the pair-th of `pairs` pairs of tiles passes by the block before it.
    Ahead ahead(int64_t first, int64_t pair, int64_t pairs) const {
        const int64_t all = rows.along_k ? count : kTileStep<E>, bytes = sizeof(E);
        const int64_t pitch = (rows.along_k ? rows.j_stride : rows.k_stride) * bytes;
        const int64_t begin = all * pair / pairs, end = all * (pair + 1) / pairs;
        return {reinterpret_cast<const char *>(rows.data + first * kTileStep<E> * rows.k_stride) + begin * pitch, pitch,
                rows.along_k ? kTmmRowBytes : kTileStep<E> * pitch, end - begin};
    }
    bool is_left() const { return rows.along_k; }
};

// ---- all of it ----

// Calls write(row, column, sums, lanes) for the vectors of a pair of tiles of x and a block, along the block's columns.
template <typename Write>
void write_sums(const float *sums, bool block_is_left, int64_t rows, int64_t columns, const Write &write) {
    const auto write_some = [&](int64_t row, int64_t column, VecF value) {
        if (columns - column >= kLanes) {
            write(row, column, value, Full{});
        } else {
            write(row, column, value, static_cast<int>(columns - column));
        }
    };
    for (int64_t tile = 0; tile < 4; ++tile, sums += kTileSums) {
        const int64_t right = tile % 2 * kTmmRows, left = tile / 2 * kTmmRows;
        const int64_t first_row = block_is_left ? right : left, first_column = block_is_left ? left : right;
        for (int64_t i = 0; i < kTmmRows && first_column + i < columns; i += kLanes) {
            for (int64_t j = 0; j < kTmmRows && first_row + j < rows; j += kLanes) {
                VecF values[kLanes];
                for (int64_t lane = 0; lane < kLanes; ++lane) {
                    values[lane] =
                        load(block_is_left ? sums + (i + lane) * kTmmRows + j : sums + (j + lane) * kTmmRows + i);
                }
                if (block_is_left) {
                    transpose(values);
                }
                for (int64_t lane = 0; lane < kLanes && first_row + j + lane < rows; ++lane) {
                    write_some(first_row + j + lane, first_column + i, values[lane]);
                }
            }
        }
    }
}

// A sum goes over all of k. Otherwise: quantised_linear/nibble_tiles.h.
struct WholeSums {
    static constexpr bool kGrouped = false;
    static constexpr int64_t scratch_bytes() { return 0; }
};

// y of a pass for the blocks begin .. end-1: block(i) is one, of a single kind; write(i, row, column, sums, lanes) takes
// its results. x: packed, the left operand if blocks are right ones. scratch: the pass's scratch_bytes(), then those of
// `groups`.
template <typename E, typename BlockOf, typename Write, typename Groups = WholeSums>
void multiply_blocks(const Pass<E> &pass, const char *x, int64_t begin, int64_t end, const BlockOf &block,
                     char *scratch, const Write &write, const Groups &groups = {}) {
    const int64_t strip = pass.strip;
    auto *const sums = reinterpret_cast<float *>(scratch + pass.piece_bytes());
    char *const of_groups = scratch + pass.scratch_bytes();
    const TileScope scope(full_tiles());
    const auto multiply_pair_of = [&](int64_t i, int64_t pair, const TileSource &w, int64_t first, int64_t steps,
                                      float *to, bool starts, const Ahead &ahead) {
        const TileSource some_x{x + (2 * pair * pass.steps + first) * kTmmBytes, kTmmRowBytes, kTmmBytes,
                                pass.steps * kTmmBytes};
        const bool left = block(i).is_left(), two_w = block(i).count > kTmmRows, two_x = 2 * pair + 1 < pass.tiles;
        const bool two_left = left ? two_w : two_x, two_right = left ? two_x : two_w;
        const auto multiply = two_left    ? two_right ? &multiply_pair<E, 2, 2> : &multiply_pair<E, 2, 1>
                              : two_right ? &multiply_pair<E, 1, 2>
                                          : &multiply_pair<E, 1, 1>;
        multiply(left ? w : some_x, left ? some_x : w, steps, to, starts, ahead);
    };
    for (int64_t start = begin; start < end; start += strip) {
        const int64_t stop = end - start < strip ? end : start + strip;
        int64_t first = 0;
        do {
            const int64_t steps = pass.steps - first < pass.piece ? pass.steps - first : pass.piece;
            const bool last = first + steps == pass.steps;
            for (int64_t i = start; i < stop; ++i) {
                // What is read next: the next block, or the strip's first one again at the next steps.
                const bool again = i + 1 == stop && !last;
                const int64_t next = again ? start : i + 1, next_first = again           ? first + steps
                                                                         : i + 1 == stop ? 0
                                                                                         : first;
                const auto w = block(i);
                const TileSource source = w.source(pass, first, steps, scratch);
                if constexpr (Groups::kGrouped) {
                    groups.begin_piece(i, first / groups.steps, steps / groups.steps, of_groups);
                }
                for (int64_t pair = 0; pair < pass.pairs; ++pair) {
                    float *const to = sums + ((i - start) * pass.pairs + pair) * kPairSums;
                    const Ahead ahead = next < end ? block(next).ahead(next_first, pair, pass.pairs) : Ahead{};
                    if constexpr (Groups::kGrouped) {
                        if (first == 0) {
                            std::memset(to, 0, kPairSums * 4);
                        }
                        for (int64_t step = 0; step < steps; step += groups.steps) {
                            multiply_pair_of(i, pair, source.from(step), first + step, groups.steps,
                                             groups.part(of_groups), true, ahead.from(step));
                            groups.add(pass, pair, w.count, first + step, step, steps, of_groups, to);
                        }
                    } else {
                        multiply_pair_of(i, pair, source, first, steps, to, first == 0, ahead);
                    }
                    if (last) {
                        const int64_t row = pair * kPairRows,
                                      rows = pass.m - row < kPairRows ? pass.m - row : kPairRows;
                        write_sums(to, w.is_left(), rows, w.count, [&](int64_t m, int64_t n, VecF value, auto lanes) {
                            write(i, row + m, n, value, lanes);
                        });
                    }
                }
            }
            first += steps;
        } while (first < pass.steps);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
