// The CUDA kernels of linear_int8 and linear_int4 where x is quantised too: a kernel that writes x as int8 with a scale
// for each row to the workspace, then weight_stream.cuh on the tensor cores' exact products of integers.
// Limit: memory bandwidth of the weight's bytes up to 16 rows; more rows read it again for every 32.
#include "cuda/quantise.h"
#include "problem.cuh"

namespace infini::quantised_linear {
namespace {

template <typename T> struct Quantise {
    const T *x;
    int8_t *q;
    float *scales;
    int64_t k, pitch;
    cuda::Rows<1> rows;
    bool whole;
};

constexpr int kVector = 8; // elements that a thread has at once

// The largest magnitude of a row, then integers. A row with infinity or NaN in it gets the scale NaN, and with it all of
// its results.
template <typename T> __global__ void __launch_bounds__(1024) quantise_rows(const __grid_constant__ Quantise<T> a) {
    __shared__ float shared[32];
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const bool mine = row < a.rows.count; // rows too many meet the barriers all the same
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
    for (int64_t i = first; i < a.pitch; i += step) {
        load(i, values);
        cuda::Vector<int8_t, kVector> q;
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
            q.values[e] = i + e < a.k ? scale.quantise(values[e]) : int8_t{0};
        }
        *reinterpret_cast<cuda::Vector<int8_t, kVector> *>(a.q + row * a.pitch + i) = q;
    }
    if (threadIdx.x == 0) {
        a.scales[row] = scale.scale();
    }
}

template <typename Format> void multiply(const Args &args) {
    const QuantisedX layout(args.x);
    auto *const q = static_cast<int8_t *>(args.workspace);
    auto *const scales = reinterpret_cast<float *>(q + layout.scales_at());
    cuda::with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) {
            const TensorView *const views[] = {&args.x};
            const cuda::RowPlan plan(layout.rows, layout.pitch, kVector);
            cuda::launch(quantise_rows<T>, cuda::grid_x(plan.blocks), plan.block(), 0,
                         Quantise<T>{args.x.as<const T>(), q, scales, args.x.size(-1), layout.pitch,
                                     cuda::Rows<1>(views), cuda::vectors_fit(args.x)});
        }
    });
    TensorView x = args.x; // the integers
    x.data = q;
    x.dtype = INFINI_DTYPE_I8;
    int64_t stride = layout.pitch;
    for (int dim = x.ndim - 2; dim >= 0; --dim) {
        x.strides[dim] = stride;
        stride *= x.shape[dim];
    }
    weight_stream::Problem<int8_t> problem = problem_of<int8_t>(args, x);
    problem.row_scales.data = scales;
    problem.row_scales.dtype = INFINI_DTYPE_F32;
    weight_stream::multiply<Format, kMaxTiles>(problem);
}

} // namespace

void nvidia::int8_quantised_x_cuda_kernel(const Args &args) {
    multiply<weight_stream::Int8ByInt8>(args);
}

void nvidia::int4_quantised_x_cuda_kernel(const Args &args) {
    multiply<weight_stream::Int4ByInt8>(args);
}

} // namespace infini::quantised_linear
