// The kernel of linear_table4 in tile registers, with the bits of the other one: a scale times a level, at most 8128 in
// magnitude, is 128 * high + low with both in int8, so that two products of tiles give a run's exact sums.
// A panel's lines are rows of a right operand already. Weights are unpacked in pieces of a panel's k that stay in L1
// for all rows of a pass; a run's sums are scaled and added in vectors while tiles multiply the next run.
// Limit: 64 cycles for a run of 16 rows and a panel, half the rate of int8: its 4 products of tiles.
#include "linear_table4.h"
#include "table4_passes.h"
#include "tile_registers.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kMaxRows = 512;          // of x in a pass
constexpr int64_t kPieceRuns = 4;          // that are unpacked at once: 16 KiB
constexpr int64_t kGroupTiles = 8;         // of x: with their totals they stay in L1 from run to run
constexpr int64_t kNearBytes = 1 << 20;    // of x, which stay in L2 while all panels of a strip are multiplied
constexpr int64_t kStripBytes = 256 << 10; // of totals beside it
constexpr int64_t kMaxStrip = 8;           // panels
constexpr int kTileVectors = static_cast<int>(kTmmRows) * kVectors;
static_assert(kPanel == kTmmRows && kBlock == kTmmRowBytes && kRunBlocks == 2);

// A run of 16 rows of x. Beyond k values are 0; where there is no row, only the scale is.
struct RunOfX {
    alignas(64) int8_t values[kRunBlocks][kTmmRows][kBlock];
    float scales[kTmmRows];
};

// m rows of x: the tiles of each run.
class TiledRows {
public:
    TiledRows(int64_t m, int64_t k)
        : m_(m), k_(k), tiles_((m + kTmmRows - 1) / kTmmRows), runs_((k + kRun - 1) / kRun) {}

    int64_t runs() const { return runs_; }
    int64_t tiles() const { return tiles_; }
    int64_t bytes() const { return tiles_ * runs_ * static_cast<int64_t>(sizeof(RunOfX)); }
    void set_memory(void *memory) {
        memory_ = static_cast<RunOfX *>(memory);
        for (int64_t run = 0; run < (m_ % kTmmRows != 0 ? runs_ : 0); ++run) {
            std::memset(memory_[(run + 1) * tiles_ - 1].scales, 0, sizeof memory_->scales);
        }
    }
    const RunOfX &at(int64_t tile, int64_t run) const { return memory_[run * tiles_ + tile]; }

    template <typename T> void set(int64_t row, const T *x) const {
        for (int64_t i = 0; i < runs_; ++i) {
            RunOfX &run = memory_[i * tiles_ + row / kTmmRows];
            const int64_t first = i * kRun, left = k_ - first, in_tile = row % kTmmRows;
            int8_t q[kRun] = {};
            run.scales[in_tile] = quantize_row(x + first, left < kRun ? left : kRun, q);
            for (int64_t block = 0; block < kRunBlocks; ++block) {
                std::memcpy(run.values[block][in_tile], q + block * kBlock, kBlock);
            }
        }
    }

private:
    int64_t m_, k_, tiles_, runs_;
    RunOfX *memory_ = nullptr;
};

// ---- the weight ----

// Right operands: rows of 4 columns of k, of 16 rows of the weight.
struct UnpackedBlock {
    alignas(64) uint8_t high[kTmmRows][kTmmRowBytes], low[kTmmRows][kTmmRowBytes];
};

#if defined(__AVX512F__)
// Products of the bytes of a scale, in each half of a word, and of four levels.
inline void split(__m512i levels, __m512i scales, uint8_t *high, uint8_t *low) {
    const __m512i even = _mm512_slli_epi16(levels, 8), odd = _mm512_and_si512(levels, _mm512_set1_epi16(-256));
    // (256 * level) * (2 * scale) >> 16 is the product >> 7.
    const __m512i doubled = _mm512_add_epi16(scales, scales);
    const __m512i high_even = _mm512_mulhi_epi16(even, doubled), high_odd = _mm512_mulhi_epi16(odd, doubled);
    _mm512_store_si512(high, _mm512_mask_mov_epi8(_mm512_slli_epi16(high_odd, 8), 0x5555555555555555u, high_even));
    // The lower byte of a product follows from those of the factors.
    const __m512i low_even = _mm512_mullo_epi16(levels, scales), low_odd = _mm512_mullo_epi16(odd, scales);
    _mm512_store_si512(
        low, _mm512_and_si512(_mm512_mask_mov_epi8(low_odd, 0x5555555555555555u, low_even), _mm512_set1_epi8(127)));
}
#endif

inline void unpack(const uint8_t *block, UnpackedBlock &to) {
    const uint8_t *line = block + kScaleBytes;
    for (int64_t l = 0; l < kBlock / 8; ++l, line += kLineBytes) {
        const uint8_t *const scales = block + l / 2 * kPanel;
#if defined(__AVX512F__)
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(kTable)));
        const __m512i nibbles = _mm512_set1_epi8(15), indices = _mm512_loadu_si512(line);
        const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales)));
        const __m512i both = _mm512_mask_mov_epi16(_mm512_slli_epi32(wide, 16), 0x55555555u, wide);
        split(_mm512_shuffle_epi8(table, _mm512_and_si512(indices, nibbles)), both, to.high[2 * l], to.low[2 * l]);
        split(_mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(indices, 4), nibbles)), both,
              to.high[2 * l + 1], to.low[2 * l + 1]);
#else
        for (int64_t i = 0; i < kLineBytes; ++i) {
            for (int half = 0; half < 2; ++half) {
                const int value = static_cast<int8_t>(scales[i / 4]) * kTable[line[i] >> (4 * half) & 15];
                to.high[2 * l + half][i] = static_cast<uint8_t>(value >> 7);
                to.low[2 * l + half][i] = static_cast<uint8_t>(value & 127);
            }
        }
#endif
    }
}

// Blocks [first, first + count) of a panel; meanwhile those of the next piece, which the prefetchers of the hardware miss
// behind the products of this one, go to L2.
inline void unpack_piece(const uint8_t *panel, int64_t blocks, int64_t first, int64_t count, UnpackedBlock *to) {
    for (int64_t i = first; i < first + count; ++i, ++to) {
        if (const int64_t next = i + kPieceRuns * kRunBlocks; next < blocks) {
            for (int64_t byte = 0; byte < kBlockBytes; byte += 64) {
                __builtin_prefetch(panel + next * kBlockBytes + byte, 0, 2);
            }
        }
        unpack(panel + (i < blocks ? i : blocks - 1) * kBlockBytes, *to); // beyond k x is 0: any weights do
    }
}

// ---- products ----

struct Sums {
    VecI high[kTileVectors], low[kTileVectors];
};

// The sums of a run that are not yet added to the totals of their tile.
struct Pending {
    const Sums *sums;
    const float *scales;
    VecF *totals;

    // Of the part-th 4 rows.
    INFINI_ALWAYS_INLINE void add(int part) const {
#pragma GCC unroll 4
        for (int row = part * 4; row < part * 4 + 4; ++row) {
#pragma GCC unroll 4
            for (int v = row * kVectors; v < (row + 1) * kVectors; ++v) {
                const VecI sum = (sums->high[v] << 7) + sums->low[v];
                totals[v] += splat(scales[row]) * __builtin_convertvector(sum, VecF);
            }
        }
    }
};

// A thread's scratch; the totals of a strip of panels follow.
struct Scratch {
    UnpackedBlock weights[kPieceRuns * kRunBlocks];
    Sums sums[2]; // of a run and the one before it
};

// totals += the products of a piece of k with tiles [begin, end) of x.
__attribute__((noinline)) void add_piece(const TiledRows &x, int64_t begin, int64_t end, int64_t first, int64_t runs,
                                         Scratch &scratch, VecF *totals) {
    std::memset(&scratch.sums[1], 0, sizeof scratch.sums[1]);
    Pending pending{&scratch.sums[1], x.at(begin, first).scales, totals + begin * kTileVectors};
    int64_t turn = 0;
    for (int64_t run = 0; run < runs; ++run) {
        const UnpackedBlock *const weights = scratch.weights + run * kRunBlocks;
        tile_load<4>(weights[0].high, kTmmRowBytes);
        tile_load<5>(weights[0].low, kTmmRowBytes);
        tile_load<6>(weights[1].high, kTmmRowBytes);
        tile_load<7>(weights[1].low, kTmmRowBytes);
        for (int64_t tile = begin; tile < end; ++tile, turn ^= 1) {
            const RunOfX &of_x = x.at(tile, first + run);
            Sums &sums = scratch.sums[turn];
            tile_zero<0>();
            tile_zero<1>();
            tile_load<2>(of_x.values[0], kTmmRowBytes);
            tile_dot_int8<0, 2, 4>();
            pending.add(0);
            tile_dot_int8<1, 2, 5>();
            tile_load<3>(of_x.values[1], kTmmRowBytes);
            pending.add(1);
            tile_dot_int8<0, 3, 6>();
            pending.add(2);
            tile_dot_int8<1, 3, 7>();
            pending.add(3);
            tile_store<0>(sums.high, kTmmRowBytes);
            tile_store<1>(sums.low, kTmmRowBytes);
            pending = {&sums, of_x.scales, totals + tile * kTileVectors};
        }
    }
    for (int part = 0; part < 4; ++part) {
        pending.add(part);
    }
}

// How a pass is split: stretches of k, and strips of panels that are multiplied for each.
struct Split {
    int64_t stretch, strip, total_bytes; // in runs; in panels; of a panel

    explicit Split(const TiledRows &x) : total_bytes(x.tiles() * kTmmRows * kPanel * 4) {
        const int64_t most = kNearBytes / (x.tiles() * static_cast<int64_t>(sizeof(RunOfX)));
        const int64_t parts = (x.runs() + most - 1) / most;
        stretch = parts > 1 ? ((x.runs() + parts - 1) / parts + kPieceRuns - 1) / kPieceRuns * kPieceRuns : x.runs();
        strip = kStripBytes / total_bytes < kMaxStrip ? kStripBytes / total_bytes : kMaxStrip;
    }
};

template <typename Output>
void multiply_panels(const Args &a, const TiledRows &x, int64_t m, int64_t begin, int64_t end, char *memory,
                     const Output &output) {
    const TileScope scope(full_tiles());
    const Split split(x);
    Scratch &scratch = *reinterpret_cast<Scratch *>(memory);
    char *const totals = memory + sizeof(Scratch);
    const auto totals_of = [&](int64_t i) { return reinterpret_cast<VecF *>(totals + i * split.total_bytes); };
    const int64_t blocks = a.weight.size(1);
    for (int64_t first = begin; first < end; first += split.strip) {
        const int64_t panels = end - first < split.strip ? end - first : split.strip;
        std::memset(totals, 0, static_cast<size_t>(panels * split.total_bytes));
        for (int64_t stretch = 0; stretch < x.runs(); stretch += split.stretch) {
            const int64_t stretch_end = stretch + split.stretch < x.runs() ? stretch + split.stretch : x.runs();
            for (int64_t panel = 0; panel < panels; ++panel) {
                const uint8_t *const data = a.weight.as<const uint8_t>() + (first + panel) * blocks * kBlockBytes;
                for (int64_t run = stretch; run < stretch_end; run += kPieceRuns) {
                    const int64_t runs = stretch_end - run < kPieceRuns ? stretch_end - run : kPieceRuns;
                    unpack_piece(data, blocks, run * kRunBlocks, runs * kRunBlocks, scratch.weights);
                    for (int64_t tile = 0; tile < x.tiles(); tile += kGroupTiles) {
                        const int64_t last = tile + kGroupTiles < x.tiles() ? tile + kGroupTiles : x.tiles();
                        add_piece(x, tile, last, run, runs, scratch, totals_of(panel));
                    }
                }
            }
        }
        for (int64_t row = 0; row < m; ++row) { // a row's results lie together
            for (int64_t panel = 0; panel < panels; ++panel) {
                output(row, first + panel, totals_of(panel) + row * kVectors);
            }
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_table4::INFINI_LEVEL::tile_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.x.dtype, [&](auto type) {
        multiply_passes<TiledRows, kMaxRows, decltype(type)>(
            args,
            [](const TiledRows &x, int64_t) {
                const Split split(x);
                return static_cast<int64_t>(sizeof(Scratch)) + split.strip * split.total_bytes;
            },
            [&](const TiledRows &x, int64_t m, int64_t begin, int64_t end, char *scratch, const auto &output) {
                multiply_panels(args, x, m, begin, end, scratch, output);
            });
    });
}
