// The CPU kernel of linear_int8 and linear_int4: rows of the quantized weight are streamed once from memory, converted
// in registers, and multiplied by up to kMaxRows rows of x.
// Limit: memory bandwidth of the weight's bytes up to about 4 rows, the conversion and multiply-add units beyond.
#include "bias.h"
#include "formats.h"
#include "level_types.h"
#include "parallel.h"
#include "row_iterator.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

using quantized_linear::Args;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Up to kFewRows rows of x, the weight is read in kStreams distant parts at once, each in runs of F::run_bytes, and
// prefetched kAheadBytes ahead. Measured on one Zen 5 core with one row of bfloat16, 4096 -> 14336, as shares of the
// bandwidth of a dot product: int8 0.98, int4 0.90; without prefetching 0.79 and 0.48, in 8 streams 0.55 and 0.35, with
// adjacent rows of 4 KiB 0.5. With more rows of x the multiplications take longer than memory, and the next group is
// prefetched instead.
// Where weight_reading() is kOnePlace all of this goes into L2, and only one row of x is multiplied in streams. On one
// Zen 4 core, 2048 -> 11264, one row: int8 1.05 instead of 0.85, int4 0.81 instead of 0.76.
constexpr int kFewRows = kManyRegisters ? 4 : 2;
constexpr int kStreams = 4;
constexpr int64_t kAheadBytes = 2048, kFarAheadBytes = 4096;

constexpr int64_t kMaxRows = 32; // rows of x that share one pass over the weight
constexpr int64_t kGroup = 16;   // weight rows per stream that are multiplied by all these rows of x, from L2
// k is split into blocks such that a tile's rows of x stay in the L1 cache.
constexpr int64_t kTileBytes = 32 * 1024;

// A tile: a block of k of some rows of x and of the weight rows `row`, `row` + row_step, ...
template <typename F> struct Tile {
    const Args &args;
    const typename F::Pattern &pattern;
    const typename F::X *x; // kStep elements of each row, then the next kStep
    const float *x_sums;    // per row of x, the sum of each group
    int64_t x_sums_stride;
    int64_t row, row_step;
    int64_t first_k, k;
    VecF *sums; // for row m of x and weight row r: sums[(m * streams + r) * kGroup]
    int64_t streams;
    const uint8_t *next; // prefetched with the first weight row: the tile's share of the next rows
    int64_t tiles;       // the number of shares
    bool far;            // whether prefetches go into L2
};

template <int kM> INFINI_ALWAYS_INLINE void copy(const VecF (&from)[kM], VecF (&to)[kM]) {
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
        to[m] = from[m];
    }
}

// Adds the zeros' part of the sums: zeros @ the sums of x over each group. Unused at a level that leaves float to
// another.
[[maybe_unused]] __attribute__((noinline)) void add_zeros(const Args &a, int64_t row, const float *x_sums,
                                                          int64_t x_sums_stride, int rows, VecF *sums) {
    with_float_type(a.zeros.dtype, [&](auto type) {
        const auto *zeros = a.zeros.as<const decltype(type)>() + row * a.zeros.stride(0);
        prefetch_rows(zeros, a.zeros.size(1), a.zeros.stride(0));
        for_each_vector(a.zeros.size(1), [&](int64_t i, auto lanes) {
            const VecF zero = load_at(zeros, i, lanes);
            for (int m = 0; m < rows; ++m) {
                sums[m] = fma(zero, load(x_sums + m * x_sums_stride + i), sums[m]);
            }
        });
    });
}

template <typename F, int kR, int kM> __attribute__((noinline)) void multiply_tile(const Tile<F> &t) {
    using X = typename F::X;
    typename F::Scales scales[kR];
    VecF sums[kR][kM];
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
        const int64_t row = t.row + r * t.row_step;
        scales[r].fill(t.args, t.pattern, row, t.first_k, t.k);
        VecF start[kM] = {};
        if (t.first_k == 0 && t.args.zeros.dtype != INFINI_DTYPE_INVALID) {
            add_zeros(t.args, row, t.x_sums, t.x_sums_stride, kM, start);
        }
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            sums[r][m] = t.first_k == 0 ? start[m] : t.sums[(m * t.streams + r) * kGroup];
        }
    }
    const TensorView &view = t.args.weight;
    const int64_t stride = view.stride(0) * t.row_step;
    const uint8_t *const weight = view.as<const uint8_t>() + t.row * view.stride(0) + F::bytes(t.first_k);
    const X *x = t.x;
    int64_t k = 0;
    if constexpr (kR == kStreams) {
        constexpr int kRun = static_cast<int>(F::run_bytes(kM) / F::bytes(F::kStep));
        const int64_t ahead = t.far ? kFarAheadBytes : kAheadBytes;
        for (; k + kRun * F::kStep <= t.k; k += kRun * F::kStep, x += kRun * kM * F::kStep) {
#pragma GCC unroll 4
            for (int r = 0; r < kR; ++r) {
                VecF row_sums[1][kM];
                copy(sums[r], row_sums[0]);
#pragma GCC unroll 32
                for (int s = 0; s < kRun; ++s) {
                    const int64_t at = k + s * F::kStep;
                    if (F::bytes(s * F::kStep) % 64 == 0) {
                        prefetch_weight(weight + r * stride + F::bytes(at) + ahead, t.far);
                    }
                    const typename F::Weights weights[1] = {
                        F::load_step(weight + r * stride + F::bytes(at), t.pattern, scales[r], at)};
                    F::add(weights, x + s * kM * F::kStep, row_sums);
                }
                copy(row_sums[0], sums[r]);
            }
        }
    }
    const uint8_t *next = t.next;
    const int64_t next_step = F::bytes(F::kStep) / t.tiles;
    const auto step = [&](auto... n) __attribute__((always_inline)) {
        if constexpr (kR != kStreams) {
#pragma GCC unroll 4
            for (int r = 0; r < kR; ++r) {
                prefetch_weight(next + r * stride, t.far);
            }
            next += next_step;
        }
        constexpr int kHeld = kR == kStreams ? 1 : kR; // weight rows in registers at once
#pragma GCC unroll 4
        for (int r = 0; r < kR; r += kHeld) {
            typename F::Weights weights[kHeld];
            VecF row_sums[kHeld][kM];
#pragma GCC unroll 4
            for (int i = 0; i < kHeld; ++i) {
                weights[i] = F::load_step(weight + (r + i) * stride + F::bytes(k), t.pattern, scales[r + i], k, n...);
                copy(sums[r + i], row_sums[i]);
            }
            F::add(weights, x, row_sums);
#pragma GCC unroll 4
            for (int i = 0; i < kHeld; ++i) {
                copy(row_sums[i], sums[r + i]);
            }
        }
        k += F::kStep;
        x += kM * F::kStep;
    };
    while (k + F::kStep <= t.k) {
        step();
    }
    if (k < t.k) {
        step(static_cast<int>(t.k - k));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            t.sums[(m * t.streams + r) * kGroup] = sums[r][m];
        }
    }
}

// The same with a number of rows of x known at run time.
template <typename F, int kR, int kMax, int kM = 1> void multiply_tile(int64_t m, const Tile<F> &t) {
    if constexpr (kM < kMax) {
        if (m > kM) {
            return multiply_tile<F, kR, kMax, kM + 1>(m, t);
        }
    }
    multiply_tile<F, kR, kM>(t);
}

// How m rows of x are split into tiles, and k into blocks: evenly, so that no part is much smaller than the others.
template <typename F> struct Plan {
    int64_t m, k, tiles, tile_rows, streams, blocks, block_k;
    bool far = weight_reading() == WeightReading::kOnePlace;

    Plan(int64_t m_, int64_t k_) : m(m_), k(k_) {
        tiles = ceil_div(m, F::kTileRows);
        tile_rows = ceil_div(m, tiles);
        streams = m <= (far ? 1 : kFewRows) ? kStreams : F::kRows;
        int64_t fits = kTileBytes / static_cast<int64_t>(sizeof(typename F::X)) / tile_rows;
        fits = fits < F::kLongest ? fits : F::kLongest;
        // A multiple of 128, the longest step and group, so that no step or group is split.
        block_k = k > 0 ? ceil_div(ceil_div(k, ceil_div(k, fits)), 128) * 128 : 128;
        block_k = block_k < F::kLongest ? block_k : F::kLongest;
        blocks = k > 0 ? ceil_div(k, block_k) : 1;
    }
    int64_t rows_of(int64_t tile) const { return tile + 1 < tiles ? tile_rows : m - tile * tile_rows; }
    int64_t k_of(int64_t block) const { return block + 1 < blocks ? block_k : k - block * block_k; }
    // Where the packed x of a block and a tile starts.
    int64_t offset(int64_t block, int64_t tile) const {
        return block * block_k * m + tile * tile_rows * (ceil_div(k_of(block), F::kStep) * F::kStep);
    }
    size_t words() const { return static_cast<size_t>((k + F::kStep) * m); }
};

// Packs one row of x for its tile, padded with zeros beyond k.
template <typename F, typename T> void pack_row(const Plan<F> &plan, int64_t row, const T *x, typename F::X *packed) {
    const int64_t tile = row / plan.tile_rows, stride = plan.rows_of(tile) * F::kStep;
    for (int64_t block = 0; block < plan.blocks; ++block) {
        auto *to = packed + plan.offset(block, tile) + row % plan.tile_rows * F::kStep;
        const int64_t k = plan.k_of(block);
        for (int64_t i = 0; i < k; i += F::kStep, to += stride) {
            F::pack_step(x + block * plan.block_k + i, static_cast<int>(k - i < F::kStep ? k - i : F::kStep), to);
        }
    }
}

// Writes the sum of each group of a row of x, padded with zeros to a whole vector.
template <typename T> void sum_groups(const Args &a, const T *x, int64_t count, float *sums) {
    const int64_t groups = a.zeros.size(1);
    for (int64_t g = 0; g < count; ++g) {
        const int64_t group = g < groups ? a.x.size(-1) / groups : 0;
        VecF total{};
        for (int64_t i = 0; i < group; i += kLanes) {
            total += load(x + g * group + i);
        }
        sums[g] = sum(total);
    }
}

template <typename T> struct RowOutput {
    const Args &args;
    const int64_t *offsets; // one per row of y

    // Reduces the lanes of `sums` to y, for row m of x and `count` weight rows from `row` on.
    template <typename F> void write(int64_t m, int64_t row, int64_t count, const VecF *lane_sums) const {
        T *y = args.y.as<T>() + offsets[m] + row;
        const Bias<T> bias(args.bias, row);
        for_each_vector(count, [&](int64_t i, auto lanes) {
            VecF value = sums([&](int lane) { return lane < lanes ? lane_sums[i + lane] : VecF{}; });
            if constexpr (F::kScaleRows) {
                with_float_type(args.scales.dtype, [&](auto type) {
                    value = value * load_at(args.scales.as<const decltype(type)>() + row, i, lanes);
                });
            }
            store_at(y, i, bias.plus(value, i, lanes), lanes);
        });
    }
};

// Computes y of at most kMaxRows rows of x, for weight rows begin .. end-1 in kR streams. Returns the end of the rows
// that divide evenly among the streams.
template <typename F, int kR, typename T>
int64_t multiply_rows(const Args &a, const typename F::Pattern &pattern, const Plan<F> &plan,
                      const typename F::X *packed, const float *x_sums, int64_t x_sums_stride,
                      const RowOutput<T> &output, int64_t begin, int64_t end) {
    constexpr int64_t kMax = kR == kStreams ? kFewRows : kMaxRows;
    constexpr int kMaxTile = kR == kStreams ? kFewRows : F::kTileRows;
    alignas(64) VecF part[kMax * kR * kGroup];
    const int64_t length = (end - begin) / kR;
    for (int64_t first = 0; first < length; first += kGroup) {
        const int64_t rows = length - first < kGroup ? length - first : kGroup;
        for (int64_t block = 0; block < plan.blocks; ++block) {
            const bool last = block + 1 == plan.blocks;
            const uint8_t *const next = a.weight.as<const uint8_t>() +
                                        (begin + first + (last ? kGroup : 0)) * a.weight.stride(0) +
                                        (last ? 0 : F::bytes((block + 1) * plan.block_k));
            for (int64_t tile = 0; tile < plan.tiles; ++tile) {
                const int64_t row_of_x = tile * plan.tile_rows, share = F::bytes(plan.block_k) * tile / plan.tiles;
                for (int64_t i = 0; i < rows; ++i) {
                    multiply_tile<F, kR, kMaxTile>(plan.rows_of(tile),
                                                   {a, pattern, packed + plan.offset(block, tile),
                                                    x_sums + row_of_x * x_sums_stride, x_sums_stride, begin + first + i,
                                                    length, block * plan.block_k, plan.k_of(block),
                                                    part + row_of_x * kR * kGroup + i, kR,
                                                    next + i * a.weight.stride(0) + share, plan.tiles, plan.far});
                }
            }
        }
        for (int64_t m = 0; m < plan.m; ++m) {
            for (int64_t r = 0; r < kR; ++r) {
                output.template write<F>(m, begin + r * length + first, rows, part + (m * kR + r) * kGroup);
            }
        }
    }
    return begin + length * kR;
}

// T: the type of x.
template <typename F, typename T> void multiply(const Args &a) {
    using X = typename F::X;
    const int64_t k = a.x.size(-1), n = a.weight.size(0);
    const bool zeros = a.zeros.dtype != INFINI_DTYPE_INVALID;
    const int64_t groups = zeros ? ceil_div(a.zeros.size(1), kLanes) * kLanes : 0;
    const typename F::Pattern pattern(a);
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    const int64_t passes = ceil_div(rows.count(), kMaxRows), pass_rows = ceil_div(rows.count(), passes);
    const size_t x_bytes = (Plan<F>(pass_rows, k).words() * sizeof(X) + 63) / 64 * 64;
    auto *packed = static_cast<X *>(cpu::scratch(x_bytes + sizeof(float) * static_cast<size_t>(groups * pass_rows)));
    auto *x_sums = reinterpret_cast<float *>(reinterpret_cast<char *>(packed) + x_bytes);
    for (int64_t begin = 0; begin < rows.count(); begin += pass_rows) {
        const int64_t left = rows.count() - begin;
        const Plan<F> plan(left < pass_rows ? left : pass_rows, k);
        int64_t y_offsets[kMaxRows], m = 0;
        rows.visit(begin, begin + plan.m, [&](const int64_t *at) {
            const T *x = a.x.as<const T>() + at[0];
            pack_row(plan, m, x, packed);
            if (zeros) {
                sum_groups(a, x, groups, x_sums + m * groups);
            }
            y_offsets[m++] = at[1];
        });
        const RowOutput<T> output{a, y_offsets};
        parallel_for(
            ceil_div(n, kGroup), n * F::bytes(k) * ceil_div(plan.m, kFewRows), [&](int64_t first, int64_t last) {
                int64_t row = first * kGroup;
                const int64_t end = last * kGroup < n ? last * kGroup : n;
                if (plan.streams == kStreams) {
                    row = multiply_rows<F, kStreams>(a, pattern, plan, packed, x_sums, groups, output, row, end);
                } else if constexpr (F::kRows > 1) {
                    row = multiply_rows<F, F::kRows>(a, pattern, plan, packed, x_sums, groups, output, row, end);
                }
                multiply_rows<F, 1>(a, pattern, plan, packed, x_sums, groups, output, row, end);
            });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::quantized_linear::INFINI_LEVEL::int8_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::int8_kernel, [&](auto x) {
        using T = decltype(x);
        multiply<Int8<typename FactorOf<T>::X>, T>(args);
    });
}

void infini::quantized_linear::INFINI_LEVEL::int4_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::int4_kernel, [&](auto x) {
        using T = decltype(x);
        multiply<Int4<typename FactorOf<T>::X>, T>(args);
    });
}
