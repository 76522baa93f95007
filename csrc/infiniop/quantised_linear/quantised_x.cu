// The CUDA kernels of linear_int8 and linear_int4 where x is quantised too: a kernel that writes x as int8 with a scale
// for each row to the workspace, then weight_stream.cuh on the tensor cores' exact products of integers.
// Limit: memory bandwidth of the weight's bytes up to 16 rows; more rows read it again for every 32.
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

// A block a row: its largest magnitude, then integers to nearest even. A row with infinity or NaN in it gets the scale
// NaN, and with it all of its results.
template <typename T> __global__ void __launch_bounds__(256) quantise_rows(const __grid_constant__ Quantise<T> a) {
    constexpr int kWidth = 8;
    __shared__ float shared[32];
    const int64_t row = blockIdx.x;
    int64_t at[1];
    a.rows.locate(row, at);
    const T *const x = a.x + at[0];
    float most = 0;
    for (int64_t i = threadIdx.x * kWidth; i < a.k; i += blockDim.x * kWidth) {
        float values[kWidth];
        cuda::load(values, x + i, a.whole && i + kWidth <= a.k, static_cast<int>(a.k - i));
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
            most = cuda::Max::join(most, fabsf(values[e]));
        }
    }
    most = cuda::row_reduce<cuda::Max>(most, shared);
    const bool finite = most <= 3.402823466e38f; // not infinity, not NaN
    const float scale = most / 127, divisor = scale > 0 ? scale : 1;
    for (int64_t i = threadIdx.x * kWidth; i < a.pitch; i += blockDim.x * kWidth) {
        float values[kWidth];
        cuda::load(values, x + i, a.whole && i + kWidth <= a.k, static_cast<int>(a.k > i ? a.k - i : 0));
        cuda::Vector<int8_t, kWidth> q;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
            const float value = min(127.0f, max(-127.0f, values[e] / divisor));
            q.values[e] = static_cast<int8_t>(finite && i + e < a.k ? __float2int_rn(value) : 0);
        }
        *reinterpret_cast<cuda::Vector<int8_t, kWidth> *>(a.q + row * a.pitch + i) = q;
    }
    if (threadIdx.x == 0) {
        a.scales[row] = finite ? scale : __uint_as_float(0x7fc00000u);
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
            cuda::launch(quantise_rows<T>, cuda::grid_x(layout.rows), dim3(256), 0,
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
