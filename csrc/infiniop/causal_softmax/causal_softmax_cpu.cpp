// The CPU kernel of causal_softmax: one row at a time, in three passes over what the row sees: the maximum, the
// exponentials and their sum, the division. Limit: memory bandwidth while a row fits into L1 and L2.
#include "../../infinirt/cpu/scratch.h"
#include "causal_softmax.h"
#include "parallel.h"
#include "rows.h"
#include "vec.h"

#include <limits>
#include <type_traits>

namespace infini::INFINI_LEVEL {
namespace {

// An exponential is about ten times the work of a copied element.
constexpr int64_t kSoftmaxParallelBytes = kParallelBytes / 8;

// v with `rest` in place of the lanes from n on.
inline VecF first_lanes(VecF v, Full, float) {
    return v;
}

inline VecF first_lanes(VecF v, int n, float rest) {
    VecI lane;
    for (int i = 0; i < kLanes; ++i) {
        lane[i] = i;
    }
    return select(lane < n, v, splat(rest));
}

// y = softmax(x) over n columns; exps [n] may be y. Four accumulators hide the latency; their order is fixed by n.
template <typename T> void softmax_row(T *y, const T *x, float *exps, int64_t n) {
    constexpr float kLowest = -std::numeric_limits<float>::infinity();
    VecF highest[4] = {splat(kLowest), splat(kLowest), splat(kLowest), splat(kLowest)};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        VecF &part = highest[(i / kLanes) & 3];
        part = max(first_lanes(load_at(x, i, lanes), lanes, kLowest), part);
    });
    // A NaN is passed over here; its exponential makes the sum, and so the row, NaN.
    const VecF top = splat(max(max(max(highest[0], highest[1]), max(highest[2], highest[3]))));
    VecF sums[4] = {};
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecF e = exp(load_at(x, i, lanes) - top);
        store_at(exps, i, e, lanes);
        VecF &part = sums[(i / kLanes) & 3];
        part = part + first_lanes(e, lanes, 0.0f);
    });
    const VecF scale = splat(1.0f / sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(y, i, load_at(exps, i, lanes) * scale, lanes); });
}

template <typename T> void softmax_rows(const causal_softmax::Args &a) {
    const int64_t q = a.x.size(-2), k = a.x.size(-1);
    const TensorView *const views[] = {&a.x, &a.y};
    const Rows<2> rows(views);
    const int64_t bytes = a.x.numel() * 2 * static_cast<int64_t>(sizeof(T));
    const auto body = [&](int64_t begin, int64_t end) {
        float *const exps = std::is_same_v<T, float>
                                ? nullptr
                                : static_cast<float *>(cpu::scratch(static_cast<size_t>(k) * sizeof(float)));
        for (int64_t i = begin; i < end; ++i) {
            // Rows in the order 0, q-1, 1, q-2, ...: a short one with a long one, so that threads get equal work.
            const int64_t step = i % q, query = step % 2 ? q - 1 - step / 2 : step / 2;
            const int64_t row = i - step + query, seen = k - q + query + 1;
            rows.visit(row, row + 1, [&](const int64_t *at) {
                T *const y = a.y.as<T>() + at[1];
                if constexpr (std::is_same_v<T, float>) {
                    softmax_row(y, a.x.as<const T>() + at[0], y, seen);
                } else {
                    softmax_row(y, a.x.as<const T>() + at[0], exps, seen);
                }
                std::memset(static_cast<void *>(y + seen), 0, static_cast<size_t>(k - seen) * sizeof(T));
            });
        }
    };
    parallel_for(rows.count(), bytes, body, kSoftmaxParallelBytes);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::causal_softmax::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.x.dtype, [&](auto x) { softmax_rows<decltype(x)>(args); });
}
