// selective_scan: Mamba's state space, for each sequence and channel:
//   S = exp(dt[t] * a) * S + dt[t] * x[t] * b[t];  y[t] = (S . c[t] + d * x[t]) * silu(z[t])
// S [N] starts from the sequence's row of the state, which is replaced; without a state from zero. dt is first added to its
// bias and passed through softplus, as asked for. All in float, y rounded once.
#pragma once

#include "sequence_states/sequence_states.h"
#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::selective_scan {

struct Args {
    TensorView y;       // the shape of x, its dtype or float32
    TensorView x;       // [batch, length, channels] or [tokens, channels]
    TensorView dt;      // the shape of x, its dtype or float32, any strides
    TensorView a;       // [channels, N] float32
    TensorView b;       // [batch, length, N] or [tokens, N], the dtype of x
    TensorView c;       // the shape and dtype of b
    TensorView d;       // [channels], the dtype of x or float32, or absent
    TensorView dt_bias; // [channels], likewise
    TensorView z;       // the shape and dtype of x, any strides, or absent
    TensorView state;   // [rows, channels, N] float32, or absent
    Sequences sequences;
    bool dt_softplus = false;
};

void check(const Args &args);

// Checks the arguments, then computes y and writes the state.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::selective_scan
