// softmax:     y = exp(x - m) / sum exp(x - m) along any dimension, m the largest x there.
// log_softmax: y = x - m - log(sum exp(x - m)).
// Arithmetic in float, rounded once.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::softmax {

struct Args {
    TensorView y;  // the shape of x; softmax: and its dtype, log_softmax: any of the dtypes; may be x itself
    TensorView x;  // one dimension at least
    int axis = -1; // negative ones count from the last dimension
    bool log = false;
};

// The names of the arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *y, *axis;
};

// Checks the arguments against the rules above.
void check(const Args &args, const Names &names);

// Checks them, then computes y.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::softmax
