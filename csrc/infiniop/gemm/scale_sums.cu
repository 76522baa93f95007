// The kernel of scale_sums: a thread handles four columns of four rows. The arithmetic is that of finish() in
// weight_stream.cuh, so exact integer sums give the same bits in both.
// Limit: memory bandwidth, each sum read once and each result written once.
// SASS: scale_rows: LDG.E.128 STG.E.64 STG.E.128
#include "scale_sums.h"

#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "linear/weight_stream.cuh"

namespace infini::gemm {
namespace {

using weight_stream::FloatVector;

constexpr int kThreads = 128;
constexpr int kColumns = 4, kRows = 4; // per thread

template <typename Sum, typename T> struct Problem {
    const Sum *sums;
    int64_t pitch; // row stride of the sums
    int parts;     // arrays of sums, which are added
    int64_t part_pitch;
    T *y;
    cuda::RowStrides<1> rows; // of y
    int64_t n;
    unsigned column_blocks;
    bool sums_whole, y_whole; // accesses in vectors of four are possible
    FloatVector row_scales, column_scales, bias;
};

template <typename T>
__device__ __forceinline__ void load_columns_of(float (&out)[kColumns], const FloatVector &from, int64_t first,
                                                int count) {
    cuda::load(out, static_cast<const T *>(from.data) + first * from.stride, false, count, from.stride);
}

// Loads elements [first, first + count), then zeros.
__device__ __forceinline__ void load_columns(float (&out)[kColumns], const FloatVector &from, int64_t first,
                                             int count) {
    switch (from.dtype) {
    case INFINI_DTYPE_BF16:
        return load_columns_of<bf16>(out, from, first, count);
    case INFINI_DTYPE_F16:
        return load_columns_of<f16>(out, from, first, count);
    default:
        return load_columns_of<float>(out, from, first, count);
    }
}

template <typename Sum, typename T>
__global__ void __launch_bounds__(kThreads) scale_rows(const __grid_constant__ Problem<Sum, T> a) {
    cuda::grid_dependency_sync();
    const int64_t first = static_cast<int64_t>(blockIdx.x / a.column_blocks) * kRows;
    const int64_t column = (static_cast<int64_t>(blockIdx.x % a.column_blocks) * kThreads + threadIdx.x) * kColumns;
    const int64_t left = a.n - column;
    const int count = static_cast<int>(left < kColumns ? (left > 0 ? left : 0) : kColumns);
    cuda::Packed32<Sum, kColumns> sums[kRows]; // all loads are issued before the first conversion
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int in_row = first + r < a.rows.count ? count : 0;
        sums[r] = cuda::load_packed32<Sum, kColumns>(a.sums + (first + r) * a.pitch + column,
                                                     a.sums_whole && in_row == kColumns, in_row);
    }
#pragma unroll 1
    for (int part = 1; part < a.parts; ++part) {
        cuda::Packed32<Sum, kColumns> more[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int in_row = first + r < a.rows.count ? count : 0;
            more[r] = cuda::load_packed32<Sum, kColumns>(a.sums + part * a.part_pitch + (first + r) * a.pitch + column,
                                                         a.sums_whole && in_row == kColumns, in_row);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const auto added = cuda::bit_cast<cuda::Vector<Sum, kColumns>>(more[r]);
            auto held = cuda::bit_cast<cuda::Vector<Sum, kColumns>>(sums[r]);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                held.values[i] += added.values[i];
            }
            sums[r] = cuda::bit_cast<cuda::Packed32<Sum, kColumns>>(held);
        }
    }
    float scales[kColumns] = {1, 1, 1, 1}, bias[kColumns] = {};
    const bool adds_bias = a.bias.data != nullptr;
    if (a.column_scales.data != nullptr) {
        load_columns(scales, a.column_scales, column, count);
    }
    if (adds_bias) {
        load_columns(bias, a.bias, column, count);
    }
    // Each lane looks up one row and shares the result by shuffles.
    const int64_t mine = first + threadIdx.x % kRows, last = a.rows.count - 1;
    int64_t at[1];
    a.rows.locate(mine < last ? mine : last, at);
    const float row_scale =
        a.row_scales.data != nullptr ? a.row_scales[(mine < last ? mine : last) * a.row_scales.stride] : 1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int64_t to = __shfl_sync(0xffffffffu, at[0], r);
        const float scale = __shfl_sync(0xffffffffu, row_scale, r);
        const auto held = cuda::bit_cast<cuda::Vector<Sum, kColumns>>(sums[r]);
        cuda::Vector<T, kColumns> y;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float value = __fmul_rn(static_cast<float>(held.values[i]), __fmul_rn(scale, scales[i]));
            if (adds_bias) {
                value = __fadd_rn(value, bias[i]);
            }
            cuda::narrow_to(&y.values[i], value);
        }
        const int in_row = first + r < a.rows.count ? count : 0;
        cuda::store_packed32(a.y + to + column, y, a.y_whole && in_row == kColumns, in_row);
    }
}

FloatVector numbers(const TensorView &vector) {
    return FloatVector(vector, vector.ndim > 0 ? vector.stride(0) : 0);
}

template <typename Sum, typename T> void launch(const ExecutionContext &context, const ScaledSums &args) {
    const TensorView *const views[] = {&args.y};
    const int rows = args.sums.ndim - 2; // the dimension of rows
    Problem<Sum, T> problem{args.sums.as<const Sum>(),
                            args.sums.size(rows) > 1 ? args.sums.stride(rows) : args.sums.size(rows + 1),
                            rows == 1 ? static_cast<int>(args.sums.size(0)) : 1,
                            args.sums.stride(0),
                            args.y.as<T>(),
                            cuda::RowStrides<1>(views),
                            args.y.size(-1),
                            0,
                            cuda::vectors_fit(args.sums),
                            cuda::vectors_fit(args.y),
                            numbers(args.row_scales),
                            numbers(args.column_scales),
                            numbers(args.bias)};
    constexpr int64_t kBlockColumns = kThreads * kColumns;
    const int64_t columns = (problem.n + kBlockColumns - 1) / kBlockColumns;
    problem.column_blocks = cuda::grid_x(columns);
    cuda::launch(context, scale_rows<Sum, T>, cuda::grid_x(columns * ((problem.rows.count + kRows - 1) / kRows)),
                 dim3(kThreads), 0, problem);
}

} // namespace

void scale_sums(const ExecutionContext &context, const ScaledSums &args) {
    cuda::with_float_type(args.y.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) {
            args.sums.dtype == INFINI_DTYPE_I32 ? launch<int32_t, T>(context, args) : launch<float, T>(context, args);
        }
    });
}

} // namespace infini::gemm
