// The CPU kernel of linear and fused_linear for many rows of bfloat16: both operands are packed into panels that stay
// in the caches and are multiplied by register tiles, in the same order of sums as in the kernel for few rows. Limit:
// the multiply-add units.
#include "epilogue.h"
#include "gemm/pack_panels.h"
#include "parallel.h"
#include "row_iterator.h"

namespace infini::INFINI_LEVEL {
namespace {

using W = PackedK<bf16>;
constexpr int64_t kStepElements = kLanes * W::kElements; // elements of k in a vector of words

// In the kernel for few rows, a vector of sums belongs to one element of y: lane l sums every kLanes-th word of k from
// word l on (a chain), and at the end lanes are added in pairs, l and l + kLanes / 2 first. Here the lanes of a vector
// belong to kLanes elements of y, and chains are computed in pairs, in the order of their lanes' reversed bits: then
// the latest two, four, ... results are always the next to be added, and are kept on a short stack.
constexpr int kPairs = kLanes / 2, kStack = kLanes == 16 ? 3 : kLanes == 8 ? 2 : 1; // log2 of kPairs

struct Order {
    int chain[kLanes] = {}; // the lanes in the order of computation
    constexpr Order() {
        for (int i = 0; i < kLanes; ++i) {
            int lane = 0;
            for (int bit = 1; bit < kLanes; bit *= 2) {
                lane = lane * 2 + (i & bit ? 1 : 0);
            }
            chain[lane] = i;
        }
    }
};
constexpr Order kOrder;

// The register tile: two chains of up to kTileRows rows of x and kTileColumns columns of y: one accumulator per row,
// vector of columns and chain, plus two vectors of the weight and a word of x. The rows of two tiles are packed
// together.
#if defined(__AVX512F__)
constexpr int kTileRows = 7;
#elif defined(__AVX2__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 2;
#endif
static_assert(kTileRows <= kPairs); // half a vector holds the words of a tile's rows
#if defined(__aarch64__)
constexpr int kTileVectors = 4; // for few rows, although there are 32 registers
#else
constexpr int kTileVectors = 2;
#endif
constexpr int kTileColumns = kTileVectors * kLanes;
constexpr int64_t kSums = kTileRows * kTileColumns; // floats of a tile's sums

// The most rows, and bytes, that are packed at once: the weight is packed again for each such pass. Up to kGroupTiles
// tiles of these rows, at most kGroupBytes, stay in L2 with their stacks while a panel of the weight is multiplied.
constexpr int64_t kPassRows = 1024, kPassBytes = 16 << 20, kGroupTiles = 16, kGroupBytes = 512 << 10;

// Calls body(step, lane, words) for the words of kLanes rows of k elements; nullptr is a row of zeros.
template <typename Body>
INFINI_ALWAYS_INLINE void for_each_step(const bf16 *const (&rows)[kLanes], int64_t k, const Body &body) {
    const auto step = [&](int64_t i, auto elements) __attribute__((always_inline)) {
        VecF words[kLanes];
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
            if (rows[r] == nullptr) {
                words[r] = VecF{};
            } else if constexpr (W::kElements == 2) {
                words[r] = load_raw(rows[r] + i, elements);
            } else {
                words[r] = load_at(rows[r], i, elements);
            }
        }
        transpose(words);
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) {
            body(i / kStepElements, lane, words[lane]);
        }
    };
    int64_t i = 0;
    for (; i + kStepElements <= k; i += kStepElements) {
        step(i, Full{});
    }
    if (i < k) {
        step(i, static_cast<int>(k - i));
    }
}

// Computes the sums of a pair of chains of a tile and adds the `added` earlier sums at `sums`, which lie kSums floats
// apart, the last one first. Prefetches a cache line per step from `soon` on.
template <int kM>
__attribute__((noinline)) void multiply_tile(const float *x, const float *panel, int64_t steps, float *sums, int added,
                                             const char *soon) {
    constexpr int64_t kLineBytes = 64;
    VecF sum[2][kM][kTileVectors] = {};
    for (int64_t i = 0; i < steps; ++i, x += kLanes, panel += 2 * kTileColumns, soon += kLineBytes) {
        __builtin_prefetch(soon, 0, 2); // into L2
#pragma GCC unroll 2
        for (int chain = 0; chain < 2; ++chain) {
            VecF column[kTileVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kTileVectors; ++v) {
                column[v] = load(panel + chain * kTileColumns + v * kLanes);
                keep_in_register(column[v]);
            }
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                VecF row = splat(x[chain * kPairs + m]);
                keep_in_register(row);
#pragma GCC unroll 4
                for (int v = 0; v < kTileVectors; ++v) {
                    sum[chain][m][v] = W::multiply_add(row, column[v], sum[chain][m][v]);
                }
            }
        }
    }
    const auto for_each = [&](const auto &body) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
            for (int v = 0; v < kTileVectors; ++v) {
                body(sum[0][m][v], sum[1][m][v], m * kTileColumns + v * kLanes);
            }
        }
    };
    for_each([](VecF &first, const VecF &second, int64_t) { first = first + second; });
    for (int64_t i = added - 1; i >= 0; --i) {
        for_each([&](VecF &all, const VecF &, int64_t at) { all = load(sums + i * kSums + at) + all; });
    }
    for_each([&](const VecF &all, const VecF &, int64_t at) { store(sums + at, all); });
}

using Multiply = decltype(&multiply_tile<1>);

template <int... kRow> constexpr Multiply tile_of(std::integer_sequence<int, kRow...>, int64_t rows) {
    constexpr Multiply kTiles[] = {&multiply_tile<kRow + 1>...};
    return kTiles[rows - 1];
}

// Row tiles of x, split evenly, in groups. For a pair of chains a group's tiles are contiguous; a step of a tile takes
// kLanes words, kPairs for each of the two chains.
struct Pass {
    int64_t rows, k;
    int64_t steps = ceil_div(k, kStepElements), tiles = ceil_div(rows, kTileRows);
    int64_t tile_floats = steps * kLanes; // per pair of chains
    int64_t groups = ceil_div(tiles, group_tiles());
    // Per panel and pair of chains; padded by 64 bytes so that the chains of a step do not map to the same cache set.
    int64_t panel_floats = steps * 2 * kTileColumns + kLanes;

    int64_t group_tiles() const {
        const int64_t fit = kGroupBytes / (kPairs * tile_floats * static_cast<int64_t>(sizeof(float)) + 1);
        return fit < 2 ? 2 : fit < kGroupTiles ? fit : kGroupTiles;
    }
    int64_t row(int64_t tile) const { return rows * tile / tiles; }
    int64_t tile(int64_t group) const { return tiles * group / groups; }
    int64_t x_floats() const { return tiles * kPairs * tile_floats; }
    int64_t thread_floats() const { return kPairs * panel_floats + kGroupTiles * kStack * kSums; }

    float *x(float *packed, int64_t group, int64_t tile_, int64_t pair) const {
        const int64_t first = tile(group), count = tile(group + 1) - first;
        return packed + (first * kPairs + pair * count + tile_ - first) * tile_floats;
    }
};

// Packs a group's rows, two tiles at a time: each half of a vector goes to one of them.
void pack_group(const Pass &pass, int64_t group, const bf16 *x, const int64_t *offsets, float *packed) {
    for (int64_t tile = pass.tile(group); tile < pass.tile(group + 1); tile += 2) {
        const int64_t there = tile + 1 < pass.tile(group + 1) ? 2 : 1;
        const bf16 *rows[kLanes] = {};
        for (int64_t half = 0; half < there; ++half) {
            const int64_t first = pass.row(tile + half);
            for (int64_t row = first; row < pass.row(tile + half + 1); ++row) {
                rows[half * kPairs + row - first] = x + offsets[row];
            }
        }
        for_each_step(rows, pass.k, [&](int64_t step, int lane, const VecF &words) {
            const int chain = kOrder.chain[lane];
            float *to = pass.x(packed, group, tile, chain / 2) + step * kLanes + chain % 2 * kPairs;
            const auto *from = reinterpret_cast<const char *>(&words);
            std::memcpy(to, from, sizeof words / 2);
            if (there == 2) {
                std::memcpy(to + pass.tile_floats, from + sizeof words / 2, sizeof words / 2);
            }
        });
    }
}

// Up to kTileColumns columns of y and the rows of one weight that they come from.
struct Columns {
    const bf16 *weight;    // at the first column
    int64_t stride, count; // row stride, and number of columns
    int64_t first;         // counted among all columns that come from the weight
    const Epilogue<bf16> &epilogue;
};

// For a pair of chains, a step has kTileColumns words of the first chain, then of the second.
void pack_panel(const Pass &pass, const Columns &columns, float *panel) {
    for (int64_t j = 0; j < kTileColumns; j += kLanes) {
        const bf16 *rows[kLanes];
        for (int64_t r = 0; r < kLanes; ++r) {
            rows[r] = j + r < columns.count ? columns.weight + (j + r) * columns.stride : nullptr;
        }
        for_each_step(rows, pass.k, [&](int64_t step, int lane, const VecF &words) {
            const int chain = kOrder.chain[lane];
            store(panel + chain / 2 * pass.panel_floats + (2 * step + chain % 2) * kTileColumns + j, words);
        });
    }
}

void write_rows(const float *sums, int64_t rows, const int64_t *y_offsets, const Columns &columns) {
    for (int64_t m = 0; m < rows; ++m, sums += kTileColumns) {
        for_each_vector(columns.count, [&](int64_t i, auto lanes) {
            columns.epilogue(y_offsets[m], columns.first + i, load_at(sums, i, lanes), lanes);
        });
    }
}

// Computes y of a pass's rows for some columns. Prefetches the weight of the next columns, a row per tile.
void multiply_columns(const Pass &pass, float *x, const int64_t *y_offsets, const Columns &columns, const Columns &next,
                      float *scratch) {
    constexpr std::make_integer_sequence<int, kTileRows> sizes{};
    float *const panel = scratch, *const stacks = scratch + kPairs * pass.panel_floats;
    pack_panel(pass, columns, panel);
    int64_t calls = 0;
    for (int64_t group = 0; group < pass.groups; ++group) {
        for (int pair = 0; pair < kPairs; ++pair) {
            const bool finishes = pair + 1 == kPairs;
            const int added = __builtin_ctz(static_cast<unsigned>(pair) + 1);
            const int depth = __builtin_popcount(static_cast<unsigned>(pair)) - added;
            float *stack = stacks;
            for (int64_t tile = pass.tile(group); tile < pass.tile(group + 1); ++tile, stack += kStack * kSums) {
                const int64_t row = pass.row(tile), rows = pass.row(tile + 1) - row;
                for (int64_t m = row; finishes && m < row + rows; ++m) {
                    __builtin_prefetch(columns.epilogue.y + columns.first + y_offsets[m], 1);
                }
                const bf16 *soon = next.weight + calls++ % next.count * next.stride;
                tile_of(sizes, rows)(pass.x(x, group, tile, pair), panel + pair * pass.panel_floats, pass.steps,
                                     stack + depth * kSums, added, reinterpret_cast<const char *>(soon));
                if (finishes) {
                    write_rows(stack, rows, y_offsets + row, columns);
                }
            }
        }
    }
}

int64_t panels(const TensorView &weight) {
    return ceil_div(weight.size(0), kTileColumns);
}

// Computes panels begin .. end-1 of all weights.
void multiply_panels(const linear::Args &a, const Pass &pass, float *x, const int64_t *y_offsets, int64_t begin,
                     int64_t end, float *scratch) {
    int64_t first = 0; // the column of y at which the weight's columns start
    for (int i = 0; i < a.weights; ++i) {
        const TensorView &weight = a.weight[i];
        const Epilogue<bf16> epilogue(a, i, first);
        const int64_t n = weight.size(0), stride = weight.stride(0), count = panels(weight);
        const auto columns = [&](int64_t panel) -> Columns {
            const int64_t column = panel * kTileColumns, left = n - column;
            return {weight.as<const bf16>() + column * stride, stride, left < kTileColumns ? left : kTileColumns,
                    column, epilogue};
        };
        for (int64_t panel = begin > 0 ? begin : 0; panel < count && panel < end; ++panel) {
            const int64_t next = panel + 1 < count ? panel + 1 : panel;
            multiply_columns(pass, x, y_offsets, columns(panel), columns(next), scratch);
        }
        begin -= count;
        end -= count;
        first += n;
    }
}

void multiply(const linear::Args &a) {
    const int64_t k = a.x.size(-1);
    int64_t all_panels = 0;
    for (int i = 0; i < a.weights; ++i) {
        all_panels += panels(a.weight[i]);
    }
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    const int64_t row_bytes = ceil_div(k, kStepElements) * kLanes * static_cast<int64_t>(sizeof(float)) + 1;
    const int64_t fit = kPassBytes / row_bytes, most = fit < kTileRows ? kTileRows : fit < kPassRows ? fit : kPassRows;
    const int64_t passes = ceil_div(rows.count(), most), pass_rows = ceil_div(rows.count(), passes);
    const Pass largest{pass_rows, k};
    const int64_t bytes = all_panels * kTileColumns * k * pass_rows, threads = parallel_threads(all_panels, bytes);
    const int64_t floats = ceil_div(largest.thread_floats(), kLanes) * kLanes;
    auto *x =
        static_cast<float *>(cpu::scratch(static_cast<size_t>(largest.x_floats() + threads * floats) * sizeof(float)));
    float *const scratch = x + largest.x_floats();
    for (int64_t begin = 0; begin < rows.count(); begin += pass_rows) {
        const int64_t left = rows.count() - begin;
        const Pass pass{left < pass_rows ? left : pass_rows, k};
        int64_t x_offsets[kPassRows], y_offsets[kPassRows], m = 0;
        rows.visit(begin, begin + pass.rows, [&](const int64_t *at) {
            x_offsets[m] = at[0];
            y_offsets[m++] = at[1];
        });
        parallel_for(pass.groups, bytes, [&](int64_t first, int64_t last) {
            for (int64_t group = first; group < last; ++group) {
                pack_group(pass, group, a.x.as<const bf16>(), x_offsets, x);
            }
        });
        parallel_for(threads, bytes, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                multiply_panels(a, pass, x, y_offsets, all_panels * part / threads, all_panels * (part + 1) / threads,
                                scratch + part * floats);
            }
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear::INFINI_LEVEL::many_rows_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
