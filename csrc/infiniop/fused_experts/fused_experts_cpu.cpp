// The CPU kernel of fused_experts' last step: the weighted sum of each token's experts, in float.
// Limit: memory bandwidth of the experts' results, read once.
#include "fused_experts.h"
#include "parallel.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

template <typename T> void sum_experts(const fused_experts::SumArgs &a) {
    const int64_t tokens = a.y.size(0), hidden = a.y.size(1), k = a.weights.size(1);
    const auto *const results = static_cast<const T *>(a.results);
    with_float_type(a.weights.dtype, [&](auto type) {
        const auto *const weights = a.weights.as<const decltype(type)>();
        parallel_for(tokens, tokens * hidden * k * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                T *const y = a.y.as<T>() + t * a.y.strides[0];
                for_each_vector(hidden, [&](int64_t i, auto lanes) {
                    VecF total{};
                    for (int64_t j = 0; j < k; ++j) {
                        const float weight = widen(weights[t * a.weights.strides[0] + j * a.weights.strides[1]]);
                        total += splat(weight) * load_at(results + a.row[t * k + j] * hidden, i, lanes);
                    }
                    store_at(y, i, total, lanes);
                });
            }
        });
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::fused_experts::INFINI_LEVEL::sum_kernel(const SumArgs &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.y.dtype, [&](auto type) { sum_experts<decltype(type)>(args); });
}
