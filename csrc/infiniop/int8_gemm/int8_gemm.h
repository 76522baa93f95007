// int8_gemm: out = (x @ weights) * x_scale * weights_scale + bias, with int8 x [m, k] and weights [k, n] and one scale
// per row of x and per column of weights (W8A8 quantized layers). The product is exact, in int32; the rest is computed
// in float and rounded once. Column-major weights, stride (1, k), are read in place; others are transposed first, at
// some cost.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "quantized_linear/many_rows.h"
#include "tensor_view.h"

namespace infini::int8_gemm {

// A longer sum could overflow int32: (-128)^2 * 131072 = 2^31.
constexpr int64_t kMaxDepth = 131071;

struct Args {
    TensorView out;            // [m, n] float32, bfloat16 or float16
    TensorView bias;           // [n], the dtype of out; dtype == INFINI_DTYPE_INVALID: no bias
    TensorView x;              // [m, k] int8, rows of stride 1
    TensorView x_scale;        // [m] float32
    TensorView weights;        // [k, n] int8, any strides
    TensorView weights_scale;  // [n] float32
    int64_t slice_bytes = 0;   // as many_rows::Problem::slice_bytes
    void *workspace = nullptr; // workspace_size() bytes
};

// The names of the op and its arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *op, *x, *x_scale, *weights, *weights_scale;
};

constexpr Names kNames{"int8_gemm", "x", "x_scale", "weights", "weights_scale"};

// Removes a leading dimension of size 1 from the matrices, and dimensions of size 1 from scales [m, 1], [1, n] or [n,
// 1].
void squeeze(Args &args);

// Rows of x from which on tiles are used; with fewer, vectors reach memory bandwidth. Measured on an Intel Xeon
// (Sapphire Rapids): tiles had 0.94 of the vectors' speed at 8 rows, 1.35 at 16. Sums are exact, so the choice changes
// no bit.
constexpr int64_t kTileRowsFrom = 10;

// Checks the (squeezed) arguments against the rules above. Then run computes out.
void check(const Args &args, const Names &names);
void run(const ExecutionContext &context, const Args &args, const Names &names);

// The bytes that run needs at args.workspace on the context's device.
size_t workspace_size(const ExecutionContext &context, const Args &args);

// The call as a product for cuBLAS.
many_rows::Problem many_rows_problem(const Args &args);

INFINI_DOT_KERNEL(cpu_kernel, Args)
INFINI_TILE_KERNEL(tile_kernel, Args) // for column-major weights
extern KernelTable<Args> kernels;

} // namespace infini::int8_gemm
