// linear_int8 and linear_int4: y = x @ weight^T + bias with a weight of small integers and float scales.
// x [..., k] keeps its dtype; weights become floats (or bfloat16, exactly) in registers, so that memory moves only the
// integers. Sums are in float, in an order that depends on k and the group alone: a row has the same bits in any batch,
// except for products by cuBLAS on CUDA (many_rows.h).
#pragma once

#include <cstddef>

#include "cpu_capability.h"
#include "kernel_table.h"
#include "many_rows.h"
#include "tensor_view.h"

namespace infini::quantized_linear {

// linear_int8: weight [n, k] int8, scales [n]; the weight is q * scale. linear_int4: weight [n, k / 2] uint8, element
// 2i of a row in the lower half of byte i, 2i + 1 in the upper; scales and zeros [n, k / group], group 32, 64 or 128;
// the weight is (q - 8) * scale + zero. With quantize_x, each row of x becomes int8 with one scale, and integer
// products are summed exactly.
struct Args {
    TensorView y;      // [..., n], the dtype of x
    TensorView x;      // [..., k]
    TensorView weight; // any row stride
    TensorView scales; // float32 or the dtype of x
    TensorView zeros;  // linear_int4: the dtype of scales; dtype == INFINI_DTYPE_INVALID: no zeros
    TensorView bias;   // [n], the dtype of x or float32; dtype == INFINI_DTYPE_INVALID: no bias
    bool quantize_x = false;
    void *workspace = nullptr; // workspace_size() bytes
};

// The layout of quantized x in the workspace on CUDA: rows, padded for vectors of 16 bytes, then their scales.
struct QuantizedX {
    int64_t rows, pitch;
    explicit QuantizedX(const TensorView &x) : rows(1), pitch((x.size(-1) + 15) / 16 * 16) {
        for (int dim = 0; dim + 1 < x.ndim; ++dim) {
            rows *= x.shape[dim];
        }
    }
    int64_t scales_at() const { return rows * pitch; }
    int64_t bytes() const { return scales_at() + (rows * static_cast<int64_t>(sizeof(float)) + 15) / 16 * 16; }
};

enum class Format { kInt8, kInt4 };

// The bytes that run needs at args.workspace, aligned to 16, on the context's device. args.y must be set.
size_t workspace_size(const ExecutionContext &context, Format format, const Args &args);

// On CUDA: the call as a product for cuBLAS, with the quantized x in the workspace if quantize_x; and the bytes it
// needs.
many_rows::Problem many_rows_problem(const Args &args);
size_t cuda_workspace_bytes(const ExecutionContext &context, const Args &args);

// A longer sum of int8 products could overflow int32: 127 * 128 * 132105 > 2^31.
constexpr int64_t kMaxDepth = 131071;

// Check the arguments against the rules above: the inputs, which determine the shape of y; then y too.
void check_inputs(Format format, const Args &args);
void check_output(Format format, const Args &args);

// Computes y. Call after the checks.
void run(const ExecutionContext &context, Format format, const Args &args);

INFINI_CPU_KERNEL(int8_kernel, Args)
INFINI_CPU_KERNEL(int4_kernel, Args)
// For quantize_x.
INFINI_DOT_KERNEL(int8_quantized_x_kernel, Args)
INFINI_DOT_KERNEL(int4_quantized_x_kernel, Args)
// For bfloat16 x, and with quantize_x for x of any dtype.
INFINI_TILE_KERNEL(int8_tile_kernel, Args)
INFINI_TILE_KERNEL(int4_tile_kernel, Args)
INFINI_TILE_KERNEL(int8_quantized_x_tile_kernel, Args)
INFINI_TILE_KERNEL(int4_quantized_x_tile_kernel, Args)

extern KernelTable<Args> int8_kernels, int4_kernels;
extern KernelTable<Args> int8_quantized_x_kernels, int4_quantized_x_kernels; // for quantize_x

} // namespace infini::quantized_linear
