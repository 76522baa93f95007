// softmax:     y = exp(x - m) / sum exp(x - m) along any dimension, where m is the largest x along it.
// log_softmax: y = x - m - log(sum exp(x - m)).
// Computed in float, rounded once.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::softmax {

struct Args {
    TensorView y;  // the shape of x; softmax: the dtype of x, log_softmax: any supported dtype; may alias x
    TensorView x;  // one dimension at least
    int axis = -1; // a negative axis counts from the last dimension
    bool log = false;
};

// The names of the arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *y, *axis;
};

// Checks the arguments against the rules above.
void check(const Args &args, const Names &names);

// Checks the arguments, then computes y.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::softmax
