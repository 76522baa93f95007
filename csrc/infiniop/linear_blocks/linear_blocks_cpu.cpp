// The CPU kernel of linear_blocks: some rows of the weight are decoded in L1, then multiplied by all rows of x. Decoded
// elements are floats, and x was converted once; or bfloat16, multiplied in pairs, summed in linear's order. Limit:
// memory bandwidth of the blocks for few rows of x, if decoding keeps up; the multiply-add units beyond.
#include "bias.h"
#include "level_types.h"
#include "linear/steps.h"
#include "linear_blocks.h"
#include "parallel.h"
#include "row_iterator.h"
#include "scratch.h"
#include "vec.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_blocks::Args;
using linear_blocks::Kind;

// The register tile: up to kTileRows rows of x times weight_rows() decoded rows, one accumulator each.
constexpr int kTileRows = kManyRegisters ? 8 : 4;

constexpr int weight_rows(int m) {
    return m >= (kManyRegisters ? 7 : 4) ? 3 : 4;
}

constexpr int64_t kGroup = 12;     // decoded rows: a multiple of both numbers
constexpr int64_t kColumns = 512;  // decoded at a time: 24 KiB of floats a group; a multiple of every block's elements
constexpr int64_t kPassRows = 128; // rows of x that share a pass over the weight

// sums[m][r] += w[r] . x[m] over `columns` columns; sums in rows of kGroup. W: float or bf16.
template <int kR, int kM, typename W>
__attribute__((noinline)) void multiply_tile(const W *w, const typename Steps<W>::X *x, int64_t x_stride,
                                             int64_t columns, VecF *sums) {
    using S = Steps<W>;
    VecF part[kM][kR];
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) {
            part[m][r] = sums[m * kGroup + r];
        }
    }
    for (int64_t i = 0; i < columns; i += S::kStep) {
        decltype(S::load_weight(w)) row[kR];
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) {
            row[r] = S::load_weight(w + r * kColumns + i);
        }
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            const auto of_x = S::load_x(x + m * x_stride + i);
#pragma GCC unroll 4
            for (int r = 0; r < kR; ++r) {
                part[m][r] = S::multiply_add(row[r], of_x, part[m][r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) {
            sums[m * kGroup + r] = part[m][r];
        }
    }
}

// The same for `rows` decoded rows and a number of rows of x known at run time.
template <int kM = 1, typename W>
void multiply_group(int64_t m, int64_t rows, const W *w, const typename Steps<W>::X *x, int64_t x_stride,
                    int64_t columns, VecF *sums) {
    if constexpr (kM < kTileRows) {
        if (m > kM) {
            return multiply_group<kM + 1>(m, rows, w, x, x_stride, columns, sums);
        }
    }
    constexpr int kR = weight_rows(kM);
    int64_t r = 0;
    for (; r + kR <= rows; r += kR) {
        multiply_tile<kR, kM>(w + r * kColumns, x, x_stride, columns, sums + r);
    }
    for (; r < rows; ++r) {
        multiply_tile<1, kM>(w + r * kColumns, x, x_stride, columns, sums + r);
    }
}

// Decodes blocks to elements of type W, rounded once.
template <typename W> void decode_to(const Kind &kind, const uint8_t *from, int64_t columns, W *to) {
    if constexpr (std::is_same_v<W, float>) {
        kind.decode({}, {from, columns / kind.elements, to, false});
    } else if constexpr (kInPairs<W>) {
        kind.decode({}, {from, columns / kind.elements, to, true});
    } else {
        alignas(64) float part[kColumns];
        kind.decode({}, {from, columns / kind.elements, part, false});
        for (int64_t i = 0; i < columns; i += kLanes) {
            store(to + i, load(part + i));
        }
    }
}

// Decodes `columns` columns of `rows` rows from `row` on, and prefetches the same columns of the next group.
template <typename W>
void decode(const Args &a, int64_t row, int64_t rows, int64_t column, int64_t columns, bool far, W *to) {
    const Kind &kind = *a.kind;
    const int64_t stride = a.weight.stride(0), bytes = columns / kind.elements * kind.bytes;
    const uint8_t *from = a.weight.as<const uint8_t>() + row * stride + column / kind.elements * kind.bytes;
    for (int64_t r = 0; r < rows; ++r, from += stride, to += kColumns) {
        const uint8_t *const next = from + kGroup * stride;
        for (int64_t line = 0; line < bytes; line += 64) {
            prefetch_weight(next + line, far);
        }
        decode_to(kind, from, columns, to);
    }
}

// Adds the products of `rows` rows from `row` on with one or kDotX rows of x to the sums.
template <typename W>
void dot(const Args &a, int64_t row, int64_t rows, const typename Steps<W>::X *x, int m, bool far, VecF *sums) {
    using linear_blocks::kDotRows;
    const int64_t k = a.x.size(-1), stride = a.weight.stride(0);
    for (int64_t r = 0; r < rows;) {
        const int count = rows - r < kDotRows ? 1 : kDotRows;
        a.kind->dot({}, {a.weight.as<const uint8_t>() + (row + r) * stride, stride, k / a.kind->elements, count, m, x,
                         k, kInPairs<W>, reinterpret_cast<float *>(sums + r), kGroup, kGroup * stride, far});
        r += count;
    }
}

template <typename T> void write(const Args &a, T *y, int64_t row, int64_t rows, const VecF *sums_of_rows) {
    const Bias<T> bias(a.bias, row);
    for_each_vector(rows, [&](int64_t i, auto lanes) {
        const VecF value = sums([&](int lane) { return lane < lanes ? sums_of_rows[i + lane] : VecF{}; });
        store_at(y + row, i, bias.plus(value, i, lanes), lanes);
    });
}

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// T: the dtype of x.
template <typename T> void multiply(const Args &a) {
    using W = std::conditional_t<kInPairs<T>, T, float>;
    using X = typename Steps<W>::X;
    const int64_t k = a.x.size(-1), n = a.weight.size(0), groups = ceil_div(n, kGroup);
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    const int64_t pass_rows = rows.count() < kPassRows ? rows.count() : kPassRows;
    const int64_t work = n * k / a.kind->elements * a.kind->bytes * ceil_div(pass_rows, kTileRows);
    const int64_t threads = parallel_threads(groups, work);
    const int64_t x_bytes = ceil_div(pass_rows * k * static_cast<int64_t>(sizeof(X)), 64) * 64;
    const int64_t weight_bytes = kGroup * kColumns * static_cast<int64_t>(sizeof(W));
    const int64_t thread_bytes = weight_bytes + kGroup * pass_rows * static_cast<int64_t>(sizeof(VecF));
    auto *const scratch = static_cast<char *>(cpu::scratch(static_cast<size_t>(x_bytes + threads * thread_bytes)));
    auto *const x = reinterpret_cast<X *>(scratch);
    const bool far = weight_reading() == WeightReading::kOnePlace;
    for (int64_t begin = 0; begin < rows.count(); begin += pass_rows) {
        const int64_t left = rows.count() - begin, m = left < pass_rows ? left : pass_rows;
        int64_t y_offsets[kPassRows], count = 0;
        rows.visit(begin, begin + m, [&](const int64_t *at) {
            X *const to = x + count * k;
            const T *const from = a.x.as<const T>() + at[0];
            if constexpr (kInPairs<T>) {
                if (k > 0) { // an empty tensor may have no address
                    std::memcpy(to, from, sizeof(T) * static_cast<size_t>(k));
                }
            } else {
                for_each_vector(k, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
            }
            y_offsets[count++] = at[1];
        });
        parallel_for(groups, work, [&](int64_t first, int64_t last) {
            char *const own = scratch + x_bytes + (threads > 1 ? omp_get_thread_num() * thread_bytes : 0);
            auto *const decoded = reinterpret_cast<W *>(own);
            auto *const sums_of_rows = reinterpret_cast<VecF *>(own + weight_bytes);
            for (int64_t group = first; group < last; ++group) {
                const int64_t row = group * kGroup, in_group = n - row < kGroup ? n - row : kGroup;
                for (int64_t i = 0; i < m * kGroup; ++i) {
                    sums_of_rows[i] = VecF{};
                }
                if (m <= linear_blocks::kDotX) {
                    dot<W>(a, row, in_group, x, static_cast<int>(m), far, sums_of_rows);
                }
                for (int64_t column = m <= linear_blocks::kDotX ? k : 0; column < k; column += kColumns) {
                    const int64_t columns = k - column < kColumns ? k - column : kColumns;
                    decode(a, row, in_group, column, columns, far, decoded);
                    for (int64_t i = 0; i < m; i += kTileRows) {
                        multiply_group(m - i < kTileRows ? m - i : kTileRows, in_group, decoded, x + i * k + column, k,
                                       columns, sums_of_rows + i * kGroup);
                    }
                }
                for (int64_t i = 0; i < m; ++i) {
                    write(a, a.y.as<T>() + y_offsets[i], row, in_group, sums_of_rows + i * kGroup);
                }
            }
        });
    }
}

// Decodes rows of a weight; T: the dtype written.
template <typename T> void unpack(const linear_blocks::UnpackArgs &a) {
    const Kind &kind = *a.kind;
    const int64_t k = a.to.size(1), n = a.to.size(0);
    parallel_for(n, n * k * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const uint8_t *from = a.weight.as<const uint8_t>() + row * a.weight.stride(0);
            T *to = a.to.as<T>() + row * a.to.stride(0);
            for (int64_t column = 0; column < k; column += kColumns) {
                const int64_t columns = k - column < kColumns ? k - column : kColumns;
                decode_to(kind, from + column / kind.elements * kind.bytes, columns, to + column);
            }
        }
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_blocks::INFINI_LEVEL::multiply_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::multiply_kernel,
                          [&](auto x) { multiply<decltype(x)>(args); });
}

void infini::linear_blocks::INFINI_LEVEL::unpack_kernel(const UnpackArgs &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.to.dtype, [&](auto to) { unpack<decltype(to)>(args); });
}
