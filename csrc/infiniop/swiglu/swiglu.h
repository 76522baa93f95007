// silu:   y = x / (1 + e^-x), for each element of x.
// swiglu: y = silu(gate) * up, for each element of gate and up, or of the two halves of a fused product [..., 2d].
// One kernel serves both; arithmetic in float, in the order (gate / (1 + e^-gate)) * up, and one rounding at the end.
#pragma once

#include "check.h"
#include "cpu_capability.h"
#include "tensor_view.h"

namespace infini::swiglu {

struct Args {
    TensorView y;    // the shape and dtype of gate
    TensorView gate; // any shape; stride 1 in the last dimension. silu's x
    TensorView up;   // the shape and dtype of gate; dtype invalid: plain silu
};

// Takes args.gate for a fused product [..., 2d] and leaves its two halves as args.gate, the first, and args.up.
void split(const Checker &rule, Args &args);

// Checks the arguments against the rules above, then computes y, which may be gate or up itself.
void run(const char *op, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)

} // namespace infini::swiglu
