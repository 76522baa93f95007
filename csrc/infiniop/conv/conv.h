// conv: y[n, o, p] = bias[o] + sum over c and k of w[o, c, k] * x[n, c, p * stride - pad + k * dilation], in 1 to 6
// spatial dimensions; x is 0 outside of its shape. A convolution is the matrix product of w [Cout, Cin * kernel] with
// the im2col matrix of x, which is computed tile by tile (on the CPU in the workspace, which also holds copies of w and
// y if they are not contiguous).
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::conv {

constexpr int kMaxSpatial = kMaxDims - 2;

struct Args {
    TensorView y;    // [N, Cout, out...]; shares no memory with the others
    TensorView x;    // [N, Cin, in...], the dtype of y
    TensorView w;    // [Cout, Cin, kernel...], the dtype of y
    TensorView bias; // [Cout], the dtype of y; dtype == INFINI_DTYPE_INVALID: no bias
    int spatial = 0; // how many of the dimensions are spatial
    // Per spatial dimension: zeros added before and after x, the kernel's step in x, the step within the kernel.
    int64_t pads[kMaxSpatial] = {}, strides[kMaxSpatial] = {}, dilations[kMaxSpatial] = {};
    void *workspace = nullptr;
};

// Checks all arguments except y and bias; returns the shape and dtype of y.
TensorView output_of(const Args &args);

// Checks all arguments against the rules above.
void check(const Args &args);

// The bytes that run needs at args.workspace.
size_t workspace_size(const ExecutionContext &context, const Args &args);

// Checks the arguments, then computes y.
void run(const ExecutionContext &context, const Args &args);

// One tile of the product: columns first .. first + columns - 1 of image `image`.
struct Tile {
    const Args *args;
    int64_t image, first, columns;
};

// Writes the im2col tile of the output positions to the workspace, [Cin * kernel, columns], and the bias to y.
INFINI_CPU_KERNEL(cpu_kernel, Tile)

// Call after check(); y must not be empty.
extern KernelTable<Args> kernels;

} // namespace infini::conv
