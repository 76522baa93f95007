// linear: y = x @ weight^T + bias; x [..., k], weight [n, k], bias [n], y [..., n]. fused_linear: up to three weights;
// their results are concatenated along the columns of y. Products are summed in float in an order that depends on k
// alone: a row of x has the same bits in any call. On CUDA that holds for few rows; cuBLAS multiplies more.
// linear_add: y = linear + residual, rounded twice: the bits of linear followed by add.
#pragma once

#include "check.h"
#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::linear {

constexpr int kMaxWeights = 3;

struct Args {
    TensorView y; // [..., the sum of n], the dtype of x
    TensorView x; // [..., k]
    int weights = 1;
    TensorView weight[kMaxWeights]; // [n, k], the dtype of x; any row stride
    TensorView bias[kMaxWeights];   // [n], the dtype of x or float32; dtype == INFINI_DTYPE_INVALID: no bias
    TensorView residual; // the shape, dtype and strides of y, which it may alias; INFINI_DTYPE_INVALID: no residual
    void *workspace = nullptr; // CUDA: workspace_bytes() bytes; nullptr: cuBLAS allocates
};

// An op's name, its arguments' names, and the reasons for their sizes, for messages.
struct Op {
    Checker rule;
    const char *weight[kMaxWeights], *bias[kMaxWeights];
    Reason bias_reason[kMaxWeights], out_reason;
};
constexpr Op kLinear{
    Checker("linear"), {"weight"}, {"bias"}, {"to match the rows of weight"}, "the rows of x by the rows of weight"};
constexpr Op kLinearAdd{Checker("linear_add"),
                        {"weight"},
                        {"bias"},
                        {"to match the rows of weight"},
                        "the rows of x by the rows of weight"};
constexpr Op kFusedLinear{Checker("fused_linear"),
                          {"a", "b", "c"},
                          {"bias_a", "bias_b", "bias_c"},
                          {"to match the rows of a", "to match the rows of b", "to match the rows of c"},
                          "the rows of x by those of all weights"};

// The number of columns of y.
int64_t columns(const Args &args);

// Merges the rows of x into one dimension; returns false if their strides do not allow it.
bool as_matrix(const TensorView &x, TensorView &matrix);

// Check the arguments against the rules above: the inputs, which determine the shape of y; then y too.
void check_inputs(const Op &op, const Args &args);
void check_output(const Op &op, const Args &args);

// Computes y, for any number of rows. Call after the checks.
void run(const ExecutionContext &context, const Args &args);

// CPU kernels. few_rows reads weights in place, once for every 32 rows of x; many_rows packs both operands, for
// bfloat16.
INFINI_CPU_KERNEL(few_rows_kernel, Args)
INFINI_CPU_KERNEL(many_rows_kernel, Args)
INFINI_TILE_KERNEL(tile_kernel, Args) // for any number of rows of bfloat16
extern KernelTable<Args> kernels;

// The bytes that run uses at args.workspace; 0 without cuBLAS. Call after the checks.
inline size_t workspace_bytes(const ExecutionContext &context, const Args &args) {
    return args.y.numel() > 0 ? kernels.workspace_bytes(context, args) : 0;
}

} // namespace infini::linear
