// ssd: Mamba-2's state space duality, for each sequence and head:
//   S = exp(dt[t] * a) * S + dt[t] * x[t] b[t]^T;  y[t] = S c[t] + d * x[t]
// S [P, N] starts from the sequence's row of the state, which is replaced; without a state from zero. dt is first added to
// its bias, passed through softplus and limited, as asked for. All in float, y rounded once.
#pragma once

#include "sequence_states/sequence_states.h"
#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

#include <limits>

namespace infini::ssd {

struct Args {
    TensorView y;       // the shape of x, its dtype or float32
    TensorView x;       // [batch, length, H, P] or [tokens, H, P]
    TensorView dt;      // [batch, length, H] or [tokens, H], the dtype of x or float32
    TensorView a;       // [H] float32
    TensorView b;       // [batch, length, G, N] or [tokens, G, N]; head h belongs to h / (H / G)
    TensorView c;       // the shape and dtype of b
    TensorView d;       // [H], the dtype of x or float32, or absent
    TensorView dt_bias; // [H], likewise
    TensorView state;   // [rows, H, P, N] float32, or absent
    Sequences sequences;
    bool dt_softplus = false;
    double dt_min = -std::numeric_limits<double>::infinity();
    double dt_max = std::numeric_limits<double>::infinity();
};

void check(const Args &args);

// Checks the arguments, then computes y and writes the state.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::ssd
