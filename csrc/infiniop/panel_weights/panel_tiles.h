// The kernel of products with weights in panels in tile registers, with the bits of panel_dots.h. A group's scale times
// an integer of the weight, at most 16256 in magnitude, is 128 * high + low with both in int8, so two tile products
// give a run's exact sums. A panel's lines already have the layout of a right operand. Weights are unpacked in pieces
// of a panel's k that stay in L1 for all rows of a pass; vectors scale and add a run's sums while tiles multiply the
// next run.
// Weights: a Layout; load(lines of a block, pair, __m512i (&)[2]) gives columns 8 * pair to 8 * pair + 3 and the next 4
// as int8; at(lines, pair, which of the two, byte) is one of them.
// Limit, for 16 rows, a panel and a block: 32 cycles for two tile products, half the rate of int8. Beside them, at two
// instructions per cycle, 40 cycles for 5 vector instructions per row if a run is one block, 20 if it is two.
#pragma once

#include "panel_passes.h"
#include "tile_registers.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kMaxRows = 512;          // rows of x per pass
constexpr int64_t kStepBlocks = 2;         // blocks that are multiplied between two additions to totals: one run or two
constexpr int64_t kPieceSteps = 4;         // steps that are unpacked at once: 16 KiB
constexpr int64_t kGroupTiles = 8;         // tiles of x: with their totals they stay in L1 from step to step
constexpr int64_t kNearBytes = 1 << 20;    // bytes of x, which stay in L2 while all panels of a strip are multiplied
constexpr int64_t kStripBytes = 256 << 10; // bytes of totals beside it
constexpr int64_t kMaxStrip = 8;           // panels per strip
constexpr int kTileVectors = static_cast<int>(kTmmRows) * kVectors;
static_assert(kPanel == kTmmRows && kBlock == kTmmRowBytes);

// A step of 16 rows of x. Values beyond k are 0; for a missing row or run, the scales are 0.
template <typename Weights> struct StepOfX {
    static_assert(kStepBlocks % Weights::kRunBlocks == 0);
    static constexpr int kRuns = kStepBlocks / Weights::kRunBlocks;

    alignas(64) int8_t values[kStepBlocks][kTmmRows][kBlock];
    float scales[kRuns][kTmmRows];
};

// m rows of x as the tiles of each step.
template <typename Weights> class TiledRows {
public:
    using Step = StepOfX<Weights>;

    TiledRows(int64_t m, int64_t k)
        : m_(m), k_(k), tiles_((m + kTmmRows - 1) / kTmmRows), steps_((k + kColumns - 1) / kColumns) {}

    int64_t steps() const { return steps_; }
    int64_t tiles() const { return tiles_; }
    int64_t bytes() const { return tiles_ * steps_ * static_cast<int64_t>(sizeof(Step)); }
    void set_memory(void *memory) {
        memory_ = static_cast<Step *>(memory);
        for (int64_t step = 0; step < (m_ % kTmmRows != 0 ? steps_ : 0); ++step) {
            std::memset(memory_[(step + 1) * tiles_ - 1].scales, 0, sizeof memory_->scales);
        }
    }
    const Step &at(int64_t tile, int64_t step) const { return memory_[step * tiles_ + tile]; }

    template <typename T> void set(int64_t row, const T *x) const {
        const int64_t in_tile = row % kTmmRows;
        for (int64_t i = 0; i < steps_; ++i) {
            Step &step = memory_[i * tiles_ + row / kTmmRows];
            int8_t q[kColumns] = {};
            for (int64_t run = 0; run < Step::kRuns; ++run) {
                const int64_t first = i * kColumns + run * Weights::kRun, left = k_ - first;
                step.scales[run][in_tile] =
                    left <= 0
                        ? 0
                        : quantize_row(x + first, left < Weights::kRun ? left : Weights::kRun, q + run * Weights::kRun);
            }
            for (int64_t block = 0; block < kStepBlocks; ++block) {
                std::memcpy(step.values[block][in_tile], q + block * kBlock, kBlock);
            }
        }
    }

private:
    static constexpr int64_t kColumns = kStepBlocks * kBlock;

    int64_t m_, k_, tiles_, steps_;
    Step *memory_ = nullptr;
};

// ---- the weight ----

// A block as right operands: rows of 4 columns of k, for 16 rows of the weight.
struct UnpackedBlock {
    alignas(64) uint8_t high[kTmmRows][kTmmRowBytes], low[kTmmRows][kTmmRowBytes];
};

#if defined(__AVX512F__)
// Splits the products of scales (bytes, in each half of a word) and four levels into high and low.
inline void split(__m512i levels, __m512i scales, uint8_t *high, uint8_t *low) {
    const __m512i even = _mm512_slli_epi16(levels, 8), odd = _mm512_and_si512(levels, _mm512_set1_epi16(-256));
    // (256 * level) * (2 * scale) >> 16 equals the product >> 7.
    const __m512i doubled = _mm512_add_epi16(scales, scales);
    const __m512i high_even = _mm512_mulhi_epi16(even, doubled), high_odd = _mm512_mulhi_epi16(odd, doubled);
    _mm512_store_si512(high, _mm512_mask_mov_epi8(_mm512_slli_epi16(high_odd, 8), 0x5555555555555555u, high_even));
    // The lower byte of a product depends only on the factors' lower bytes.
    const __m512i low_even = _mm512_mullo_epi16(levels, scales), low_odd = _mm512_mullo_epi16(odd, scales);
    _mm512_store_si512(
        low, _mm512_and_si512(_mm512_mask_mov_epi8(low_odd, 0x5555555555555555u, low_even), _mm512_set1_epi8(127)));
}
#endif

template <typename Weights> void unpack(const uint8_t *block, UnpackedBlock &to) {
    const uint8_t *const lines = block + kScaleBytes;
    for (int pair = 0; pair < static_cast<int>(kBlock / 8); ++pair) {
        const uint8_t *const scales = block + pair / 2 * kPanel;
#if defined(__AVX512F__)
        const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales)));
        const __m512i both = _mm512_mask_mov_epi16(_mm512_slli_epi32(wide, 16), 0x55555555u, wide);
        __m512i columns[2];
        Weights::load(lines, pair, columns);
        split(columns[0], both, to.high[2 * pair], to.low[2 * pair]);
        split(columns[1], both, to.high[2 * pair + 1], to.low[2 * pair + 1]);
#else
        for (int64_t i = 0; i < kLineBytes; ++i) {
            for (int half = 0; half < 2; ++half) {
                const int value = static_cast<int8_t>(scales[i / 4]) * Weights::at(lines, pair, half, i);
                to.high[2 * pair + half][i] = static_cast<uint8_t>(value >> 7);
                to.low[2 * pair + half][i] = static_cast<uint8_t>(value & 127);
            }
        }
#endif
    }
}

// Unpacks blocks [first, first + count) of a panel, and prefetches those of the next piece to L2: the hardware
// prefetchers miss them behind the products of this piece.
template <typename Weights>
void unpack_piece(const uint8_t *panel, int64_t blocks, int64_t first, int64_t count, UnpackedBlock *to) {
    for (int64_t i = first; i < first + count; ++i, ++to) {
        if (const int64_t next = i + kPieceSteps * kStepBlocks; next < blocks) {
            for (int64_t byte = 0; byte < Weights::kBlockBytes; byte += 64) {
                __builtin_prefetch(panel + next * Weights::kBlockBytes + byte, 0, 2);
            }
        }
        unpack<Weights>(panel + (i < blocks ? i : blocks - 1) * Weights::kBlockBytes,
                        *to); // x is 0 beyond k, so any weights will do
    }
}

// ---- products ----

struct Sums {
    VecI high[kTileVectors], low[kTileVectors];
};

// The sums of a step's runs that have not been added to their tile's totals yet.
template <typename Weights> struct Pending {
    static constexpr int kRuns = StepOfX<Weights>::kRuns;

    const Sums *sums;
    const float (*scales)[kTmmRows];
    VecF *totals;

    // Adds rows 4 * part to 4 * part + 3.
    INFINI_ALWAYS_INLINE void add(int part) const {
#pragma GCC unroll 4
        for (int row = part * 4; row < part * 4 + 4; ++row) {
#pragma GCC unroll 4
            for (int v = row * kVectors; v < (row + 1) * kVectors; ++v) {
                VecF total = totals[v];
#pragma GCC unroll 2
                for (int run = 0; run < kRuns; ++run) {
                    const VecI sum = (sums[run].high[v] << 7) + sums[run].low[v];
                    total += splat(scales[run][row]) * __builtin_convertvector(sum, VecF);
                }
                totals[v] = total;
            }
        }
    }
};

// A thread's scratch, followed by the totals of a strip of panels.
template <typename Weights> struct Scratch {
    UnpackedBlock weights[kPieceSteps * kStepBlocks];
    Sums sums[2][StepOfX<Weights>::kRuns]; // of a step and of the previous one
};

// totals += the products of a piece of k with tiles [begin, end) of x.
template <typename Weights>
__attribute__((noinline)) void add_piece(const TiledRows<Weights> &x, int64_t begin, int64_t end, int64_t first,
                                         int64_t steps, Scratch<Weights> &scratch, VecF *totals) {
    constexpr bool kTwoRuns = StepOfX<Weights>::kRuns == 2;
    std::memset(scratch.sums[1], 0, sizeof scratch.sums[1]);
    Pending<Weights> pending{scratch.sums[1], x.at(begin, first).scales, totals + begin * kTileVectors};
    int64_t turn = 0;
    for (int64_t step = 0; step < steps; ++step) {
        const UnpackedBlock *const weights = scratch.weights + step * kStepBlocks;
        tile_load<4>(weights[0].high, kTmmRowBytes);
        tile_load<5>(weights[0].low, kTmmRowBytes);
        tile_load<6>(weights[1].high, kTmmRowBytes);
        tile_load<7>(weights[1].low, kTmmRowBytes);
        for (int64_t tile = begin; tile < end; ++tile, turn ^= 1) {
            const StepOfX<Weights> &of_x = x.at(tile, first + step);
            Sums *const sums = scratch.sums[turn];
            tile_zero<0>();
            tile_zero<1>();
            tile_load<2>(of_x.values[0], kTmmRowBytes);
            tile_dot_int8<0, 2, 4>();
            pending.add(0);
            tile_dot_int8<1, 2, 5>();
            if constexpr (kTwoRuns) {
                tile_store<0>(sums[0].high, kTmmRowBytes);
                tile_store<1>(sums[0].low, kTmmRowBytes);
                tile_zero<0>();
                tile_zero<1>();
            }
            tile_load<3>(of_x.values[1], kTmmRowBytes);
            pending.add(1);
            tile_dot_int8<0, 3, 6>();
            pending.add(2);
            tile_dot_int8<1, 3, 7>();
            pending.add(3);
            tile_store<0>(sums[kTwoRuns].high, kTmmRowBytes);
            tile_store<1>(sums[kTwoRuns].low, kTmmRowBytes);
            pending = {sums, of_x.scales, totals + tile * kTileVectors};
        }
    }
    for (int part = 0; part < 4; ++part) {
        pending.add(part);
    }
}

// How a pass is split: into stretches of k, and strips of panels that are multiplied for each stretch.
template <typename Weights> struct Split {
    int64_t stretch, strip, total_bytes; // in steps; in panels; bytes per panel

    explicit Split(const TiledRows<Weights> &x) : total_bytes(x.tiles() * kTmmRows * kPanel * 4) {
        const int64_t most = kNearBytes / (x.tiles() * static_cast<int64_t>(sizeof(StepOfX<Weights>)));
        const int64_t parts = (x.steps() + most - 1) / most;
        stretch =
            parts > 1 ? ((x.steps() + parts - 1) / parts + kPieceSteps - 1) / kPieceSteps * kPieceSteps : x.steps();
        strip = kStripBytes / total_bytes < kMaxStrip ? kStripBytes / total_bytes : kMaxStrip;
    }
};

template <typename Weights, typename Output>
void multiply_panels(const Args &a, const TiledRows<Weights> &x, int64_t m, int64_t begin, int64_t end, char *memory,
                     const Output &output) {
    const TileScope scope(full_tiles());
    const Split<Weights> split(x);
    auto &scratch = *reinterpret_cast<Scratch<Weights> *>(memory);
    char *const totals = memory + sizeof scratch;
    const auto totals_of = [&](int64_t i) { return reinterpret_cast<VecF *>(totals + i * split.total_bytes); };
    const int64_t blocks = a.weight.size(1);
    for (int64_t first = begin; first < end; first += split.strip) {
        const int64_t panels = end - first < split.strip ? end - first : split.strip;
        std::memset(totals, 0, static_cast<size_t>(panels * split.total_bytes));
        for (int64_t stretch = 0; stretch < x.steps(); stretch += split.stretch) {
            const int64_t stretch_end = stretch + split.stretch < x.steps() ? stretch + split.stretch : x.steps();
            for (int64_t panel = 0; panel < panels; ++panel) {
                const uint8_t *const data =
                    a.weight.as<const uint8_t>() + (first + panel) * blocks * Weights::kBlockBytes;
                for (int64_t step = stretch; step < stretch_end; step += kPieceSteps) {
                    const int64_t steps = stretch_end - step < kPieceSteps ? stretch_end - step : kPieceSteps;
                    unpack_piece<Weights>(data, blocks, step * kStepBlocks, steps * kStepBlocks, scratch.weights);
                    for (int64_t tile = 0; tile < x.tiles(); tile += kGroupTiles) {
                        const int64_t last = tile + kGroupTiles < x.tiles() ? tile + kGroupTiles : x.tiles();
                        add_piece(x, tile, last, step, steps, scratch, totals_of(panel));
                    }
                }
            }
        }
        for (int64_t row = 0; row < m; ++row) { // writes all results of a row together
            for (int64_t panel = 0; panel < panels; ++panel) {
                output(row, first + panel, totals_of(panel) + row * kVectors);
            }
        }
    }
}

template <typename Weights> void multiply_by_tiles(const Args &args) {
    with_float_type(args.x.dtype, [&](auto type) {
        multiply_passes<TiledRows<Weights>, Weights, kMaxRows, decltype(type)>(
            args,
            [](const TiledRows<Weights> &x, int64_t) {
                const Split<Weights> split(x);
                return static_cast<int64_t>(sizeof(Scratch<Weights>)) + split.strip * split.total_bytes;
            },
            [&](const TiledRows<Weights> &x, int64_t m, int64_t begin, int64_t end, char *scratch, const auto &output) {
                multiply_panels(args, x, m, begin, end, scratch, output);
            });
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL
