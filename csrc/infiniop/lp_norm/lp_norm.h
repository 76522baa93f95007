// lp_norm: y = x / (norm + eps) along any dimension, norm = (sum |x|^p)^(1 / p), p a whole number of at least 1.
// Computed in float, rounded once. If powers overflow or underflow a float, they are computed relative to the largest
// |x|.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::lp_norm {

struct Args {
    TensorView y;  // the shape and dtype of x; may alias x
    TensorView x;  // one dimension at least
    int axis = -1; // a negative axis counts from the last dimension
    int64_t p = 2;
    double eps = 0;
};

// The names of the arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *y, *x, *axis;
};

// Checks the arguments against the rules above.
void check(const Args &args, const Names &names);

// Checks the arguments, then computes y.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::lp_norm
