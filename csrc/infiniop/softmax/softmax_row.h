// One row of softmax, for the kernels of softmax, causal_softmax and topksoftmax; log_softmax uses parts of it. The
// order of additions depends on the row's length alone.
#pragma once

#include <limits>
#include <type_traits>

#include "parallel.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// softmax is split among threads from this many bytes of traffic on: an exponential takes about ten times as long as
// copying an element.
constexpr int64_t kSoftmaxParallelBytes = kParallelBytes / 8;

// The largest of x [n], ignoring NaN: NaN's exponential makes the sum, and so the row, NaN anyway.
template <typename T> float largest(const T *x, int64_t n) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    VecF highest = splat(kLowest);
    for_each_vector(
        n, [&](int64_t i, auto lanes) { highest = max(first_lanes(load_at(x, i, lanes), lanes, kLowest), highest); });
    return max(highest);
}

// The sum of exp(x - top) over x [n]; also calls store(i, exponentials, lanes) for each vector.
template <typename T, typename Store> float sum_of_exps(const T *x, int64_t n, float top, const Store &store) {
    VecF total = {};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecF e = exp(load_at(x, i, lanes) - splat(top));
        store(i, e, lanes);
        total = total + first_lanes(e, lanes, 0.0f);
    });
    return sum(total);
}

// The scratch bytes of softmax_row for n columns of T. A row of float needs none: it holds its exponentials itself.
template <typename T> constexpr int64_t exps_bytes(int64_t n) {
    return std::is_same_v<T, float> ? 0 : (n * 4 + 63) / 64 * 64;
}

// y = softmax(x) over n columns; y may be x.
template <typename T> void softmax_row(T *y, const T *x, void *scratch, int64_t n) {
    auto *const exps = static_cast<float *>(std::is_same_v<T, float> ? static_cast<void *>(y) : scratch);
    const float total =
        sum_of_exps(x, n, largest(x, n), [&](int64_t i, VecF e, auto lanes) { store_at(exps, i, e, lanes); });
    const VecF scale = splat(1.0f / total);
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(y, i, load_at(exps, i, lanes) * scale, lanes); });
}

} // namespace
} // namespace infini::INFINI_LEVEL
