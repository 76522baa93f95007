// The loops around products in tile registers (tile_product.h): the blocking of x and w for the caches. Up to a few
// hundred rows of x stay in L2 while the blocks of w are read. With more rows, a panel of w is copied into L2, and x is
// read in pieces that stay in L1 for all blocks of the panel.
// Limit: the tiles' rate, 16 cycles per product of two 16-row tiles over 64 bytes of k. Measured on an Intel Xeon
// (Sapphire Rapids) of 3.1 TFLOP/s, with operands that are not all 0 (which would save power and so raise the clock):
// 2.6 TFLOP/s from registers and L1; 2.0 with one operand from L2 and sums loaded and stored every 16 steps; 1.7 with
// both from L2. L3 delivers 30 GB/s, memory 15 GB/s.
// Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3), 2008, for the
// loops.
#pragma once

#include "tile_product.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kFewPairs = 3;              // pairs of tiles of x up to which a block is multiplied as a whole
constexpr int64_t kPieceSteps = 8;            // with more pairs: steps per piece of a block
constexpr int64_t kLongPieceSteps = 16;       // the same if pieces are copied: 32 KiB of L1
constexpr int64_t kNearRows = 256;            // rows of x that stay in L2
constexpr int64_t kCopiedNearRows = 512;      // the same if blocks are copied, which is done once for all rows
constexpr int64_t kNearBytes = 1 << 20;       // the most bytes of those rows
constexpr int64_t kStripSumBytes = 512 << 10; // of unfinished sums beside them, if k is longer than a stretch
constexpr int64_t kPanelRows = 1024;          // rows of x from which on w is copied into panels
constexpr int64_t kMaxRows = 2048;            // rows of x that are packed at once, at most
constexpr int64_t kMaxBytes = 16 << 20;       // the most bytes of those rows
constexpr int64_t kPanelSteps = 64;           // steps per panel, at most
constexpr int64_t kPanelBytes = 1 << 20;      // bytes per panel, at most
constexpr int64_t kStripBlocks = 16;          // blocks with unfinished sums, at most
constexpr int64_t kAcrossSteps = 8;           // steps for which blocks that share cache lines are read together

// The number of rows per pass; rows of x are split evenly.
inline int64_t pass_rows(int64_t rows, int64_t packed_row_bytes, Weights weights) {
    const int64_t fit = kMaxBytes / (packed_row_bytes + 1), most = fit < kMaxRows ? fit : kMaxRows;
    const bool panels = weights != Weights::kGrouped && rows >= kPanelRows && most >= kPanelRows;
    const int64_t near = weights == Weights::kInPlace ? kNearRows : kCopiedNearRows;
    return rows > 0 ? ceil_div(rows, ceil_div(rows, panels ? most : near)) : 0;
}

// A pass: m rows of x, of k elements each, that are multiplied together. A product's largest pass determines the
// blocking of w.
template <typename E> struct Pass {
    int64_t m, k;
    Weights weights;
    int64_t steps = ceil_div(k, kTileStep<E>), tiles = ceil_div(m, kTmmRows), pairs = ceil_div(tiles, 2);
    bool panels = weights == Weights::kAcross || (weights != Weights::kGrouped && m >= kPanelRows);
    bool in_place = weights == Weights::kInPlace && !panels;
    int64_t stretch = at_most_steps(stretch_steps()); // steps of k per pass over the blocks of a strip
    int64_t piece = at_most_steps(!in_place ? kLongPieceSteps : pairs <= kFewPairs ? stretch : kPieceSteps);
    int64_t strip = strip_blocks();

    // The same plan for at most as many rows.
    Pass with_rows(int64_t rows) const {
        Pass pass = *this;
        pass.m = rows;
        pass.tiles = ceil_div(rows, kTmmRows);
        pass.pairs = ceil_div(pass.tiles, 2);
        return pass;
    }
    int64_t packed_bytes() const { return pairs * steps * kPackedStep; }
    int64_t packed_tile(int64_t tile) const { return tile / 2 * steps * kPackedStep + tile % 2 * kTmmBytes; }
    // A thread's scratch: the copied blocks of w, each with an extra step for the end of k, then sums.
    int64_t copied_bytes() const { return panels ? strip * area_bytes() : (piece + 1) * kPackedStep; }
    int64_t area_bytes() const { return (stretch + 1) * kPackedStep; }
    int64_t scratch_bytes() const { return copied_bytes() + (all_sums() ? pairs * strip : strip) * kPairSums * 4; }
    // The index of the sums of a block of a strip and a pair of tiles of x.
    int64_t sums_at(int64_t block, int64_t pair) const {
        return (all_sums() ? block * pairs + pair : block) * kPairSums;
    }

private:
    bool all_sums() const { return !panels || stretch < steps; }
    int64_t at_most_steps(int64_t some) const { return some < steps ? some : steps; }
    int64_t stretch_steps() const { // splits evenly, into whole pieces
        const int64_t most = panels ? m >= kPanelRows ? kPanelSteps : kAcrossSteps
                                    : kNearBytes / ((pairs > 0 ? pairs : 1) * kPackedStep);
        const int64_t parts = ceil_div(steps, most + most / 4);
        return parts > 1 ? ceil_div(ceil_div(steps, parts), kLongPieceSteps) * kLongPieceSteps : steps;
    }
    int64_t strip_blocks() const {
        if (!panels && stretch == steps) {
            return 1;
        }
        const int64_t fit =
            panels && m >= kPanelRows ? kPanelBytes / area_bytes() : kStripSumBytes / (pairs * kPairSums * 4);
        return fit < 1 ? 1 : fit < kStripBlocks ? fit : kStripBlocks;
    }
};

// The default: a sum covers all of k. For sums of groups see quantized_linear/nibble_tiles.h.
struct WholeSums {
    static constexpr int64_t scratch_bytes() { return 0; }
};

// Calls write(row, column, sums, lanes) for the vectors of sums of a block and a pair of tiles of x, along the block's
// columns.
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

// Computes y of a pass for a thread's blocks, which end before `end`. block(i) returns a block, all of one kind;
// write(i, row, column, sums, lanes) stores its results. x is packed, as the left operand if blocks are right operands.
// scratch: the pass's scratch_bytes(), then those of `groups`.
template <typename E, typename BlockOf, typename Write, typename Groups> struct TileLoops {
    const Pass<E> &pass;
    const char *x;
    int64_t end;
    const BlockOf &block;
    char *scratch;
    const Write &write;
    const Groups &groups;

    // Computes all blocks from `begin` on.
    void run(int64_t begin) const {
        const TileScope scope(full_tiles());
        for (int64_t start = begin; start < end; start += pass.strip) {
            const int64_t stop = end - start < pass.strip ? end : start + pass.strip;
            int64_t from = 0, to = 0;
            do { // runs once even if k is 0
                from = to;
                to = pass.steps - from < pass.stretch ? pass.steps : from + pass.stretch;
                if (pass.panels) {
                    pass_x_by(start, stop, from, to);
                } else {
                    pass_blocks_by(start, stop, from, to);
                }
            } while (to < pass.steps);
        }
    }

private:
    // Multiplies blocks start .. stop-1 for steps from .. to-1: piece by piece of each block, for all of x.
    void pass_blocks_by(int64_t start, int64_t stop, int64_t from, int64_t to) const {
        for (int64_t i = start; i < stop; ++i) {
            const auto w = block(i);
            int64_t first = from;
            do {
                const int64_t steps = to - first < pass.piece ? to - first : pass.piece, after = first + steps;
                // Prefetches the next piece of this block, or the next block, or the strip's first block in the next
                // stretch.
                const bool same = after < to, again = !same && i + 1 == stop && after < pass.steps;
                const int64_t next = same ? i : again ? start : i + 1;
                const int64_t next_first = same || again ? after : i + 1 == stop ? 0 : from;
                const TileSource source = w.source(pass.k, first, steps, !pass.in_place, scratch);
                if constexpr (kGrouped) {
                    groups.begin_piece(i, first / groups.steps, steps / groups.steps, of_groups());
                }
                for (int64_t pair = 0; pair < pass.pairs; ++pair) {
                    // A single pair that reads in place already waits for memory; prefetching would add to it.
                    const bool prefetches = next < end && (pass.pairs > 1 || !pass.in_place);
                    const PrefetchSpan ahead =
                        prefetches ? block(next).ahead(next_first, pair, pass.pairs) : PrefetchSpan{};
                    float *const sums = sums_of(i - start, pair);
                    if constexpr (kGrouped) {
                        if (first == 0) {
                            std::memset(sums, 0, kPairSums * 4);
                        }
                        for (int64_t step = 0; step < steps; step += groups.steps) {
                            multiply<Streams::kRight, Streams::kLeft>(w, source.from(step, false), pair, first + step,
                                                                      groups.steps, groups.part(of_groups()), true,
                                                                      ahead.from(step));
                            groups.add(pass, pair, w.count, first + step, step, steps, of_groups(), sums);
                        }
                    } else {
                        multiply<Streams::kRight, Streams::kLeft>(w, source, pair, first, steps, sums, first == 0,
                                                                  ahead);
                    }
                    if (after == pass.steps) {
                        finish(i, w, pair, sums);
                    }
                }
                first = after;
            } while (first < to);
        }
    }

    // The same, but copies all blocks first: piece by piece of x, for all blocks.
    void pass_x_by(int64_t start, int64_t stop, int64_t from, int64_t to) const {
        TileSource sources[kStripBlocks];
        // Copies blocks that share cache lines together.
        const int64_t part = pass.weights == Weights::kAcross ? 1 : to - from;
        int64_t first = from;
        do {
            const int64_t steps = to - first < part ? to - first : part;
            for (int64_t i = start; i < stop; ++i) {
                char *const area = scratch + (i - start) * pass.area_bytes();
                const TileSource source =
                    block(i).source(pass.k, first, steps, true, area + (first - from) * kPackedStep);
                if (first == from) {
                    sources[i - start] = source; // later steps are copied behind it
                }
            }
            first += steps;
        } while (first < to);
        for (int64_t pair = 0; pair < pass.pairs; ++pair) {
            int64_t first = from;
            do {
                const int64_t steps = to - first < pass.piece ? to - first : pass.piece;
                for (int64_t i = start; i < stop; ++i) {
                    const auto w = block(i);
                    float *const sums = sums_of(i - start, pair);
                    multiply<Streams::kLeft, Streams::kRight>(
                        w, sources[i - start].from(first - from, first + steps == to), pair, first, steps, sums,
                        first == 0, PrefetchSpan{});
                    if (first + steps == pass.steps) {
                        finish(i, w, pair, sums);
                    }
                }
                first += steps;
            } while (first < to);
        }
    }

    // Multiplies a block by a pair of tiles of x. The parameters say which operand streams if the block is the left
    // one, and if it is the right one.
    template <Streams kIfLeft, Streams kIfRight, typename W>
    void multiply(const W &w, const TileSource &source, int64_t pair, int64_t first, int64_t steps, float *sums,
                  bool starts, const PrefetchSpan &ahead) const {
        const TileSource some_x{x + (pair * pass.steps + first) * kPackedStep, kTmmRowBytes, kPackedStep, kTmmBytes};
        const bool two_w = w.count > kTmmRows, two_x = 2 * pair + 1 < pass.tiles;
        if (w.is_left()) {
            multiply_function<E, kIfLeft>(two_w, two_x)(source, some_x, steps, sums, starts, ahead);
        } else {
            multiply_function<E, kIfRight>(two_x, two_w)(some_x, source, steps, sums, starts, ahead);
        }
    }

    template <typename W> void finish(int64_t i, const W &w, int64_t pair, const float *sums) const {
        const int64_t row = pair * kPairRows, rows = pass.m - row < kPairRows ? pass.m - row : kPairRows;
        write_sums(sums, w.is_left(), rows, w.count,
                   [&](int64_t m, int64_t n, VecF value, auto lanes) { write(i, row + m, n, value, lanes); });
    }

    static constexpr bool kGrouped = !std::is_same_v<Groups, WholeSums>;

    float *sums_of(int64_t block_of_strip, int64_t pair) const {
        return reinterpret_cast<float *>(scratch + pass.copied_bytes()) + pass.sums_at(block_of_strip, pair);
    }
    char *of_groups() const { return scratch + pass.scratch_bytes(); }
};

template <typename E, typename BlockOf, typename Write, typename Groups = WholeSums>
void multiply_blocks(const Pass<E> &pass, const char *x, int64_t begin, int64_t end, const BlockOf &block,
                     char *scratch, const Write &write, const Groups &groups = {}) {
    TileLoops<E, BlockOf, Write, Groups>{pass, x, end, block, scratch, write, groups}.run(begin);
}

} // namespace
} // namespace infini::INFINI_LEVEL
