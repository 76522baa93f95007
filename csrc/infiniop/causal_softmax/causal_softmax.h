// causal_softmax: softmax over the last dimension of x [..., q, k], q <= k, whose rows are the queries of the last q of
// k tokens: row i sees columns j <= k - q + i; the other columns become 0. Computed in float, rounded once; the row's
// maximum is subtracted first.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::causal_softmax {

struct Args {
    TensorView y; // the shape and dtype of x; may alias x
    TensorView x; // [..., q, k]
};

// Checks the arguments against the rules above.
void check(const Args &args);

// Checks the arguments, then computes y.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::causal_softmax
