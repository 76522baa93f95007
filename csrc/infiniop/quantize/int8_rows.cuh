// Quantizes rows to int8 with one scale each, on CUDA: rows of weights, and of x for integer products. Limit: memory
// bandwidth; the second read of a row comes from the cache.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/quantize_row.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rows.cuh"

namespace infini::quantize {
namespace {

template <typename T> struct Rows {
    const T *x;
    int8_t *q;
    float *scales;
    int64_t k, width, pitch; // columns of x and of q; distance between rows of q
    cuda::RowStrides<1> rows;
    bool whole, q_whole; // vector accesses are possible
};

constexpr int kVector = 8; // elements per thread and step

// Finds the largest magnitude of a row, then writes integers, rounded to nearest even, and zeros beyond k. A row that
// holds infinity or NaN gets the scale NaN, which spreads to everything computed from it.
template <typename T> __global__ void __launch_bounds__(1024) int8_rows(const __grid_constant__ Rows<T> a) {
    cuda::grid_dependency_sync();
    INFINI_SHARED(shared, float[32]);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool mine = row < a.rows.count; // threads without a row in the last block still reach the barriers
    int64_t at[1];
    a.rows.locate(mine ? row : 0, at);
    const T *const x = a.x + at[0];
    const int64_t first = static_cast<int64_t>(threadIdx.x) * kVector,
                  step = static_cast<int64_t>(blockDim.x) * kVector;
    const auto load = [&](int64_t i, float (&values)[kVector]) {
        cuda::load(values, x + i, a.whole && i + kVector <= a.k, static_cast<int>(a.k > i ? a.k - i : 0));
    };
    float most = 0, values[kVector];
    for (int64_t i = first; i < a.k; i += step) {
        load(i, values);
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
            most = cuda::Max::join(most, fabsf(values[e]));
        }
    }
    most = cuda::row_reduce<cuda::Max>(most, shared);
    const cuda::RowScale scale(most);
    if (!mine) {
        return;
    }
    for (int64_t i = first; i < a.width; i += step) {
        load(i, values);
        cuda::Vector<int8_t, kVector> q;
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
            q.values[e] = i + e < a.k ? scale.quantize(values[e]) : int8_t{0};
        }
        const int64_t left = a.width - i;
        cuda::store(a.q + row * a.pitch + i, q, a.q_whole && left >= kVector,
                    static_cast<int>(left < kVector ? left : kVector));
    }
    if (threadIdx.x == 0) {
        a.scales[row] = scale.scale();
    }
}

// q [rows of x, width], rows `pitch` apart, with width at least the columns of x; one scale per row.
template <typename T>
void quantize_rows(const ExecutionContext &context, const TensorView &x, int8_t *q, int64_t width, int64_t pitch,
                   float *scales) {
    const TensorView *const views[] = {&x};
    const cuda::RowStrides<1> rows(views);
    const bool q_whole = reinterpret_cast<uintptr_t>(q) % kVector == 0 && pitch % kVector == 0;
    const cuda::RowPlan plan(rows.count, width, kVector);
    cuda::launch(context, int8_rows<T>, cuda::grid_x(plan.blocks), plan.block(), 0,
                 Rows<T>{x.as<const T>(), q, scales, x.size(-1), width, pitch, rows, cuda::vectors_fit(x), q_whole});
}

} // namespace
} // namespace infini::quantize
