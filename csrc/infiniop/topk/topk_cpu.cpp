// The CPU kernels of topksoftmax and topkrouter: one row at a time. A heap of topk elements chooses the largest, with
// one comparison for most columns. Limit: arithmetic, an exponential and a comparison per column.
#include "candidate.h"
#include "level_types.h"
#include "parallel.h"
#include "softmax/softmax_row.h"
#include "topk.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using topk::candidate;
using topk::index_of;

// Sifts heap[at] down in a min-heap of k elements.
inline void sink(uint64_t *heap, int64_t k, int64_t at) {
    const uint64_t value = heap[at];
    for (int64_t child = 2 * at + 1; child < k; child = 2 * at + 1) {
        if (child + 1 < k && heap[child + 1] < heap[child]) {
            ++child;
        }
        if (value <= heap[child]) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

// chosen [k] = the candidates of the k largest of values [n], largest first; k <= n.
inline void choose_largest(const float *values, int64_t n, int64_t k, uint64_t *chosen) {
    for (int64_t i = 0; i < k; ++i) {
        chosen[i] = candidate(values[i], i);
    }
    for (int64_t i = k / 2; i-- > 0;) {
        sink(chosen, k, i);
    }
    float bar = values[index_of(chosen[0])];
    for (int64_t i = k; i < n; ++i) {
        if (!(values[i] <= bar)) { // true for NaN too
            const uint64_t next = candidate(values[i], i);
            if (next > chosen[0]) {
                chosen[0] = next;
                sink(chosen, k, 0);
                bar = values[index_of(chosen[0])];
            }
        }
    }
    for (int64_t last = k - 1; last > 0; --last) {
        const uint64_t smallest = chosen[0];
        chosen[0] = chosen[last];
        chosen[last] = smallest;
        sink(chosen, last, 0);
    }
}

// Calls row(x, values, indices, scratch) for every row, with scratch for `floats` floats and topk candidates.
template <typename T, typename Row> void for_each_row(const topk::Args &a, int64_t floats, const Row &row) {
    const auto k = static_cast<int64_t>(a.topk);
    const int64_t rows = a.x.size(0), bytes = a.x.numel() * static_cast<int64_t>(sizeof(T));
    parallel_for_with_scratch(
        rows, bytes, k * 8 + floats * 4,
        [&](int64_t begin, int64_t end, char *scratch) {
            auto *const chosen = reinterpret_cast<uint64_t *>(scratch);
            for (int64_t i = begin; i < end; ++i) {
                row(a.x.as<const T>() + i * a.x.stride(0), a.values.as<float>() + i * a.values.stride(0),
                    a.indices.as<int32_t>() + i * a.indices.stride(0), chosen, reinterpret_cast<float *>(chosen + k));
            }
        },
        kSoftmaxParallelBytes);
}

template <typename T> void softmax_rows(const topk::Args &a) {
    const int64_t n = a.x.size(1);
    const auto k = static_cast<int64_t>(a.topk);
    for_each_row<T>(a, 2 * n, [&](const T *row, float *values, int32_t *indices, uint64_t *chosen, float *scratch) {
        float *const x = scratch, *const exps = scratch + n;
        for_each_vector(n, [&](int64_t i, auto lanes) { store_at(x, i, load_at(row, i, lanes), lanes); });
        float total =
            sum_of_exps(x, n, largest(x, n), [&](int64_t i, VecF e, auto lanes) { store_at(exps, i, e, lanes); });
        // Chooses by x, because exponentials may be equal after rounding or underflow.
        choose_largest(x, n, k, chosen);
        if (a.normalize) {
            total = 0;
            for (int64_t i = 0; i < k; ++i) {
                total += exps[index_of(chosen[i])];
            }
        }
        for (int64_t i = 0; i < k; ++i) {
            indices[i] = static_cast<int32_t>(index_of(chosen[i]));
            values[i] = exps[indices[i]] / total;
            if (i > 0 && values[i] > values[i - 1]) { // rounding has swapped adjacent values
                values[i] = values[i - 1];
            }
        }
    });
}

template <typename T> void router_rows(const topk::Args &a) {
    using namespace topk;
    const auto k = static_cast<int64_t>(a.topk);
    float bias[kExperts];
    for (int64_t i = 0; i < kExperts; ++i) {
        bias[i] = a.bias.as<const float>()[i * a.bias.stride(0)];
    }
    for_each_row<T>(a, 2 * kExperts,
                    [&](const T *x, float *values, int32_t *indices, uint64_t *chosen, float *scratch) {
                        float *const scores = scratch, *const biased = scratch + kExperts;
                        for_each_vector(kExperts, [&](int64_t i, auto lanes) {
                            const VecF s = sigmoid(load_at(x, i, lanes));
                            store_at(scores, i, s, lanes);
                            store_at(biased, i, s + load_at(bias, i, lanes), lanes);
                        });
                        float groups[kGroups];
                        uint64_t best[kGroups];
                        for (int64_t g = 0; g < kGroups; ++g) {
                            const float *const group = biased + g * kGroupSize;
                            choose_largest(group, kGroupSize, 2, best);
                            groups[g] = group[index_of(best[0])] + group[index_of(best[1])];
                        }
                        choose_largest(groups, kGroups, kGroups, best);
                        for (int64_t g = kKeptGroups; g < kGroups; ++g) {
                            std::memset(biased + index_of(best[g]) * kGroupSize, 0, kGroupSize * sizeof(float));
                        }
                        choose_largest(biased, kExperts, k, chosen);
                        float total = 0;
                        for (int64_t i = 0; i < k; ++i) {
                            indices[i] = static_cast<int32_t>(index_of(chosen[i]));
                            values[i] = scores[indices[i]];
                            total += values[i];
                        }
                        for (int64_t i = 0; i < k; ++i) {
                            values[i] = values[i] * a.scale / (total + 1e-9f);
                        }
                    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::topk::INFINI_LEVEL::softmax_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::softmax_kernel,
                          [&](auto x) { softmax_rows<decltype(x)>(args); });
}

void infini::topk::INFINI_LEVEL::router_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::router_kernel,
                          [&](auto x) { router_rows<decltype(x)>(args); });
}
