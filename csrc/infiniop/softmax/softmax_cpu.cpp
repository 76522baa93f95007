// The CPU kernel of softmax and log_softmax: one row at a time, in three passes: the maximum, the exponentials and
// their sum, the result. Limit: arithmetic, mostly the exponential, as in causal_softmax.
#include "dense_rows.h"
#include "level_types.h"
#include "softmax.h"
#include "softmax_row.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

// An array whose element type is known only at run time.
struct AnyFloats {
    void *data;
    infiniDtype_t dtype;
};

template <typename Lanes> void store_at(const AnyFloats &y, int64_t i, VecF value, Lanes lanes) {
    with_float_type(y.dtype, [&](auto type) { store_at(static_cast<decltype(type) *>(y.data), i, value, lanes); });
}

// Y: a pointer to floats, or AnyFloats.
template <typename X, typename Y> void log_softmax_row(const Y &y, const X *x, int64_t n) {
    const float top = largest(x, n);
    const float log_total = std::log(sum_of_exps(x, n, top, [](int64_t, VecF, auto) {}));
    for_each_vector(
        n, [&](int64_t i, auto lanes) { store_at(y, i, load_at(x, i, lanes) - splat(top) - splat(log_total), lanes); });
}

// Calls row(y, x, scratch) for all rows along the axis, with `scratch_bytes` bytes of scratch memory.
template <typename X, typename Y, typename Row>
void for_each_row(const softmax::Args &a, int64_t scratch_bytes, const Row &row) {
    const int axis = a.axis < 0 ? a.x.ndim + a.axis : a.axis;
    const TensorView y = moved_last(a.y, axis), x = moved_last(a.x, axis);
    const TensorView *const views[] = {&y, &x};
    const DenseRows<2> rows(views, 1);
    const int64_t bytes = x.numel() * static_cast<int64_t>(sizeof(X) + sizeof(Y));
    parallel_for_with_scratch(
        rows.count(), bytes, scratch_bytes + rows.scratch_bytes(),
        [&](int64_t begin, int64_t end, char *scratch) {
            rows.visit(begin, end, scratch + scratch_bytes,
                       [&](void *const *at) { row(static_cast<Y *>(at[0]), static_cast<const X *>(at[1]), scratch); });
        },
        kSoftmaxParallelBytes);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::softmax::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel, [&](auto x) {
        using X = decltype(x);
        const int64_t n = args.x.size(args.axis);
        if (!args.log) {
            return for_each_row<X, X>(args, exps_bytes<X>(n),
                                      [&](X *to, const X *from, void *exps) { softmax_row(to, from, exps, n); });
        }
        if (args.y.dtype == args.x.dtype) {
            return for_each_row<X, X>(args, 0, [&](X *to, const X *from, void *) { log_softmax_row(to, from, n); });
        }
        // Another output type is rare: one copy of the kernel serves all by dispatching at each vector.
        for_each_row<X, char>(
            args, 0, [&](char *to, const X *from, void *) { log_softmax_row(AnyFloats{to, args.y.dtype}, from, n); });
    });
}
