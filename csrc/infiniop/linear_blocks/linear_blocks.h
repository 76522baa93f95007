// linear_blocks: y = x @ w^T + bias with a weight in blocks: runs of a row's elements that carry their own scales, as
// GGUF files and checkpoints in FP8, MXFP4 and NF4 have them. x keeps its dtype; blocks are decoded a few rows at a time
// in cache, so that memory moves only the blocks: to floats, or to bfloat16 where that is multiplied in pairs or tiles.
// A kind of block is a decoder that registers itself (kinds.h).
#pragma once

#include <cstddef>

#include "cpu_capability.h"
#include "kernel_table.h"
#include "kinds.h"
#include "tensor_view.h"

namespace infini::linear_blocks {

struct Args {
    TensorView y;      // [..., n], the dtype of x
    TensorView x;      // [..., k]
    TensorView weight; // [n, k / kind->elements, kind->bytes] uint8, the blocks of a row adjacent
    TensorView bias;   // [n], the dtype of x or float32; dtype == INFINI_DTYPE_INVALID: no bias
    const Kind *kind = nullptr;
    void *workspace = nullptr; // workspace_size() bytes
};

// Decodes rows of a weight to `to` [rows, k], of any floating dtype: rounded once.
struct UnpackArgs {
    TensorView weight, to;
    const Kind *kind;
};

// Check the arguments against the rules above: the inputs, which determine the shape of y; then y too.
void check_inputs(const Args &args);
void check_output(const Args &args);

// The bytes that run needs at args.workspace, aligned to 256, on the context's device. args.y must be set.
size_t workspace_size(const ExecutionContext &context, const Args &args);

// Computes y. Call after the checks.
void run(const ExecutionContext &context, const Args &args);

// The sums are in float, in an order that depends on k alone; of bfloat16 in pairs in that of linear.
INFINI_CPU_KERNEL(multiply_kernel, Args)
INFINI_CPU_KERNEL(unpack_kernel, UnpackArgs)

extern KernelTable<Args> kernels;

} // namespace infini::linear_blocks
