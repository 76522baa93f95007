// topksoftmax and topkrouter: which experts of a mixture get each token, from scores x [N, width].
// The formulas stand in infiniop/ops/topksoftmax.h and topkrouter.h. Arithmetic in float; of equals the one with the
// lower index comes first; a NaN counts as larger than any number.
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

// What a door calls the arguments, for its sentences.
struct Names {
    const char *values, *indices, *topk;
};

// Sets topk, and with it what values and indices are where nobody describes them: contiguous.
void set_topk(Args &args, size_t topk);

// Checks the arguments against the rules above; topk and the outputs once they are known.
void check(const Args &args, const Names &names);

// Checks them, then computes the outputs.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(softmax_kernel, Args)
INFINI_CPU_KERNEL(router_kernel, Args)
extern KernelTable<Args> softmax_kernels, router_kernels;

} // namespace infini::topk
