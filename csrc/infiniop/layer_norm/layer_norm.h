// layer_norm, over the last dimension of input [..., n], optionally with the statistics that a backward pass needs:
//   deviation = sqrt(var + eps), var the mean square of input - mean; standardization = (input - mean) / deviation;
//   output = standardization * weight + bias. Arithmetic in float, each output rounded once.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::layer_norm {

struct Args {
    TensorView output; // [..., n], may be input itself
    // May alias input if output does not; dtype INFINI_DTYPE_INVALID: no statistics wanted.
    TensorView standardization; // [..., n]
    TensorView deviation;       // [...]
    TensorView input;           // [..., n], one dimension at least
    TensorView weight; // [n], the dtype of input or float32, as bias has; dtype INFINI_DTYPE_INVALID: no weight
    TensorView bias;   // [n], or dtype INFINI_DTYPE_INVALID: no bias
    double eps = 0;
};

// The names of the arguments in messages: the C ABI and torch name them differently.
struct Names {
    const char *output, *input;
    const char *to_match; // "to match the last dimension of <input>"
};

// Checks the arguments against the rules above.
void check(const Args &args, const Names &names);

// Checks the arguments, then computes the outputs.
void run(const ExecutionContext &context, const Args &args, const Names &names);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::layer_norm
