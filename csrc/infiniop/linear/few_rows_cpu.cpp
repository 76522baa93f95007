// The CPU kernel of linear and fused_linear: products of a few rows of x with weights that are streamed from memory.
// Limit: memory bandwidth for up to about 8 rows (the weight's bytes), the multiply-add units beyond.
#include "epilogue.h"
#include "level_types.h"
#include "packed_groups.h"
#include "parallel.h"
#include "row_iterator.h"
#include "steps.h"
#include "vec.h"
#include "weight_reading.h"

#include "scratch.h"

namespace infini::INFINI_LEVEL {
namespace {

// The register tile: up to kTileRows rows of x times weight_rows() rows of the weight, one accumulator each. With a
// vector of each weight row and of x they fit into the 32 vector registers of AVX-512 or NEON, or the 16 of AVX2 and
// SSE. float32 weights are multiplied from memory: three rows of x take a fourth weight row too.
constexpr int kTileRows = kManyRegisters ? 8 : 4;

template <typename W> constexpr int weight_rows(int m) {
    return m >= (kManyRegisters ? 7 : sizeof(W) == 4 ? 4 : 3) ? 3 : 4;
}

// Rows of x that share one pass over the weight.
constexpr int64_t kMaxRows = 32;
// Weight rows that are multiplied by all those rows of x before the next ones are read: they stay in the L2 cache.
constexpr int64_t kGroup = 48;
// k is split into blocks such that a tile's rows of x stay in the L1 cache.
constexpr int64_t kTileBytes = 16 * 1024;

// Up to kStreamedRows rows of x, the weight is read in kStreams distant parts at once, and k is not split. Measured on
// one Zen 5 core, 2048 -> 5632 and 5632 -> 2048 from memory: 1.1 to 1.4 times as fast as adjacent rows or one row after
// another, also with padded rows. With three rows of x it gains nothing; two or eight parts gain less than four.
constexpr int64_t kStreamedRows = 2;
constexpr int kStreams = 4;

// How the weight is prefetched while it comes from memory: into L1 a short distance ahead within each weight row, with
// few rows of x, where memory is the limit, else whole rows ahead. Where weight_reading() is kOnePlace: for one row not
// at all, since the hardware prefetcher alone is faster; for more, whole rows far ahead into L2. GB/s on a Zen 4 core that
// sums floats at 33, 2048 -> 11232 from memory in large pages: one row of bfloat16 28.4 for 24.9 with prefetches, of
// float32 28.0 for 25.9 (by hand, both in turns). As shares of the bandwidth of a dot product, bfloat16, 3, 4, 6 and 8
// rows: 1.02, 0.85, 0.78 and 0.70 far ahead, else 0.59, 0.58, 0.57 and 0.52. A Zen 5 core reads one row 1.1 (bfloat16) to
// 1.0 times as fast so, more rows 0.88 to 0.96.
enum class Ahead { kClosely, kRows, kFar, kNot };
constexpr int64_t kRowsAheadBytes = 8 * 1024, kFarAheadBytes = 32 * 1024, kCloseAheadBytes = 1536;

constexpr Ahead ahead_into_l1(int m) {
    return m <= 6 ? Ahead::kClosely : Ahead::kRows;
}

constexpr int64_t kLineBytes = 64;

// The cache lines that a tile prefetches for its first weight row, one per line that it multiplies: from `first` on
// until `until` elements of k are done, then from `then` on, `step` elements apart. Likewise for its other rows.
template <typename W> struct Prefetch {
    const W *first, *then;
    int64_t until, step;
};

// The sums of a tile: at[m * m_step + r * row_step] belongs to weight row r and row m of x.
struct Sums {
    VecF *at;
    int64_t m_step, row_step;
    VecF &operator()(int m, int r) const { return at[m * m_step + r * row_step]; }
};

// part(m, r) = weight row r * row m of x over k elements, or += unless these are the first elements. x is packed: kStep
// elements of each of the kM rows, then the next kStep.
template <int kWeightRows, int kM, Ahead kAhead, typename W>
__attribute__((noinline)) void multiply_tile(const W *w, int64_t w_stride, const typename Steps<W>::X *x, int64_t k,
                                             const Sums &part, bool first, const Prefetch<W> &prefetch) {
    using S = Steps<W>;
    VecF sums[kWeightRows][kM];
#pragma GCC unroll 8
    for (int r = 0; r < kWeightRows; ++r) {
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            sums[r][m] = first ? VecF{} : part(m, r);
        }
    }
    const auto step = [&](const W *at, auto... lanes) __attribute__((always_inline)) {
        decltype(S::load_weight(at)) weights[kWeightRows];
#pragma GCC unroll 8
        for (int r = 0; r < kWeightRows; ++r) {
            weights[r] = S::load_weight(at + r * w_stride, lanes...);
        }
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            auto row = S::load_x(x + m * S::kStep);
            keep_in_register(row);
#pragma GCC unroll 8
            for (int r = 0; r < kWeightRows; ++r) {
                sums[r][m] = S::multiply_add(weights[r], row, sums[r][m]);
            }
        }
        x += kM * S::kStep;
    };
    constexpr int kLine = kLineBytes / sizeof(W);
    int64_t i = 0;
    const W *line = prefetch.first;
    const int64_t line_step = kAhead == Ahead::kClosely ? kLine : prefetch.step;
    for (; i + kLine <= k; i += kLine, line += line_step) {
        if constexpr (kAhead == Ahead::kClosely) {
            line = i == prefetch.until ? prefetch.then : line;
        }
        if constexpr (kAhead != Ahead::kNot) {
#pragma GCC unroll 8
            for (int r = 0; r < kWeightRows; ++r) {
                __builtin_prefetch(line + r * w_stride, 0, kAhead == Ahead::kFar ? 2 : 3);
            }
        }
        for (int s = 0; s < kLine; s += S::kStep) {
            step(w + i + s);
        }
    }
    if constexpr (S::kStep < kLine) {
        for (; i + S::kStep <= k; i += S::kStep) {
            step(w + i);
        }
    }
    if (i < k) {
        step(w + i, static_cast<int>(k - i));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kWeightRows; ++r) {
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            part(m, r) = sums[r][m];
        }
    }
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// How m rows of x are split into tiles, and k into blocks: evenly, so that no part is much smaller than the others.
template <typename W> struct Plan {
    using S = Steps<W>;
    static constexpr int64_t kLine = kLineBytes / sizeof(W);
    int64_t m, k, tiles, tile_rows, blocks, block_k;
    bool far =
        weight_reading(m == 1 ? WeightReading::kOnePlace : WeightReading::kSeveralPlaces) == WeightReading::kOnePlace;
    int64_t rows_ahead; // how many weight rows ahead the weight is prefetched
    int64_t line_step;  // the distance between prefetched lines, in elements

    Plan(int64_t m_, int64_t k_) : m(m_), k(k_) {
        tiles = ceil_div(m, kTileRows);
        tile_rows = ceil_div(m, tiles);
        const int64_t fits = packs() ? kPackedK : kTileBytes / static_cast<int64_t>(sizeof(typename S::X)) / tile_rows;
        const int64_t cuts = k > fits && !streams() ? ceil_div(k, fits) : 1;
        block_k = k > 0 ? ceil_div(ceil_div(k, cuts), kLine) * kLine : kLine;
        blocks = k > 0 ? ceil_div(k, block_k) : 1;
        constexpr int64_t kBytes = sizeof(W);
        line_step = kLine;
        rows_ahead = ceil_div(far ? kFarAheadBytes : kRowsAheadBytes, block_k * kBytes);
        const int64_t rows_at_once = weight_rows<W>(static_cast<int>(tile_rows));
        if (tiles > 1) {
            // Each tile prefetches its share of the next group, so that memory is never idle.
            rows_ahead = kGroup;
            line_step = kLine / tiles;
        } else if (rows_ahead < rows_at_once) {
            rows_ahead = rows_at_once;
        }
    }
    bool packs() const { return kPacks<W> && tiles >= kPackedTiles; }
    bool streams() const { return m <= (far ? 1 : kStreamedRows); }
    int64_t rows_of(int64_t tile) const { return tile + 1 < tiles ? tile_rows : m - tile * tile_rows; }
    int64_t k_of(int64_t block) const { return block + 1 < blocks ? block_k : k - block * block_k; }
    int64_t padded_k_of(int64_t block) const { return ceil_div(k_of(block), S::kStep) * S::kStep; }
    // Where the packed x of a block and tile begins.
    int64_t offset(int64_t block, int64_t tile) const {
        return block * block_k * m + tile * tile_rows * padded_k_of(block);
    }
    size_t bytes() const { return static_cast<size_t>((k + S::kStep) * m) * sizeof(typename S::X); }
};

// Prefetches a short distance ahead within a weight row of k elements, then in the row `then`.
template <typename W> Prefetch<W> follow(const W *row, int64_t k, const W *then) {
    constexpr int64_t kAhead = kCloseAheadBytes / sizeof(W), kLine = kLineBytes / sizeof(W);
    const int64_t until = k > kAhead ? (k - kAhead) / kLine * kLine : 0;
    return {row + k - until, then, until, 0};
}

// The same for any number of weight rows. `next` is the block that is multiplied after this one.
template <int kM, Ahead kAhead, typename W>
void multiply_block(const Plan<W> &plan, const W *w, int64_t w_stride, int64_t w_rows, const typename Steps<W>::X *x,
                    int64_t k, VecF *part, bool first, const W *next) {
    constexpr int64_t kWeightRows = weight_rows<W>(kM);
    constexpr bool kClose = kAhead == Ahead::kClosely;
    const int64_t rows_ahead = plan.rows_ahead < w_rows ? plan.rows_ahead : w_rows;
    const auto prefetch = [&](int64_t r) -> Prefetch<W> {
        const int64_t later = r + (kClose ? kWeightRows : rows_ahead);
        const W *row = later < w_rows ? w + later * w_stride : next + (later - w_rows) * w_stride;
        return kClose ? follow(w + r * w_stride, k, row) : Prefetch<W>{row, nullptr, 0, plan.line_step};
    };
    int64_t r = 0;
    for (; r + kWeightRows <= w_rows; r += kWeightRows) {
        multiply_tile<kWeightRows, kM, kAhead>(w + r * w_stride, w_stride, x, k, {part + r, kGroup, 1}, first,
                                               prefetch(r));
    }
    for (; r < w_rows; ++r) {
        multiply_tile<1, kM, kAhead>(w + r * w_stride, w_stride, x, k, {part + r, kGroup, 1}, first, prefetch(r));
    }
}

// Calls body with m as a compile-time constant.
template <int kM> struct Count {
    static constexpr int value = kM;
};

template <int kM = 1, typename Body> void with_count(int64_t m, const Body &body) {
    if constexpr (kM < kTileRows) {
        if (m > kM) {
            return with_count<kM + 1>(m, body);
        }
    }
    body(Count<kM>{});
}

// Packs one row of x for its tile, converted to the type that is multiplied and padded with zeros beyond k.
template <typename T> void pack_row(const Plan<T> &plan, int64_t row, const T *from, typename Steps<T>::X *packed) {
    using X = typename Steps<T>::X;
    constexpr int kStep = Steps<T>::kStep;
    const int64_t tile = row / plan.tile_rows, stride = plan.rows_of(tile) * kStep;
    for (int64_t block = 0; block < plan.blocks; ++block) {
        X *to = packed + plan.offset(block, tile) + (row % plan.tile_rows) * kStep;
        const T *at = from + block * plan.block_k;
        const int64_t k = plan.k_of(block);
        for (int64_t i = 0; i < k; i += kStep, to += stride) {
            const int64_t n = k - i < kStep ? k - i : kStep;
            if constexpr (sizeof(X) == sizeof(T)) {
                if (n < kStep) {
                    std::memset(to, 0, sizeof(X) * kStep);
                }
                std::memcpy(to, at + i, sizeof(X) * static_cast<size_t>(n));
            } else {
                store(to, n == kStep ? load(at + i) : load(at + i, static_cast<int>(n)));
            }
        }
    }
}

// Reduces the lanes of the products in `part` to results, for the row of y at `offset` and n columns from `column` on.
template <typename T>
void write(const VecF *part, int64_t n, const Epilogue<T> &epilogue, int64_t offset, int64_t column) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecF value = sums([&](int lane) { return lane < lanes ? part[i + lane] : VecF{}; });
        epilogue(offset, column + i, value, lanes);
    });
}

// Computes y of kM rows of x, for rows begin .. end-1 of one weight in streams. Returns the end of the rows that divide
// evenly among the streams.
template <int kM, typename T>
int64_t multiply_streams(const TensorView &weights, const Epilogue<T> &epilogue, const Plan<T> &plan,
                         const typename Steps<T>::X *packed, const int64_t *y_offsets, int64_t begin, int64_t end) {
    alignas(64) VecF part[kM * kStreams * kLanes];
    const int64_t length = (end - begin) / kStreams, stride = weights.stride(0), k = plan.k;
    for (int64_t from = 0; from < length; from += kLanes) {
        const int64_t rows = length - from < kLanes ? length - from : kLanes;
        for (int64_t r = 0; r < rows; ++r) {
            const T *w = weights.as<const T>() + (begin + from + r) * stride;
            const T *then = from + r + 1 < length ? w + stride : w;
            const auto multiply = kM == 1 && plan.far ? multiply_tile<kStreams, 1, Ahead::kNot, T>
                                                      : multiply_tile<kStreams, kM, Ahead::kClosely, T>;
            multiply(w, length * stride, packed, k, {part + r, kStreams * kLanes, kLanes}, true, follow(w, k, then));
        }
        for (int64_t m = 0; m < kM; ++m) {
            for (int64_t s = 0; s < kStreams; ++s) {
                const int64_t row = begin + s * length + from;
                write(part + (m * kStreams + s) * kLanes, rows, epilogue, y_offsets[m], row);
            }
        }
    }
    return begin + kStreams * length;
}

// Computes y of at most kMaxRows rows of x, for rows begin .. end-1 of one weight; row m of y is at y_offsets[m].
template <typename T>
void multiply_rows(const TensorView &weights, const Epilogue<T> &epilogue, const Plan<T> &plan,
                   const typename Steps<T>::X *packed, const int64_t *y_offsets, int64_t begin, int64_t end) {
    if (plan.streams()) {
        begin = plan.m == 1 ? multiply_streams<1>(weights, epilogue, plan, packed, y_offsets, begin, end)
                            : multiply_streams<2>(weights, epilogue, plan, packed, y_offsets, begin, end);
    }
    alignas(64) VecF part[kMaxRows * kGroup];
    const int64_t stride = weights.stride(0);
    const auto *weight = weights.as<const T>();
    for (int64_t row = begin; row < end; row += kGroup) {
        const int64_t rows = end - row < kGroup ? end - row : kGroup;
        const T *group = weight + row * stride;
        for (int64_t block = 0; block < plan.blocks; ++block) {
            const T *w = group + block * plan.block_k;
            const T *next = block + 1 < plan.blocks ? w + plan.block_k : row + rows < end ? group + kGroup * stride : w;
            for (int64_t tile = 0; tile < plan.tiles; ++tile) {
                with_count(plan.rows_of(tile), [&](auto m) {
                    constexpr int kM = decltype(m)::value;
                    const T *share = next + plan.block_k * tile / plan.tiles;
                    const auto *x = packed + plan.offset(block, tile);
                    VecF *sums = part + tile * plan.tile_rows * kGroup;
                    const auto multiply = plan.far          ? &multiply_block<kM, Ahead::kFar, T>
                                          : plan.tiles == 1 ? &multiply_block<kM, ahead_into_l1(kM), T>
                                                            : &multiply_block<kM, Ahead::kRows, T>;
                    multiply(plan, w, stride, rows, x, plan.k_of(block), sums, block == 0, share);
                });
            }
        }
        for (int64_t m = 0; m < plan.m; ++m) {
            write(part + m * kGroup, rows, epilogue, y_offsets[m], row);
        }
    }
}

// The same for at most kPackedMaxRows rows of x, with weights that are packed.
inline void multiply_packed_rows(const TensorView &weights, const Epilogue<float> &epilogue, const Plan<float> &plan,
                                 const float *packed, const int64_t *y_offsets, int64_t begin, int64_t end) {
    alignas(64) VecF part[kPackedMaxRows * kPackedGroup];
    alignas(64) float group[kPackedGroup * kPackedK];
    const int64_t stride = weights.stride(0);
    for (int64_t row = begin; row < end; row += kPackedGroup) {
        const int64_t rows = end - row < kPackedGroup ? end - row : kPackedGroup;
        const bool another = end - row >= 2 * kPackedGroup;
        const auto *first_block = weights.as<const float>() + row * stride;
        for (int64_t block = 0; block < plan.blocks; ++block) {
            const float *w = first_block + block * plan.block_k;
            const float *next = block + 1 < plan.blocks ? w + plan.block_k
                                : another               ? first_block + kPackedGroup * stride
                                                        : first_block;
            const int64_t k = plan.k_of(block), steps = ceil_div(k, kLanes);
            for (int64_t r = 0; r < rows; r += kPackedRows) {
                pack_weights(w + r * stride, stride, rows - r, k, group + r * steps * kLanes);
            }
            for (int64_t tile = 0; tile < plan.tiles; ++tile) {
                with_count(plan.rows_of(tile), [&](auto m) {
                    const float *x = packed + plan.offset(block, tile);
                    VecF *sums = part + tile * plan.tile_rows * kPackedGroup;
                    // Each tile prefetches its share of the next block.
                    const float *share = next + plan.block_k * tile / plan.tiles;
                    for (int64_t r = 0; r < rows; r += kPackedRows) {
                        multiply_packed<decltype(m)::value>(
                            group + r * steps * kLanes, x, steps, sums + r, block == 0,
                            {share + r * stride, stride, kPrefetchSteps * kLanes / plan.tiles});
                    }
                });
            }
        }
        for (int64_t m = 0; m < plan.m; ++m) {
            write(part + m * kPackedGroup, rows, epilogue, y_offsets[m], row);
        }
    }
}

// The same for all weights, counted in units of kUnit rows (each weight is rounded up to whole units), so that the
// columns of y are split evenly among threads even if a weight is narrow.
constexpr int64_t kUnit = 12; // a multiple of most tiles' rows

inline int64_t units(const TensorView &weight) {
    return ceil_div(weight.size(0), kUnit);
}

template <typename T>
void multiply_units(const linear::Args &a, const Plan<T> &plan, const typename Steps<T>::X *packed,
                    const int64_t *y_offsets, int64_t begin, int64_t end) {
    int64_t column = 0;
    for (int i = 0; i < a.weights && end > 0; ++i) {
        const TensorView &weight = a.weight[i];
        const int64_t count = units(weight), n = weight.size(0);
        if (begin < count) {
            const auto multiply = [&](auto *rows) {
                rows(weight, Epilogue<T>(a, i, column), plan, packed, y_offsets, begin * kUnit,
                     end < count ? end * kUnit : n);
            };
            if constexpr (kPacks<T>) {
                multiply(plan.packs() ? multiply_packed_rows : multiply_rows<T>);
            } else {
                multiply(multiply_rows<T>);
            }
        }
        begin = begin > count ? begin - count : 0;
        end -= count;
        column += n;
    }
}

template <typename T> void multiply(const linear::Args &a) {
    using X = typename Steps<T>::X;
    const int64_t k = a.x.size(-1);
    int64_t n = 0, all_units = 0;
    for (int i = 0; i < a.weights; ++i) {
        n += a.weight[i].size(0);
        all_units += units(a.weight[i]);
    }
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    constexpr int64_t kMost = kPacks<T> ? kPackedMaxRows : kMaxRows;
    const int64_t passes = ceil_div(rows.count(), kMost), pass_rows = ceil_div(rows.count(), passes);
    auto *packed = static_cast<X *>(cpu::scratch(Plan<T>(pass_rows, k).bytes()));
    for (int64_t begin = 0; begin < rows.count(); begin += pass_rows) {
        const int64_t left = rows.count() - begin;
        const Plan<T> plan(left < pass_rows ? left : pass_rows, k);
        int64_t y_offsets[kMost], m = 0;
        rows.visit(begin, begin + plan.m, [&](const int64_t *at) {
            pack_row(plan, m, a.x.as<const T>() + at[0], packed);
            y_offsets[m++] = at[1];
        });
        parallel_for(all_units, n * k * static_cast<int64_t>(sizeof(T)) * plan.tiles,
                     [&](int64_t first, int64_t last) { multiply_units<T>(a, plan, packed, y_offsets, first, last); });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear::INFINI_LEVEL::few_rows_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::few_rows_kernel,
                          [&](auto type) { multiply<decltype(type)>(args); });
}
