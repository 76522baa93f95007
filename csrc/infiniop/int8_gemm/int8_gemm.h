// int8_gemm: out = (x @ weights) * x_scale * weights_scale + bias; x [m, k] and weights [k, n] int8, a scale for each
// row of x and each column of weights (W8A8 quantized layers). The product is exact, in int32; then float, rounded
// once. Column-major weights, stride (1, k), are read in place; others are transposed first, at some cost.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "quantized_linear/many_rows.h"
#include "tensor_view.h"

namespace infini::int8_gemm {

// With more terms a sum could overflow int32: (-128)^2 * 131072 = 2^31.
constexpr int64_t kMaxDepth = 131071;

struct Args {
    TensorView out;            // [m, n] float32, bfloat16 or float16
    TensorView bias;           // [n], the dtype of out; dtype == INFINI_DTYPE_INVALID: none
    TensorView x;              // [m, k] int8, rows of stride 1
    TensorView x_scale;        // [m] float32
    TensorView weights;        // [k, n] int8, any strides
    TensorView weights_scale;  // [n] float32
    int64_t slice_bytes = 0;   // of many_rows::Problem
    void *workspace = nullptr; // as workspace_size says
};

// The names of the op and its arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *op, *x, *x_scale, *weights, *weights_scale;
};

constexpr Names kNames{"int8_gemm", "x", "x_scale", "weights", "weights_scale"};

// Removes a leading dimension of size 1 from the matrices, and the 1 from scales that are [m, 1], [1, n] or [n, 1].
void squeeze(Args &args);

// Rows of x from which on tiles are used: below, vectors reach the memory's bandwidth. Measured on an Intel
// Xeon (Sapphire Rapids): at 8 rows 0.94 of their speed, at 16 1.35. Sums are exact, so it changes no bit.
constexpr int64_t kTileRowsFrom = 10;

// Checks the (squeezed) arguments against the rules above; run then computes out.
void check(const Args &args, const Names &names);
void run(const ExecutionContext &context, const Args &args, const Names &names);

// The bytes that run needs at args.workspace on the context's device.
size_t workspace_size(const ExecutionContext &context, const Args &args);

// The call as a product that cuBLAS may compute.
many_rows::Problem many_rows_problem(const Args &args);

INFINI_DOT_KERNEL(cpu_kernel, Args)
INFINI_TILE_KERNEL(tile_kernel, Args) // of column-major weights
extern KernelTable<Args> kernels;

} // namespace infini::int8_gemm
