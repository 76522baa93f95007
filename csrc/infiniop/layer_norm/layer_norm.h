// layer_norm, over the last dimension of input [..., n], with all that a backward pass would need:
//   deviation = sqrt(var + eps), var the mean square of input - mean; standardization = (input - mean) / deviation;
//   output = standardization * weight + bias. Arithmetic in float, each output rounded once.
#pragma once

#include "cpu_capability.h"
#include "tensor_view.h"

namespace infini::layer_norm {

struct Args {
    TensorView output;          // [..., n], may be input itself
    TensorView standardization; // [..., n], may be input itself if output is not
    TensorView deviation;       // [...]
    TensorView input;           // [..., n], one dimension at least
    TensorView weight;          // [n]
    TensorView bias;            // [n], or of dtype INFINI_DTYPE_INVALID: none
    double eps = 0;
};

// Checks the arguments against the rules above.
void check(const Args &args);

// Checks them, then computes the outputs.
void run(const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)

} // namespace infini::layer_norm
