// The CUDA kernel of dequantize_awq: a thread unpacks one column of integers (eight columns of weights) in several rows
// of a group, with its scales and zeros in registers. Limit: memory bandwidth, 2 bytes written per half byte read.
// q - zero is a whole number of magnitude below 16, and its product with a float16 scale is exact in float: one
// rounding.
// SASS: dequantize: LDG.E.128 STG.E.128
#include "cuda/launch.cuh"
#include "cuda/packed32.cuh"
#include "dequantize_awq.h"

namespace infini::dequantize_awq {
namespace {

constexpr int kColumns = 8;  // columns of weights per integer
constexpr int kRows = 4;     // rows per thread
constexpr int kThreads = 64; // along the columns of integers

struct Weights {
    f16 *out;
    const uint32_t *q, *zeros;
    const f16 *scales;
    int64_t out_stride, q_stride, zeros_stride, scales_stride;
    int64_t words, rows, group_size;
    int64_t column_blocks, row_blocks; // row_blocks: of a group
    bool out_whole, scales_whole;      // vector accesses are possible
};

// The value of column j of a word, plus 2^23. Both it and the difference of two of them are exact in float.
__device__ __forceinline__ float shifted(uint32_t word, int j) {
    const int bit = j % 2 * 16 + j / 2 * 4; // 0, 16, 4, 20, 8, 24, 12, 28
    return __uint_as_float((word >> bit & 15u) | 0x4b000000u);
}

__global__ void __launch_bounds__(kThreads) dequantize(const __grid_constant__ Weights a) {
    cuda::grid_dependency_sync();
    const int64_t block = blockIdx.x, rest = block / a.column_blocks;
    const int64_t column = (block - rest * a.column_blocks) * kThreads + threadIdx.x;
    // `first` counts within the group.
    const int64_t group = rest / a.row_blocks, first = (rest - group * a.row_blocks) * kRows;
    if (column >= a.words) {
        return;
    }
    const int count = static_cast<int>(min(a.group_size - first, int64_t{kRows}));
    const uint32_t *q = a.q + (group * a.group_size + first) * a.q_stride + column;
    uint32_t words[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
        words[row] = row < count ? q[row * a.q_stride] : 0;
    }
    const uint32_t zeros = a.zeros[group * a.zeros_stride + column];
    float scales[kColumns];
    cuda::load(scales, a.scales + group * a.scales_stride + column * kColumns, a.scales_whole, kColumns);
    f16 *out = a.out + (group * a.group_size + first) * a.out_stride + column * kColumns;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
        float values[kColumns];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
            values[j] = (shifted(words[row], j) - shifted(zeros, j)) * scales[j];
        }
        cuda::store_packed32(out + row * a.out_stride, cuda::narrow<f16>(values), a.out_whole && row < count,
                             row < count ? kColumns : 0);
    }
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    Weights a{args.out.as<f16>(),
              args.qweight.as<const uint32_t>(),
              args.zeros.as<const uint32_t>(),
              args.scales.as<const f16>(),
              args.out.strides[0],
              args.qweight.strides[0],
              args.zeros.strides[0],
              args.scales.strides[0],
              args.qweight.shape[1],
              args.out.shape[0],
              args.out.shape[0] / args.scales.shape[0],
              0,
              0,
              infini::cuda::vectors_fit(args.out),
              infini::cuda::vectors_fit(args.scales)};
    a.column_blocks = (a.words + kThreads - 1) / kThreads;
    a.row_blocks = (a.group_size + kRows - 1) / kRows;
    const int64_t blocks = a.column_blocks * a.row_blocks * args.scales.shape[0];
    infini::cuda::launch(context, dequantize, infini::cuda::grid_x(blocks), kThreads, 0, a);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::dequantize_awq
