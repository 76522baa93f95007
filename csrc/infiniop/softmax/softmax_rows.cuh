// Rows of softmax on CUDA, for softmax, log_softmax and causal_softmax: the maximum, the exponentials and their sum,
// the result. One pass over memory, with the exponentials in registers. Rows too long for registers (16384 halves) and
// rows of ColumnReducer are read three times, twice of these from L2.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/strided_rows.cuh"

namespace infini::softmax {
namespace {

template <typename T> struct Job {
    const T *x;
    void *y;
    infiniDtype_t y_dtype;     // T, except in log_softmax
    cuda::StridedRows<2> rows; // x, y
    bool log;
    int64_t q; // 0, or for causal softmax: row i sees rows.n - q + 1 + i % q elements, the others become 0
};

template <typename T, bool kAnyOutput, int kWidth>
__device__ __forceinline__ void put(const Job<T> &a, int64_t at, const float (&v)[kWidth], bool whole, int count) {
    const int64_t step = a.rows.steps[1];
    if (!kAnyOutput) {
        cuda::store(static_cast<T *>(a.y) + at, v, whole, count, step);
    } else if (a.y_dtype == INFINI_DTYPE_BF16) {
        cuda::store(static_cast<bf16 *>(a.y) + at, v, whole, count, step);
    } else if (a.y_dtype == INFINI_DTYPE_F16) {
        cuda::store(static_cast<f16 *>(a.y) + at, v, whole, count, step);
    } else {
        cuda::store(static_cast<float *>(a.y) + at, v, whole, count, step);
    }
}

// kAnyOutput: the output may have another dtype than T.
template <typename T, bool kAnyOutput, typename Reducer>
__global__ void __launch_bounds__(Reducer::kMaxThreads, 1) softmax_rows(const __grid_constant__ Job<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kWidth = cuda::kWidth<T>;
    INFINI_SHARED(shared, float[Reducer::kShared]);
    const int64_t number = Reducer::number();
    const bool mine = number < a.rows.starts.count; // threads without a row in the last block still reach the barriers
    int64_t at[2];
    a.rows.starts.locate(mine ? number : 0, at);
    const int64_t n = mine ? a.rows.n : 0, seen = a.q > 0 && mine ? n - a.q + 1 + number % a.q : n;
    const int64_t whole_vectors = (seen + kWidth - 1) / kWidth * kWidth, end = whole_vectors < n ? whole_vectors : n;
    Reducer reducer(a.x + at[0], end, a.rows, shared);
    const auto seen_from = [&](int64_t i) { return static_cast<int>(seen - i < kWidth ? seen - i : kWidth); };

    const float top = reducer.template reduce<cuda::Max>(-cuda::kInfinity<float>,
                                                         [&](float &part, int64_t i, int, float (&v)[kWidth]) {
                                                             const int count = seen_from(i);
                                                             for (int e = 0; e < kWidth; ++e) {
                                                                 part = e < count ? cuda::Max::join(v[e], part) : part;
                                                             }
                                                         });
    const float total =
        reducer.template reduce_and_keep<cuda::Sum>(0.0f, [&](float &part, int64_t i, int, float (&v)[kWidth]) {
            const int count = seen_from(i);
            for (int e = 0; e < kWidth; ++e) {
                const float exponential = e < count ? expf(v[e] - top) : 0;
                part += exponential;
                v[e] = a.log ? v[e] : exponential;
            }
        });
    const float scale = 1 / total, log_total = a.log ? logf(total) : 0;
    reducer.visit([&](int64_t i, int, float (&v)[kWidth]) {
        const int count = seen_from(i);
        for (int e = 0; e < kWidth; ++e) {
            if (a.log) {
                v[e] = v[e] - top - log_total;
            } else {
                v[e] = (Reducer::kKeeps ? v[e] : e < count ? expf(v[e] - top) : 0) * scale;
            }
        }
        // Masked elements stay 0 even in a row that becomes NaN.
        for (int e = 0; e < kWidth; ++e) {
            v[e] = e < count ? v[e] : 0;
        }
        put<T, kAnyOutput>(a, at[1] + i * a.rows.steps[1], v, reducer.whole(i),
                           static_cast<int>(end - i < kWidth ? end - i : kWidth));
    });
    for (int64_t i = end + Reducer::thread() * kWidth; i < n; i += Reducer::threads() * kWidth) {
        const float zeros[kWidth] = {};
        put<T, kAnyOutput>(a, at[1] + i * a.rows.steps[1], zeros, a.rows.whole && i + kWidth <= n,
                           static_cast<int>(n - i < kWidth ? n - i : kWidth));
    }
}

// Computes softmax along the last dimension of the views.
template <typename T, bool kAnyOutput>
void launch(const ExecutionContext &context, const TensorView &x, const TensorView &y, bool log, int64_t q) {
    const TensorView *const views[] = {&x, &y};
    const Job<T> job{x.as<const T>(), y.data, y.dtype, cuda::StridedRows<2>(views, cuda::kWidth<T>), log, q};
    cuda::with_reducer<T, float>(job.rows, [&](auto reducer, dim3 grid, dim3 block) {
        cuda::launch(context, softmax_rows<T, kAnyOutput, typename decltype(reducer)::type>, grid, block, 0, job);
    });
}

} // namespace
} // namespace infini::softmax
