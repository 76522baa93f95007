// The CPU kernel of linear_packed: register tiles of rows of x times the columns of a panel, which is read
// sequentially.
// Limit: memory bandwidth for up to about 16 rows (the weight's bytes), the multiply-add units beyond.
#include "bias.h"
#include "gemm/pack_panels.h"
#include "linear_packed.h"
#include "parallel.h"
#include "row_iterator.h"
#include "scratch.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_packed::kPanel;

// The register tile: up to kTileRows rows of x times kTileVectors vectors of columns, one accumulator each, plus a word
// of the columns and one of a row. More columns mean fewer loads of x per multiplication. A single row is multiplied by
// a whole panel at once.
#if defined(__AVX512BF16__)
constexpr int kTileRows = 9, kTileVectors = 3;
#elif defined(__AVX512F__)
constexpr int kTileRows = 7, kTileVectors = 3;
#elif defined(__aarch64__)
constexpr int kTileRows = 4, kTileVectors = 4;
#else
constexpr int kTileRows = 4, kTileVectors = 2;
#endif
constexpr int64_t kTileColumns = kTileVectors * kLanes;
static_assert(kPanel % kTileColumns == 0);
static_assert(kTileRows <= kLanes);            // a vector must hold the words of a tile's rows
constexpr int kPanelVectors = kPanel / kLanes; // in the tile of a single row

// How words are multiplied: directly if the machine multiplies bfloat16 in pairs, else as two floats. kParts: the
// floats per packed word of x.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int kParts = 1;
struct Column {
    VecF words;
    INFINI_ALWAYS_INLINE void read(const float *p) {
        words = load(p);
        keep_in_register(words);
    }
};
INFINI_ALWAYS_INLINE VecF multiply_add(const Column &column, const VecF (&x)[kParts], VecF sum) {
    return PackedK<bf16>::multiply_add(x[0], column.words, sum);
}
#else
constexpr int kParts = 2;
struct Column {
    VecF first, second;
    INFINI_ALWAYS_INLINE void read(const float *p) {
        const auto words = (VecU)load(p);
        first = (VecF)(words << 16);
        second = (VecF)(words & 0xffff0000u);
    }
};
INFINI_ALWAYS_INLINE VecF multiply_add(const Column &column, const VecF (&x)[kParts], VecF sum) {
    return fma(x[1], column.second, fma(x[0], column.first, sum));
}
#endif

// The most rows, and bytes, of x that are packed at once: the weight is read once for each such pass.
constexpr int64_t kPassRows = 1024, kPassBytes = 16 << 20;

// The most words in a panel's block of k: a block stays in the L2 cache while all tiles multiply it and the next block
// is prefetched. With two tiles smaller blocks suit memory better (tried by hand on Zen 5: 16 rows up to 1.05 times as
// fast, 20 to 48 rows up to 1.03 times slower).
constexpr int64_t kBlockWords = kManyRegisters ? 512 : 256, kBlockWordsOfTwo = 256;

// The prefetch distance in a panel if there is a single tile.
constexpr int64_t kAheadBytes = 8192, kLineBytes = 64, kWordBytes = kPanel * sizeof(float);

// Up to so many rows, where weight_reading() is kOnePlace, nothing is prefetched: the bandwidth is the limit, and the
// hardware prefetcher alone is faster. GB/s on a Zen 4 core that sums floats at 33, 2048 -> 11232 from memory in large
// pages, with prefetches and without: one row 29.0 and 31.5, two 20.3 and 32.0, three 20.2 and 30.1, four 21.7 and 28.6,
// five 23.7 and 27.2, six 28.1 and 24.6 (by hand, both in turns).
constexpr int64_t kUnprefetchedRows = 5;

// Row tiles of x, split evenly: per word the floats of the tile's rows, kParts times.
struct Pass {
    int64_t rows, k;
    int64_t words = ceil_div(k, 2), tiles = ceil_div(rows, kTileRows);
    int64_t blocks = words > 0 ? ceil_div(words, tiles == 2 ? kBlockWordsOfTwo : kBlockWords) : 1;
    int64_t row(int64_t tile) const { return rows * tile / tiles; }
    // Each tile is padded for the whole vectors that store its last words.
    int64_t x_at(int64_t tile) const { return row(tile) * words * kParts + tile * kLanes; }
    int64_t x_floats() const { return x_at(tiles); }
    int64_t block(int64_t i) const { return words * i / blocks; }
};

// Packs the rows of a tile, which are at x_offsets.
void pack_tile(const Pass &pass, int64_t tile, const bf16 *x, const int64_t *x_offsets, float *packed) {
    const int64_t first = pass.row(tile), rows = pass.row(tile + 1) - first;
    constexpr int64_t kStep = 2 * kLanes;
    float *to = packed + pass.x_at(tile);
    for (int64_t i = 0; i < pass.k; i += kStep) {
        const int64_t left = pass.k - i < kStep ? pass.k - i : kStep;
        VecF words[kLanes];
        for (int64_t m = 0; m < kLanes; ++m) {
            const bf16 *row = x + x_offsets[first + (m < rows ? m : 0)] + i;
            words[m] = left == kStep ? load_raw(row, Full{}) : load_raw(row, static_cast<int>(left));
        }
        transpose(words);
        // This order overwrites the lanes beyond the rows.
        for (int64_t w = 0; 2 * w < left; ++w) {
            if constexpr (kParts == 1) {
                store(to, words[w]);
            } else {
                store(to, (VecF)((VecU)words[w] << 16));
                store(to + rows, (VecF)((VecU)words[w] & 0xffff0000u));
            }
            to += kParts * rows;
        }
    }
}

// sums[m * kVectors * kLanes] = the products of row m of x with kVectors vectors of columns over some words, or +=
// unless these words are the first. kTiles tiles share the prefetches of the next block: a single tile prefetches every
// line, kAheadBytes ahead; two tiles two lines per word each, from `soon` on, `advance` bytes apart; more (3) one line
// each; with kTiles = 0 there are none.
template <int kM, int kVectors, int kTiles>
__attribute__((noinline)) void multiply_tile(const float *x, const float *panel, int64_t words, float *sums, bool first,
                                             const char *soon, int64_t advance) {
    VecF sum[kM][kVectors];
    const auto for_each = [&](const auto &body) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 12
            for (int v = 0; v < kVectors; ++v) {
                body(sum[m][v], sums + (m * kVectors + v) * kLanes);
            }
        }
    };
    for_each([&](VecF &value, const float *at) { value = first ? VecF{} : load(at); });
#pragma GCC unroll 2
    for (int64_t i = 0; i < words; ++i, x += kParts * kM, panel += kPanel) {
        if constexpr (kTiles == 1) {
#pragma GCC unroll 12
            for (int64_t byte = 0; byte < kVectors * kLanes * 4; byte += kLineBytes) {
                __builtin_prefetch(reinterpret_cast<const char *>(panel) + kAheadBytes + byte, 0, 2); // into L2
            }
        } else if constexpr (kTiles > 1) {
            __builtin_prefetch(soon, 0, 2);
            if constexpr (kTiles == 2) {
                __builtin_prefetch(soon + kLineBytes, 0, 2);
            }
            soon += advance;
        }
        Column columns[kVectors];
#pragma GCC unroll 12
        for (int v = 0; v < kVectors; ++v) {
            columns[v].read(panel + v * kLanes);
        }
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            VecF row[kParts];
            for (int part = 0; part < kParts; ++part) {
                row[part] = splat(x[part * kM + m]);
                keep_in_register(row[part]);
            }
#pragma GCC unroll 12
            for (int v = 0; v < kVectors; ++v) {
                sum[m][v] = multiply_add(columns[v], row, sum[m][v]);
            }
        }
    }
    for_each([](const VecF &value, float *at) { store(at, value); });
}

using Multiply = decltype(&multiply_tile<1, 1, 1>);

template <int kVectors, int kTiles, int... kRow>
constexpr Multiply tile_of(std::integer_sequence<int, kRow...>, int64_t rows) {
    constexpr Multiply kOfRows[] = {&multiply_tile<kRow + 1, kVectors, kTiles>...};
    return kOfRows[rows - 1];
}

// Writes `count` columns of y, from `column` on; the sums of rows are `pitch` floats apart.
void write_rows(const linear_packed::Args &a, const float *sums, int64_t pitch, const int64_t *y_offsets, int64_t rows,
                int64_t column, int64_t count) {
    const Bias<bf16> bias(a.bias, column);
    for (int64_t m = 0; m < rows; ++m, sums += pitch) {
        bf16 *y = a.y.as<bf16>() + y_offsets[m] + column;
        for_each_vector(
            count, [&](int64_t i, auto lanes) { store_at(y, i, bias.plus(load_at(sums, i, lanes), i, lanes), lanes); });
    }
}

const float *panel_of(const linear_packed::Args &a, const Pass &pass, int64_t panel) {
    return reinterpret_cast<const float *>(a.weight.as<const bf16>()) + panel * pass.words * kPanel;
}

// Multiplies tiles first .. last-1 of a pass, of up to kRows rows, by panels begin .. end-1, kVectors vectors of columns
// at a time. `sums`: kPanel floats per row.
template <int kRows, int kVectors>
void multiply_panels(const linear_packed::Args &a, const Pass &pass, const float *x, const int64_t *y_offsets,
                     int64_t first, int64_t last, int64_t begin, int64_t end, float *sums) {
    constexpr std::make_integer_sequence<int, kRows> sizes{};
    constexpr std::make_integer_sequence<int, (kRows < kUnprefetchedRows ? kRows : kUnprefetchedRows)> few_sizes{};
    constexpr int64_t kColumns = kVectors * kLanes;
    const int64_t tiles = last - first, first_row = pass.row(first), rows = pass.row(last) - first_row;
    const bool unprefetched = rows <= kUnprefetchedRows && weight_reading() == WeightReading::kOnePlace;
    if (tiles == 0) {
        return;
    }
    for (int64_t panel = begin; panel < end; ++panel) {
        const float *const columns = panel_of(a, pass, panel);
        const int64_t left = a.n - panel * kPanel, used = left < kPanel ? left : kPanel;
        // Narrow vectors multiply a block in parts, which share the prefetches as tiles do.
        const int64_t parts = ceil_div(used, kColumns), turns = parts * tiles;
        const int64_t advance = turns == 2 ? 2 * kLineBytes : ceil_div(kWordBytes, turns);
        for (int64_t block = 0; block < pass.blocks; ++block) {
            const int64_t word = pass.block(block), words = pass.block(block + 1) - word;
            // The next block follows this one in memory. After the last one nothing is prefetched.
            const bool done = panel + 1 == end && block + 1 == pass.blocks;
            const auto *next = reinterpret_cast<const char *>(columns + (done ? 0 : word + words) * kPanel);
            for (int64_t part = 0; part < parts; ++part) {
                for (int64_t tile = first; tile < last; ++tile) {
                    const int64_t row = pass.row(tile), count = pass.row(tile + 1) - row;
                    const auto multiply = turns == 1 && unprefetched ? tile_of<kVectors, 0>(few_sizes, count)
                                          : turns == 1               ? tile_of<kVectors, 1>(sizes, count)
                                          : turns == 2               ? tile_of<kVectors, 2>(sizes, count)
                                                                     : tile_of<kVectors, 3>(sizes, count);
                    multiply(x + pass.x_at(tile) + word * kParts * count, columns + word * kPanel + part * kColumns,
                             words, sums + (part * rows + row - first_row) * kColumns, block == 0, next,
                             done ? 0 : advance);
                    next += done ? 0 : words * advance;
                }
            }
        }
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t rest = used - part * kColumns;
            write_rows(a, sums + part * rows * kColumns, kColumns, y_offsets + first_row, rows,
                       panel * kPanel + part * kColumns, rest < kColumns ? rest : kColumns);
        }
    }
}

// A thread's part of a pass. All threads have the same number of panels; the remaining panels are split by rows if
// there is a tile for each thread.
void multiply_part(const linear_packed::Args &a, const Pass &pass, const float *x, const int64_t *y_offsets,
                   int64_t panels, int64_t part, int64_t parts, float *sums) {
    const auto multiply = [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
        const auto by = pass.rows == 1 ? multiply_panels<1, kPanelVectors> : multiply_panels<kTileRows, kTileVectors>;
        by(a, pass, x, y_offsets, first, last, begin, end, sums);
    };
    if (pass.tiles < parts) {
        return multiply(0, pass.tiles, panels * part / parts, panels * (part + 1) / parts);
    }
    const int64_t each = panels / parts;
    multiply(0, pass.tiles, each * part, each * (part + 1));
    multiply(pass.tiles * part / parts, pass.tiles * (part + 1) / parts, each * parts, panels);
}

void multiply(const linear_packed::Args &a) {
    weight_reading(); // throws for a wrong setting, which no parallel region may
    const int64_t k = a.x.size(-1), panels = ceil_div(a.n, kPanel);
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    const int64_t row_bytes = ceil_div(k, 2) * kParts * static_cast<int64_t>(sizeof(float)) + 1;
    const int64_t fit = kPassBytes / row_bytes, most = fit < kTileRows ? kTileRows : fit < kPassRows ? fit : kPassRows;
    const int64_t passes = ceil_div(rows.count(), most), pass_rows = ceil_div(rows.count(), passes);
    const int64_t bytes = panels * kPanel * k * static_cast<int64_t>(sizeof(bf16)) * ceil_div(pass_rows, kTileRows);
    const Pass largest{pass_rows, k};
    const int64_t threads = parallel_threads(panels > largest.tiles ? panels : largest.tiles, bytes);
    const int64_t thread_floats = pass_rows * kPanel, x_floats = ceil_div(largest.x_floats(), kLanes) * kLanes;
    auto *x =
        static_cast<float *>(cpu::scratch(static_cast<size_t>(x_floats + threads * thread_floats) * sizeof(float)));
    for (int64_t begin = 0; begin < rows.count(); begin += pass_rows) {
        const int64_t left = rows.count() - begin;
        const Pass pass{left < pass_rows ? left : pass_rows, k};
        int64_t x_offsets[kPassRows], y_offsets[kPassRows], m = 0;
        rows.visit(begin, begin + pass.rows, [&](const int64_t *at) {
            x_offsets[m] = at[0];
            y_offsets[m++] = at[1];
        });
        parallel_for(pass.tiles, pass.rows * k * static_cast<int64_t>(sizeof(bf16)), [&](int64_t first, int64_t last) {
            for (int64_t tile = first; tile < last; ++tile) {
                pack_tile(pass, tile, a.x.as<const bf16>(), x_offsets, x);
            }
        });
        parallel_for(threads, bytes, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                multiply_part(a, pass, x, y_offsets, panels, part, threads, x + x_floats + part * thread_floats);
            }
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_packed::INFINI_LEVEL::cpu_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
