// The CPU kernel of rms_norm and add_rms_norm: one row at a time, two passes over it (the second finds it in L1).
// Limit: memory bandwidth, 2 bytes read and written for each element and half as much again for the residual.
#include "parallel.h"
#include "rms_norm.h"
#include "rows.h"
#include "vec.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

using rms_norm::Rounding;

// Four accumulators hide the latency of the additions; their order is fixed by the row's length alone.
struct SumOfSquares {
    VecF part[4] = {};

    void add(VecF v, int64_t i) {
        VecF &p = part[(i / kLanes) & 3];
        p = fma(v, v, p);
    }
    float total() const { return sum((part[0] + part[1]) + (part[2] + part[3])); }
};

// y [n] from the row v [n], whose values are v(i): the second pass.
template <Rounding kRounding, typename T, typename W, typename Y>
void scale_row(Y *y, const T *v, const W *w, int64_t n, float scale) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        VecF value = load_at(v, i, lanes) * splat(scale);
        if constexpr (kRounding == Rounding::kLlama) {
            value = round_to<T>(value) * load_at(w, i, lanes);
        } else if constexpr (kRounding == Rounding::kGemma) {
            value = value * (splat(1.0f) + load_at(w, i, lanes));
        } else {
            value = value * load_at(w, i, lanes);
        }
        store_at(y, i, value, lanes);
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
    // Without a residual its views stand in for themselves, so that one walk serves both ops.
    const TensorView &h_view = with_residual ? a.h : a.x, &r_view = with_residual ? a.residual : a.x;
    const auto *residual = r_view.as<const T>();
    auto *h = h_view.as<T>();

    const TensorView *const views[] = {&a.x, &a.y, &h_view, &r_view};
    const Rows<4> rows(views);
    const int64_t bytes = a.x.numel() * static_cast<int64_t>(sizeof(T) + sizeof(Y)) * (with_residual ? 2 : 1);
    parallel_for(rows.count(), bytes, [&](int64_t begin, int64_t end) {
        rows.visit(begin, end, [&](const int64_t *at) {
            const T *row = x + at[0];
            SumOfSquares squares;
            if (with_residual) {
                const T *r = residual + at[3];
                T *h_row = h + at[2];
                for_each_vector(n, [&](int64_t i, auto lanes) {
                    const VecF v = round_to<T>(load_at(row, i, lanes) + load_at(r, i, lanes));
                    store_at(h_row, i, v, lanes);
                    squares.add(v, i);
                });
                row = h_row;
            } else {
                for_each_vector(n, [&](int64_t i, auto lanes) { squares.add(load_at(row, i, lanes), i); });
            }
            const float scale = 1.0f / std::sqrt(squares.total() * inverse_n + eps);
            scale_row<kRounding>(y + at[1], row, w, n, scale);
        });
    });
}

template <typename T, typename W> void norm_rows(const rms_norm::Args &a) {
    switch (a.rounding) {
    case Rounding::kOnce:
        return norm_rows<T, W, T, Rounding::kOnce>(a);
    case Rounding::kLlama:
        return norm_rows<T, W, W, Rounding::kLlama>(a); // the output has the wider dtype: that of the weight
    case Rounding::kGemma:
        return norm_rows<T, W, T, Rounding::kGemma>(a);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::rms_norm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.x.dtype, [&](auto x) {
        using T = decltype(x);
        if (args.weight.dtype == args.x.dtype) {
            norm_rows<T, T>(args);
        } else {
            norm_rows<T, float>(args);
        }
    });
}
