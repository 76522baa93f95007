// topksoftmax and topkrouter choose the experts of a mixture (MoE) for each token from scores x [N, width]. The
// formulas are in infiniop/ops/topksoftmax.h and topkrouter.h. Computed in float; among equal values the lower index
// comes first; NaN counts as larger than any number.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::topk {

constexpr int64_t kExperts = 256, kGroups = 8, kGroupSize = kExperts / kGroups, kKeptGroups = 4;

struct Args {
    TensorView values;  // [N, topk] float32, stride 1 in a row; dtype INFINI_DTYPE_INVALID: not known yet
    TensorView indices; // [N, topk] int32, stride 1 in a row
    TensorView x;       // [N, width], stride 1 in a row
    TensorView bias;    // [256] float32, any stride; dtype INFINI_DTYPE_INVALID: the op is topksoftmax
    size_t topk = 0;
    bool normalize = false; // for topksoftmax: divide by the sum
    float scale = 1;        // for topkrouter
};

// The names of the arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *values, *indices, *topk;
};

// Sets topk; sets values and indices to contiguous views unless they are described already.
void set_topk(Args &args, size_t topk);

// Checks the arguments against the rules above; topk and the outputs only if they are known.
void check(const Args &args, const Names &names);

// Checks the arguments, then computes the outputs.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(softmax_kernel, Args)
INFINI_CPU_KERNEL(router_kernel, Args)
extern KernelTable<Args> softmax_kernels, router_kernels;

} // namespace infini::topk
