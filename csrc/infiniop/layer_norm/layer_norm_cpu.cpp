// The CPU kernel of layer_norm: one row at a time, in three passes: the mean, the variance about it, the outputs. Only
// the first reads from memory. Limit: memory bandwidth, one row read and one or two written.
#include "dense_rows.h"
#include "layer_norm.h"
#include "level_types.h"
#include "parallel.h"
#include "streaming_stores.h"
#include "sum_over.h"
#include "vec.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

// Streaming stores are faster from this many bytes of input and outputs on; below, the output may still be in the 32
// MiB of last-level cache of the machine measured (two Zen 5 cores) when it is read next. float32 rows of 4096 on one
// core, ms with ordinary and with streaming stores: two outputs, 12 MiB in all: 0.19 and 0.22, 24 MiB: 0.70 and 0.45;
// one output, 16 MiB: 0.40 and 0.25 (but a later read from memory costs as much), 24 MiB: 0.83 and 0.45.
constexpr int64_t kLayerNormStreamBytes = 24 << 20;

// The last pass over n elements: z = (x - mean) scale, if z is not null; y = finish(z). With kStream, streams both and
// prefetches the next row, because this pass reads nothing from memory.
template <bool kStatistics, bool kStream, typename T, typename Finish>
INFINI_ALWAYS_INLINE void write_row(T *y, T *z, const T *x, int64_t n, float mean, float scale, const T *next,
                                    const Finish &finish) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        if constexpr (kStream) {
            __builtin_prefetch(next + i);
        }
        const VecF standard = (load_at(x, i, lanes) - splat(mean)) * splat(scale);
        const VecF value = finish(standard, i, lanes);
        if constexpr (kStatistics) {
            store_or_stream_at<kStream>(z, i, standard, lanes);
        }
        store_or_stream_at<kStream>(y, i, value, lanes);
    });
}

// The same for y alone, without streaming: w and b may be null.
template <typename T, typename W>
void write_output(T *y, const T *x, const W *w, const W *b, int64_t n, float mean, float scale) {
    const auto write = [&](const auto &finish) { write_row<false, false>(y, y, x, n, mean, scale, x, finish); };
    if (w != nullptr && b != nullptr) {
        write([&](VecF v, int64_t i, auto lanes) { return v * load_at(w, i, lanes) + load_at(b, i, lanes); });
    } else if (w != nullptr) {
        write([&](VecF v, int64_t i, auto lanes) { return v * load_at(w, i, lanes); });
    } else if (b != nullptr) {
        write([&](VecF v, int64_t i, auto lanes) { return v + load_at(b, i, lanes); });
    } else {
        write([](VecF v, int64_t, auto) { return v; });
    }
}

// Reads the weight or bias as floats, `absent` where it is null.
template <typename W> void read_parameter(float *to, const W *from, int64_t n, float absent) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        store_at(to, i, from != nullptr ? load_at(from, i, lanes) : splat(absent), lanes);
    });
}

// W: the type of weight and bias. The paths that many elements or more outputs pay for take both as floats: they are
// compiled for one type, and for one way to finish.
template <bool kStatistics, typename T, typename W> void norm_rows(const layer_norm::Args &a) {
    // kWide outputs are as large as the input.
    constexpr int kOutputs = kStatistics ? 3 : 1, kWide = kStatistics ? 2 : 1;
    const int64_t n = a.input.size(-1);
    const auto eps = static_cast<float>(a.eps);
    const bool with_weight = a.weight.dtype != INFINI_DTYPE_INVALID, with_bias = a.bias.dtype != INFINI_DTYPE_INVALID;
    TensorView deviation = a.deviation; // [..., 1]
    const TensorView *views[kOutputs + 1];
    views[0] = &a.output;
    if constexpr (kStatistics) {
        deviation.shape[deviation.ndim] = deviation.strides[deviation.ndim] = 1;
        ++deviation.ndim;
        views[1] = &a.standardization;
        views[2] = &deviation;
    }
    views[kOutputs] = &a.input;
    const DenseRows<kOutputs + 1> rows(views, kOutputs);
    // An absent weight or bias gets empty rows.
    TensorView absent = a.input;
    absent.ndim = 1;
    absent.shape[0] = 0;
    const TensorView *const parameters[] = {with_weight ? &a.weight : &absent, with_bias ? &a.bias : &absent};
    const DenseRows<2> parameter_rows(parameters, 0);
    const int64_t bytes = (kWide + 1) * a.input.numel() * static_cast<int64_t>(sizeof(T));
    const bool large = bytes >= kLayerNormStreamBytes;
    const int64_t step = a.input.ndim > 1 ? a.input.stride(-2) : 0;
    const int64_t parameter_bytes = (parameter_rows.scratch_bytes() + 63) / 64 * 64;
    const int64_t pitch = kStatistics || large ? (n + 15) / 16 * 16 : 0;
    const int64_t float_bytes = 2 * pitch * static_cast<int64_t>(sizeof(float));
    const auto norm_row = [&](void *const *at, const W *w, const W *b, const float *floats) {
        T *const y = static_cast<T *>(at[0]), *z = nullptr;
        const T *const x = static_cast<const T *>(at[kOutputs]);
        const auto count = static_cast<float>(n);
        const float mean = sum_over(n, [&](int64_t i, auto lanes, VecF s) { return s + load_at(x, i, lanes); }) / count;
        const float squares = sum_over(n, [&](int64_t i, auto lanes, VecF s) {
            const VecF difference = first_lanes(load_at(x, i, lanes) - splat(mean), lanes, 0.0f);
            return fma(difference, difference, s);
        });
        const float sigma = std::sqrt(squares / count + eps);
        if constexpr (kStatistics) {
            z = static_cast<T *>(at[1]);
            store(static_cast<T *>(at[2]), splat(sigma), 1);
        }
        const auto finish = [&](VecF v, int64_t i, auto lanes) {
            return v * load_at(floats, i, lanes) + load_at(floats + pitch, i, lanes);
        };
        if (large && stream_aligned(y) && stream_aligned(z)) {
            write_row<kStatistics, true>(y, z, x, n, mean, 1.0f / sigma, x + step, finish);
        } else if constexpr (kStatistics) {
            write_row<true, false>(y, z, x, n, mean, 1.0f / sigma, x, finish);
        } else {
            write_output(y, x, w, b, n, mean, 1.0f / sigma);
        }
    };
    parallel_for_with_scratch(rows.count(), bytes, parameter_bytes + float_bytes + rows.scratch_bytes(),
                              [&](int64_t begin, int64_t end, char *scratch) {
                                  const void *parameters_at[2]; // in scratch memory where they are strided
                                  parameter_rows.visit(0, 1, scratch, [&](void *const *at) {
                                      parameters_at[0] = at[0];
                                      parameters_at[1] = at[1];
                                  });
                                  const W *w = with_weight ? static_cast<const W *>(parameters_at[0]) : nullptr;
                                  const W *b = with_bias ? static_cast<const W *>(parameters_at[1]) : nullptr;
                                  auto *const floats = reinterpret_cast<float *>(scratch + parameter_bytes);
                                  if (pitch > 0) {
                                      read_parameter(floats, w, n, 1.0f);
                                      read_parameter(floats + pitch, b, n, 0.0f);
                                  }
                                  rows.visit(begin, end, scratch + parameter_bytes + float_bytes,
                                             [&](void *const *at) { norm_row(at, w, b, floats); });
                                  stream_fence();
                              });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::layer_norm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.input.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel, [&](auto x) {
        using T = decltype(x);
        const auto norm = [&](auto w) {
            using W = decltype(w);
            args.standardization.dtype == INFINI_DTYPE_INVALID ? norm_rows<false, T, W>(args)
                                                               : norm_rows<true, T, W>(args);
        };
        if (args.weight.dtype == INFINI_DTYPE_F32 || args.bias.dtype == INFINI_DTYPE_F32) {
            norm(float{});
        } else {
            norm(x);
        }
    });
}
