// topksoftmax and topkrouter: the experts of a mixture (MoE) for each token, from scores x [N, width].
// The formulas are in infiniop/ops/topksoftmax.h and topkrouter.h. Arithmetic in float; among equal values the lower
// index comes first; a NaN counts as larger than any number.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::topk {

constexpr int64_t kExperts = 256, kGroups = 8, kGroupSize = kExperts / kGroups, kKeptGroups = 4;

struct Args {
    TensorView values;  // [N, topk] float32, stride 1 in a row; of dtype INFINI_DTYPE_INVALID: not known yet
    TensorView indices; // [N, topk] int32, stride 1 in a row
    TensorView x;       // [N, width], stride 1 in a row
    TensorView bias;    // [256] float32, any stride; of dtype INFINI_DTYPE_INVALID: topksoftmax
    size_t topk = 0;
    bool normalize = false; // topksoftmax: divide by the sum
    float scale = 1;        // topkrouter
};

// The names of the arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *values, *indices, *topk;
};

// Sets topk, and values and indices, where they are not described, to contiguous views.
void set_topk(Args &args, size_t topk);

// Checks the arguments against the rules above; topk and the outputs once they are known.
void check(const Args &args, const Names &names);

// Checks them, then computes the outputs.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(softmax_kernel, Args)
INFINI_CPU_KERNEL(router_kernel, Args)
extern KernelTable<Args> softmax_kernels, router_kernels;

} // namespace infini::topk
