// The CPU kernel of lp_norm: one row at a time, in two passes (the second from a cache). Limit: memory bandwidth for p
// = 1 and 2; for other p arithmetic, one or two multiplications per bit of p.
#include "dense_rows.h"
#include "lp_norm.h"
#include "level_types.h"
#include "parallel.h"
#include "sum_over.h"
#include "vec.h"

#include <cmath>
#include <limits>

namespace infini::INFINI_LEVEL {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline VecF magnitude(VecF v) {
    return (VecF)((VecU)v & 0x7fffffffu);
}

// The largest |x|, ignoring NaN.
template <typename T> float largest_magnitude(const T *x, int64_t n) {
    VecF highest = {};
    for_each_vector(n, [&](int64_t i, auto lanes) { highest = max(magnitude(load_at(x, i, lanes)), highest); });
    return max(highest);
}

// v^p for p >= 1.
inline VecF power(VecF v, int64_t p) {
    VecF result = splat(1.0f);
    for (;; v = v * v) {
        if (p & 1) {
            result = result * v;
        }
        p >>= 1;
        if (p == 0) {
            return result;
        }
    }
}

// (sum |x / unit|^p)^(1 / p); without kUnits the unit is 1.
template <bool kUnits, typename T> float norm(const T *x, int64_t n, int64_t p, float unit) {
    const auto at = [&](int64_t i, auto lanes) {
        const VecF v = load_at(x, i, lanes);
        return kUnits ? v / splat(unit) : v;
    };
    if (p == 1) {
        return sum_over(n, [&](int64_t i, auto lanes, VecF s) { return s + magnitude(at(i, lanes)); });
    }
    if (p == 2) {
        return std::sqrt(sum_over(n, [&](int64_t i, auto lanes, VecF s) {
            const VecF v = at(i, lanes);
            return fma(v, v, s);
        }));
    }
    const float sum = sum_over(n, [&](int64_t i, auto lanes, VecF s) { return s + power(magnitude(at(i, lanes)), p); });
    return static_cast<float>(std::pow(static_cast<double>(sum), 1.0 / static_cast<double>(p)));
}

template <typename T> void norm_row(T *y, const T *x, int64_t n, int64_t p, float eps) {
    if (p <= 2) {
        const float length = norm<false>(x, n, p, 1.0f);
        // The length is exact unless the squares (or their sum) overflowed or lost precision by underflow. It may be
        // NaN.
        if (!(length < 1e-15f || length == kInfinity)) {
            const VecF denominator = splat(length + eps);
            for_each_vector(n,
                            [&](int64_t i, auto lanes) { store_at(y, i, load_at(x, i, lanes) / denominator, lanes); });
            return;
        }
    }
    // Powers relative to the largest |x| do not overflow and do not all underflow.
    const float top = largest_magnitude(x, n), unit = top > 0 && top < kInfinity ? top : 1.0f;
    const VecF denominator = splat(norm<true>(x, n, p, unit) + eps / unit);
    for_each_vector(
        n, [&](int64_t i, auto lanes) { store_at(y, i, load_at(x, i, lanes) / splat(unit) / denominator, lanes); });
}

template <typename T> void norm_rows(const lp_norm::Args &a) {
    const int axis = a.axis < 0 ? a.x.ndim + a.axis : a.axis;
    const TensorView y = moved_last(a.y, axis), x = moved_last(a.x, axis);
    const TensorView *const views[] = {&y, &x};
    const DenseRows<2> rows(views, 1);
    const int64_t n = x.size(-1), bytes = 2 * x.numel() * static_cast<int64_t>(sizeof(T));
    const auto eps = static_cast<float>(a.eps);
    parallel_for_with_scratch(rows.count(), bytes, rows.scratch_bytes(),
                              [&](int64_t begin, int64_t end, char *scratch) {
                                  rows.visit(begin, end, scratch, [&](void *const *at) {
                                      norm_row(static_cast<T *>(at[0]), static_cast<const T *>(at[1]), n, a.p, eps);
                                  });
                              });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::lp_norm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                          [&](auto x) { norm_rows<decltype(x)>(args); });
}
