// Products of bfloat16 or int8 in tile registers, for the *_tiles.cpp kernels: y = x @ w^T, where y is [m, n] and a
// block is 32 columns of y, or 32 rows of w. x is packed beforehand; a block of w is read in place or copied. One of
// the two is the left operand of the tile instructions (rows of k), the other the right operand (words of two or four
// elements of k, for each of 16 columns). The loops around this are in tile_loops.h. An element of y is summed 64 bytes
// of k at a time, from 0 on, whatever the operands' roles, shapes and threads: in float, or exactly in int32.
// Limit: 16 cycles per product of two 16-row tiles over 64 bytes of k; for few rows of x, the memory bandwidth of w.
#pragma once

#include <type_traits>

#include "tile_registers.h"
#include "pack_panels.h"

namespace infini::INFINI_LEVEL {
namespace {

// Elements of k per step, the row of a tile. E: bf16 or int8_t.
template <typename E> constexpr int64_t kTileStep = kTmmRowBytes / static_cast<int64_t>(sizeof(E));

constexpr int64_t kPairRows = 2 * kTmmRows;        // rows of x, or of w, in two tiles
constexpr int64_t kTileSums = kTmmRows * kTmmRows; // words in a tile of sums
constexpr int64_t kPairSums = 4 * kTileSums;

// The bytes of a step of packed x, which is ordered by pair of tiles, then by step: the two tiles.
constexpr int64_t kPackedStep = 2 * kTmmBytes;

// How blocks of w are read: in place; copied; copied from memory in which k is not contiguous, so that blocks on the
// same cache lines should be read together; or copied, with the sums of each group of k scaled.
enum class Weights { kInPlace, kCopied, kAcross, kGrouped };

// Two tiles over some steps. `tail`: the last step as packed tiles, if k ends within it.
struct TileSource {
    const char *data;
    int64_t pitch, step, tile; // bytes between rows, between steps, between the two tiles
    const char *tail = nullptr;

    // The same from step `first` on; `ends`: k ends within the last step.
    TileSource from(int64_t first, bool ends) const {
        return {data + first * step, pitch, step, tile, ends ? tail : nullptr};
    }
};

// The memory that is prefetched into L2 during a product: one cache line of each row per step; or, if a line covers
// `every` steps (a power of two), one line of every such row in turn.
struct PrefetchSpan {
    const char *data = nullptr;
    int64_t pitch = 0, step = 0, rows = 0, every = 1, phase = 0;

    // The same from step `first` on.
    PrefetchSpan from(int64_t first) const { return {data + first * step, pitch, step, rows, every, phase + first}; }
};

template <typename E, int kSum, int kLeft, int kRight> void tile_dot() {
    if constexpr (sizeof(E) == 2) {
        tile_dot_bfloat16<kSum, kLeft, kRight>();
    } else {
        tile_dot_int8<kSum, kLeft, kRight>();
    }
}

// Calls body(tile) for the sums of kLeft by kRight tiles: tile / 2 is the left tile's index, tile % 2 the right tile's.
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

template <int kTile, bool kStreams> INFINI_ALWAYS_INLINE void load_tile(const char *from, int64_t pitch) {
    if constexpr (kStreams) {
        tile_stream<kTile>(from, pitch);
    } else {
        tile_load<kTile>(from, pitch);
    }
}

// The operand that is not reused soon, and so should not evict the other one from L1.
enum class Streams { kNone, kLeft, kRight };

// Multiplies one step of them.
template <typename E, int kLeft, int kRight, Streams kStreams = Streams::kNone>
INFINI_ALWAYS_INLINE void multiply_step(const TileSource &left, const TileSource &right) {
    load_tile<4, kStreams == Streams::kLeft>(left.data, left.pitch);
    load_tile<6, kStreams == Streams::kRight>(right.data, right.pitch);
    tile_dot<E, 0, 4, 6>();
    if constexpr (kRight == 2) {
        load_tile<7, kStreams == Streams::kRight>(right.data + right.tile, right.pitch);
        tile_dot<E, 1, 4, 7>();
    }
    if constexpr (kLeft == 2) {
        load_tile<5, kStreams == Streams::kLeft>(left.data + left.tile, left.pitch);
        tile_dot<E, 2, 5, 6>();
        if constexpr (kRight == 2) {
            tile_dot<E, 3, 5, 7>();
        }
    }
}

// sums[left tile][right tile] over some steps, added to the previous sums unless these steps are the first.
template <typename E, int kLeft, int kRight, Streams kStreams>
__attribute__((noinline)) void multiply_pair(const TileSource &left, const TileSource &right, int64_t steps,
                                             float *sums, bool first, const PrefetchSpan &ahead) {
    each_sum<kLeft, kRight>([&](auto tile) {
        if (first) {
            tile_zero<tile>();
        } else {
            tile_load<tile>(sums + tile * kTileSums, kTmmRowBytes);
        }
    });
    const bool has_tail = left.tail != nullptr || right.tail != nullptr;
    TileSource l = left, r = right;
    const PrefetchSpan next = ahead;
    const int64_t line_pitch = next.pitch * next.every;
    const char *line = next.data;
    for (int64_t i = has_tail ? 1 : 0; i < steps; ++i, l.data += l.step, r.data += r.step, line += next.step) {
        const int64_t row = (next.phase + i) & (next.every - 1);
        const char *at = line + row * next.pitch;
        for (int64_t left_rows = next.rows - row; left_rows > 0; left_rows -= next.every, at += line_pitch) {
            __builtin_prefetch(at, 0, 2);
        }
        multiply_step<E, kLeft, kRight, kStreams>(l, r);
    }
    if (has_tail) {
        multiply_step<E, kLeft, kRight, kStreams>(
            left.tail != nullptr ? TileSource{left.tail, kTmmRowBytes, 0, kTmmBytes} : l,
            right.tail != nullptr ? TileSource{right.tail, kTmmRowBytes, 0, kTmmBytes} : r);
    }
    each_sum<kLeft, kRight>([&](auto tile) { tile_store<tile>(sums + tile * kTileSums, kTmmRowBytes); });
}

template <typename E, Streams kStreams> auto multiply_function(bool two_left, bool two_right) {
    return two_left    ? two_right ? &multiply_pair<E, 2, 2, kStreams> : &multiply_pair<E, 2, 1, kStreams>
           : two_right ? &multiply_pair<E, 1, 2, kStreams>
                       : &multiply_pair<E, 1, 1, kStreams>;
}

// ---- packing ----

// Transposes the 16 x 16 words of a tile: a left operand becomes a right one, and vice versa.
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

// Copies `elements` of k of a row and fills the rest with zeros.
template <typename E> void copy_row(const E *from, int64_t elements, char *to) {
    if (elements == kTileStep<E>) {
        std::memcpy(to, from, kTmmRowBytes);
        return;
    }
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(E));
    std::memcpy(to, from, static_cast<size_t>(bytes));
    std::memset(to + bytes, 0, static_cast<size_t>(kTmmRowBytes - bytes));
}

// Interleaves an element of k with the next one (0 if missing) into words, for `rows` rows that are adjacent in memory.
inline void interleave(const bf16 *from, int64_t k_stride, bool has_next, int64_t rows, char *to) {
#if defined(__AVX512BF16__)
    const int64_t left = has_next ? 2 : 1;
    store(reinterpret_cast<float *>(to), rows == kTmmRows
                                             ? PackedK<bf16>::along_j(from, k_stride, left, Full{})
                                             : PackedK<bf16>::along_j(from, k_stride, left, static_cast<int>(rows)));
#else
    for (int64_t row = 0; row < rows; ++row, to += 4) {
        std::memcpy(to, from + row, 2);
        if (has_next) {
            std::memcpy(to + 2, from + k_stride + row, 2);
        }
    }
#endif
}

// Packs `elements` of k of at most 16 `rows` of x as a tile of a right or left operand, padded with zeros.
template <typename E>
void pack_tile(const Operand<E> &x, const E *from, int64_t rows, int64_t elements, bool right, char *to) {
    alignas(64) char other[kTmmBytes]; // the opposite operand, to be transposed
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

// Packs all steps of a tile.
template <typename E>
void pack_steps(const Operand<E> &x, const E *from, int64_t rows, int64_t k, bool right, char *to,
                int64_t step = kTmmBytes) {
    for (int64_t i = 0; i < k; i += kTileStep<E>, to += step) {
        pack_tile(x, from + i * x.k_stride, rows, k - i < kTileStep<E> ? k - i : kTileStep<E>, right, to);
    }
}

// The same for rows at arbitrary addresses, contiguous along k: row(i) points to row i.
template <typename Row>
void pack_rows(const Row &row, int64_t rows, int64_t k, bool right, char *to, int64_t step = kTmmBytes) {
    using E = std::remove_const_t<std::remove_pointer_t<decltype(row(0))>>;
    alignas(64) char left[kTmmBytes];
    for (int64_t i = 0; i < k; i += kTileStep<E>, to += step) {
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

// Up to 32 rows of w (int8: contiguous along k). The left operand if k is contiguous, else the right one, whose layout
// is closer to memory's.
template <typename E> struct Block {
    Operand<E> rows; // from the block's first row on
    int64_t count;

    static constexpr Weights kWeights = Weights::kInPlace;

    // The `steps` steps from `first` on of k elements: in place, or copied to `to`, which has room for steps + 1.
    TileSource source(int64_t k, int64_t first, int64_t steps, bool copies, char *to) const {
        const int64_t rest = k - first * kTileStep<E>, full = rest / kTileStep<E> < steps ? rest / kTileStep<E> : steps;
        const E *const from = rows.data + first * kTileStep<E> * rows.k_stride;
        const int64_t pitch = rows.j_stride * static_cast<int64_t>(sizeof(E));
        copies = copies || count < kPairRows;
        if (copies && rows.along_k) {
            for (int64_t row = 0; row < kPairRows; ++row) { // the second tile follows the first
                const char *const at = reinterpret_cast<const char *>(from) + row * pitch;
                copy_lines(row < count ? at : nullptr, full, to + row * kTmmRowBytes);
            }
        } else if (copies) {
            for (int64_t step = 0; step < full; ++step) {
                pack_step(from + step * kTileStep<E> * rows.k_stride, kTileStep<E>, to + step * kPackedStep);
            }
        }
        char *const tail = to + (copies ? full * kPackedStep : 0);
        if (full < steps) {
            pack_step(from + full * kTileStep<E> * rows.k_stride, rest - full * kTileStep<E>, tail);
        }
        if (copies) {
            return {to, kTmmRowBytes, kPackedStep, kTmmBytes};
        }
        return {reinterpret_cast<const char *>(from), pitch, kTmmRowBytes, kTmmRows * pitch,
                full < steps ? tail : nullptr};
    }

    // The part to prefetch while the previous block is multiplied by pair number `pair` of `pairs` pairs of tiles.
    PrefetchSpan ahead(int64_t first, int64_t pair, int64_t pairs) const {
        const int64_t all = rows.along_k ? count : kTileStep<E>, bytes = sizeof(E);
        const int64_t pitch = (rows.along_k ? rows.j_stride : rows.k_stride) * bytes;
        const int64_t begin = all * pair / pairs, end = all * (pair + 1) / pairs;
        return {reinterpret_cast<const char *>(rows.data + first * kTileStep<E> * rows.k_stride) + begin * pitch, pitch,
                rows.along_k ? kTmmRowBytes : kTileStep<E> * pitch, end - begin};
    }
    bool is_left() const { return rows.along_k; }

private:
    void pack_step(const E *from, int64_t elements, char *to) const {
        for (int64_t row = 0; row < kPairRows; row += kTmmRows, to += kTmmBytes) {
            const int64_t there = count - row < 0 ? 0 : count - row < kTmmRows ? count - row : kTmmRows;
            pack_tile(rows, from + (there > 0 ? row * rows.j_stride : 0), there, elements, !rows.along_k, to);
        }
    }
    // Copies a line per step, or zeros for a missing row.
    static void copy_lines(const char *from, int64_t steps, char *to) {
        for (int64_t step = 0; step < steps; ++step, to += kPackedStep) {
            if (from == nullptr) {
                std::memset(to, 0, kTmmRowBytes);
            } else {
                std::memcpy(to, from + step * kTmmRowBytes, kTmmRowBytes);
            }
        }
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
