// The CPU kernel of layer_norm: one row at a time, in three passes over it: the mean, the variance about it, the
// outputs; only the first reads from memory. Limit: memory bandwidth, one row read and two written.
#include "dense_rows.h"
#include "layer_norm.h"
#include "parallel.h"
#include "sum_over.h"
#include "vec.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

template <typename T>
void norm_row(T *output, T *standardization, T *deviation, const T *x, const T *w, const T *b, int64_t n, float eps) {
    const auto count = static_cast<float>(n);
    const float mean =
        sum_over(n, [&](int64_t i, auto lanes, VecF total) { return total + load_at(x, i, lanes); }) / count;
    const float squares = sum_over(n, [&](int64_t i, auto lanes, VecF total) {
        const VecF difference = first_lanes(load_at(x, i, lanes) - splat(mean), lanes, 0.0f);
        return fma(difference, difference, total);
    });
    const float sigma = std::sqrt(squares / count + eps);
    store(deviation, splat(sigma), 1);
    const VecF scale = splat(1.0f / sigma);
    const auto write = [&](const auto &shifted) {
        for_each_vector(n, [&](int64_t i, auto lanes) {
            const VecF z = (load_at(x, i, lanes) - splat(mean)) * scale;
            const VecF y = shifted(z * load_at(w, i, lanes), i, lanes);
            store_at(standardization, i, z, lanes);
            store_at(output, i, y, lanes);
        });
    };
    if (b != nullptr) {
        write([&](VecF y, int64_t i, auto lanes) { return y + load_at(b, i, lanes); });
    } else {
        write([](VecF y, int64_t, auto) { return y; });
    }
}

template <typename T> void norm_rows(const layer_norm::Args &a) {
    const int64_t n = a.input.size(-1);
    const auto eps = static_cast<float>(a.eps);
    const bool with_bias = a.bias.dtype != INFINI_DTYPE_INVALID;
    TensorView deviation = a.deviation; // [..., 1]
    deviation.shape[deviation.ndim] = deviation.strides[deviation.ndim] = 1;
    ++deviation.ndim;
    const TensorView *const views[] = {&a.output, &a.standardization, &deviation, &a.input};
    const DenseRows<4> rows(views, 3);
    const TensorView *const parameters[] = {&a.weight, with_bias ? &a.bias : &a.weight};
    const DenseRows<2> parameter_rows(parameters, 0);
    const int64_t bytes = 3 * a.input.numel() * static_cast<int64_t>(sizeof(T));
    const int64_t parameter_bytes = (parameter_rows.scratch_bytes() + 63) / 64 * 64;
    parallel_for_with_scratch(
        rows.count(), bytes, parameter_bytes + rows.scratch_bytes(), [&](int64_t begin, int64_t end, char *scratch) {
            parameter_rows.visit(0, 1, scratch, [&](void *const *parameter) {
                const T *w = static_cast<const T *>(parameter[0]);
                const T *b = with_bias ? static_cast<const T *>(parameter[1]) : nullptr;
                rows.visit(begin, end, scratch + parameter_bytes, [&](void *const *at) {
                    norm_row(static_cast<T *>(at[0]), static_cast<T *>(at[1]), static_cast<T *>(at[2]),
                             static_cast<const T *>(at[3]), w, b, n, eps);
                });
            });
        });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::layer_norm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.input.dtype, [&](auto x) { norm_rows<decltype(x)>(args); });
}
