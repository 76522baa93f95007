// The CPU kernel of rms_norm and add_rms_norm: one row at a time, in two passes (the second from L1). Limit: memory
// bandwidth, for bf16 2 bytes read and 2 written per element, and as much again for the residual.
#include "level_types.h"
#include "parallel.h"
#include "rms_norm.h"
#include "row_iterator.h"
#include "streaming_stores.h"
#include "sum_over.h"
#include "vec.h"

#include <cmath>
#include <type_traits>

namespace infini::INFINI_LEVEL {
namespace {

using rms_norm::Rounding;

template <typename T> float sum_of_squares(const T *x, int64_t n) {
    return sum_over(n, [&](int64_t i, auto lanes, VecF squares) {
        const VecF v = load_at(x, i, lanes);
        return fma(v, v, squares);
    });
}

// h = round(x + residual); returns the sum of its squares.
template <typename T> float add_row(T *h, const T *x, const T *residual, int64_t n) {
    return sum_over(n, [&](int64_t i, auto lanes, VecF squares) {
        const VecF v = round_to<T>(load_at(x, i, lanes) + load_at(residual, i, lanes));
        store_at(h, i, v, lanes);
        return fma(v, v, squares);
    });
}

// The sum of the squares of x + residual, not rounded.
template <typename T> float wide_sum_of_squares(const T *x, const T *residual, int64_t n) {
    return sum_over(n, [&](int64_t i, auto lanes, VecF squares) {
        const VecF v = load_at(x, i, lanes) + load_at(residual, i, lanes);
        return fma(v, v, squares);
    });
}

// The second pass: y [n] from the row v [n], a function of an index and lanes. With kLarge, y is streamed and the next
// rows are prefetched, because this pass reads nothing from memory.
template <bool kLarge, Rounding kRounding, typename T, typename W, typename Y, typename Row>
void scale_row(Y *y, const Row &v, const W *w, int64_t n, float scale, const T *next_x, const T *next_residual) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        if constexpr (kLarge) {
            __builtin_prefetch(next_x + i);
            __builtin_prefetch(next_residual + i);
        }
        VecF value = v(i, lanes) * splat(scale);
        if constexpr (kRounding == Rounding::kLlama) {
            value = round_to<T>(value) * load_at(w, i, lanes);
        } else if constexpr (kRounding == Rounding::kGemma) {
            value = value * (splat(1.0f) + load_at(w, i, lanes));
        } else {
            value = value * load_at(w, i, lanes);
        }
        store_or_stream_at<kLarge>(y, i, value, lanes);
    });
}

template <typename T, typename W, typename Y, Rounding kRounding> void norm_rows(const rms_norm::Args &a) {
    const int64_t n = a.x.size(-1);
    const auto eps = static_cast<float>(a.eps);
    const float inverse_n = 1.0f / static_cast<float>(n);
    const auto *w = a.weight.as<const W>();
    const auto *x = a.x.as<const T>();
    auto *y = a.y.as<Y>();
    const bool with_residual = a.h.dtype != INFINI_DTYPE_INVALID;
    [[maybe_unused]] const bool wide = with_residual && is_wide(a.rounding); // float is as wide as its sum
    // Without a residual, other views take the places of h and residual, so that one iterator serves both ops.
    const TensorView &h_view = with_residual ? a.h : a.x, &r_view = with_residual ? a.residual : a.x;
    const auto *residual = r_view.as<const T>();
    auto *h = h_view.as<T>();

    const TensorView *const views[] = {&a.x, &a.y, &h_view, &r_view};
    const RowIterator<4> rows(views);
    const int64_t bytes = a.x.numel() * static_cast<int64_t>(sizeof(T) + sizeof(Y)) * (with_residual ? 2 : 1);
    const int64_t x_step = a.x.ndim > 1 ? a.x.stride(-2) : 0, residual_step = r_view.ndim > 1 ? r_view.stride(-2) : 0;
    const bool large = worth_streaming(a.y.data, a.y.numel() * static_cast<int64_t>(sizeof(Y)));
    parallel_for(rows.count(), bytes, [&](int64_t begin, int64_t end) {
        rows.visit(begin, end, [&](const int64_t *at) {
            const T *row = x + at[0];
            const T *next_x = row + x_step, *next_residual = residual + at[3] + residual_step;
            const T *residual_row = residual + at[3];
            T *h_row = h + at[2];
            Y *y_row = y + at[1];
            const auto finish = [&](float squares, const auto &v) {
                const float scale = 1.0f / std::sqrt(squares * inverse_n + eps);
                if (large && stream_aligned(y_row)) {
                    scale_row<true, kRounding>(y_row, v, w, n, scale, next_x, next_residual);
                } else {
                    scale_row<false, kRounding>(y_row, v, w, n, scale, next_x, next_residual);
                }
            };
            if constexpr (sizeof(T) == 2) {
                if (wide) { // both passes add, because h, which may be x or residual, has the rounded sum alone
                    return finish(wide_sum_of_squares(row, residual_row, n), [=](int64_t i, auto lanes) {
                        const VecF v = load_at(row, i, lanes) + load_at(residual_row, i, lanes);
                        store_at(h_row, i, v, lanes);
                        return v;
                    });
                }
            }
            const float squares = with_residual ? add_row(h_row, row, residual_row, n) : sum_of_squares(row, n);
            row = with_residual ? h_row : row;
            finish(squares, [row](int64_t i, auto lanes) { return load_at(row, i, lanes); });
        });
        stream_fence();
    });
}

// float64, for use as a reference: the same formulas in double.
void norm_rows_double(const rms_norm::Args &a) {
    const int64_t n = a.x.size(-1);
    const bool with_residual = a.h.dtype != INFINI_DTYPE_INVALID;
    const TensorView &h_view = with_residual ? a.h : a.x, &r_view = with_residual ? a.residual : a.x;
    const auto *w = a.weight.as<const double>();
    const double offset = order_of(a.rounding) == Rounding::kGemma ? 1 : 0;
    const TensorView *const views[] = {&a.x, &a.y, &h_view, &r_view};
    const RowIterator<4> rows(views);
    parallel_for(rows.count(), a.x.numel() * 16, [&](int64_t begin, int64_t end) {
        rows.visit(begin, end, [&](const int64_t *at) {
            const double *row = a.x.as<const double>() + at[0];
            if (with_residual) {
                const double *residual = r_view.as<const double>() + at[3];
                double *h = h_view.as<double>() + at[2];
                for (int64_t i = 0; i < n; ++i) {
                    h[i] = row[i] + residual[i];
                }
                row = h;
            }
            double squares = 0;
            for (int64_t i = 0; i < n; ++i) {
                squares += row[i] * row[i];
            }
            const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + a.eps);
            double *y = a.y.as<double>() + at[1];
            for (int64_t i = 0; i < n; ++i) {
                y[i] = row[i] * scale * (offset + w[i]);
            }
        });
    });
}

template <typename T, typename W> void norm_rows(const rms_norm::Args &a) {
    switch (order_of(a.rounding)) {
    case Rounding::kLlama:
        return norm_rows<T, W, W, Rounding::kLlama>(a); // the output has the dtype of the weight, which is wider
    case Rounding::kGemma:
        return norm_rows<T, W, T, Rounding::kGemma>(a);
    default:
        return norm_rows<T, W, T, Rounding::kOnce>(a);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::rms_norm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    if (!kOnlyBf16 && args.x.dtype == INFINI_DTYPE_F64) {
        return norm_rows_double(args);
    }
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel, [&](auto x) {
        using T = decltype(x);
        if (args.weight.dtype == args.x.dtype) {
            norm_rows<T, T>(args);
        } else if (args.weight.dtype == INFINI_DTYPE_F32) {
            norm_rows<T, float>(args);
        } else if constexpr (std::is_same_v<T, bf16>) {
            norm_rows<bf16, f16, bf16, Rounding::kOnce>(args);
        } else if constexpr (std::is_same_v<T, f16>) {
            norm_rows<f16, bf16, f16, Rounding::kOnce>(args);
        }
    });
}
