// The CPU kernel of layer_norm: one row at a time, in three passes over it: the mean, the variance about it, the
// outputs; only the first reads from memory. Limit: memory bandwidth, one row read and two written.
#include "dense_rows.h"
#include "layer_norm.h"
#include "parallel.h"
#include "stream.h"
#include "sum_over.h"
#include "vec.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

// From this many bytes of both outputs on, streaming stores pay: with the input they no longer fit into the 32 MiB of
// last-level cache of the machine measured (two Zen 5 cores). float32 rows of 4096 on one core: 8 MiB of outputs in
// 0.19 ms with ordinary stores and 0.22 with streaming ones, 16 MiB in 0.70 and 0.45.
constexpr int64_t kLayerNormStreamBytes = 16 << 20;

// y and z [n] from x [n]: the last pass. If kStream, they are streamed, and since this pass reads nothing from memory,
// the row that comes next is asked for meanwhile.
template <bool kStream, typename T>
void write_row(T *y, T *z, const T *x, const T *w, const T *b, int64_t n, float mean, float scale, const T *next) {
    const auto write = [&](const auto &shifted) {
        for_each_vector(n, [&](int64_t i, auto lanes) {
            if constexpr (kStream) {
                __builtin_prefetch(next + i);
            }
            const VecF standard = (load_at(x, i, lanes) - splat(mean)) * splat(scale);
            const VecF value = shifted(standard * load_at(w, i, lanes), i, lanes);
            put_at<kStream>(z, i, standard, lanes);
            put_at<kStream>(y, i, value, lanes);
        });
    };
    if (b != nullptr) {
        write([&](VecF value, int64_t i, auto lanes) { return value + load_at(b, i, lanes); });
    } else {
        write([](VecF value, int64_t, auto) { return value; });
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
    const bool large = 2 * a.input.numel() * static_cast<int64_t>(sizeof(T)) >= kLayerNormStreamBytes;
    const int64_t step = a.input.ndim > 1 ? a.input.stride(-2) : 0;
    const int64_t parameter_bytes = (parameter_rows.scratch_bytes() + 63) / 64 * 64;
    const auto norm_row = [&](T *y, T *z, T *deviation, const T *x, const T *w, const T *b) {
        const auto count = static_cast<float>(n);
        const float mean = sum_over(n, [&](int64_t i, auto lanes, VecF s) { return s + load_at(x, i, lanes); }) / count;
        const float squares = sum_over(n, [&](int64_t i, auto lanes, VecF s) {
            const VecF difference = first_lanes(load_at(x, i, lanes) - splat(mean), lanes, 0.0f);
            return fma(difference, difference, s);
        });
        const float sigma = std::sqrt(squares / count + eps);
        store(deviation, splat(sigma), 1);
        if (large && stream_aligned(y) && stream_aligned(z)) {
            write_row<true>(y, z, x, w, b, n, mean, 1.0f / sigma, x + step);
        } else {
            write_row<false>(y, z, x, w, b, n, mean, 1.0f / sigma, x + step);
        }
    };
    parallel_for_with_scratch(rows.count(), bytes, parameter_bytes + rows.scratch_bytes(),
                              [&](int64_t begin, int64_t end, char *scratch) {
                                  parameter_rows.visit(0, 1, scratch, [&](void *const *parameter) {
                                      const T *w = static_cast<const T *>(parameter[0]);
                                      const T *b = with_bias ? static_cast<const T *>(parameter[1]) : nullptr;
                                      rows.visit(begin, end, scratch + parameter_bytes, [&](void *const *at) {
                                          norm_row(static_cast<T *>(at[0]), static_cast<T *>(at[1]),
                                                   static_cast<T *>(at[2]), static_cast<const T *>(at[3]), w, b);
                                      });
                                  });
                                  stream_fence();
                              });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::layer_norm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.input.dtype, [&](auto x) { norm_rows<decltype(x)>(args); });
}
