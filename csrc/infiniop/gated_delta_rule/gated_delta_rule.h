// gated_delta_rule: linear attention with a decay and a correction, for each sequence and head of v:
//   S = exp(g[t]) * S;  S = S + k[t] (beta[t] * (v[t] - k[t]^T S));  y[t] = scale * q[t]^T S
// S [Dk, Dv] starts from the sequence's row of the state, which is replaced; without a state from zero. With l2norm, q[t]
// and k[t] are divided by sqrt(sum of squares + 1e-6) first. All in float, y rounded once.
#pragma once

#include "sequence_states/sequence_states.h"
#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::gated_delta_rule {

struct Args {
    TensorView y;     // the shape and dtype of v
    TensorView q;     // [batch, length, Hk, Dk] or [tokens, Hk, Dk]
    TensorView k;     // the shape and dtype of q
    TensorView v;     // [batch, length, Hv, Dv] or [tokens, Hv, Dv]; head h belongs to h / (Hv / Hk) of q and k
    TensorView g;     // [batch, length, Hv] or [tokens, Hv], the dtype of q or float32
    TensorView beta;  // the shape of g, likewise
    TensorView state; // [rows, Hv, Dk, Dv] float32, or absent
    Sequences sequences;
    double scale = 1;
    bool l2norm = false;
};

void check(const Args &args);

// Checks the arguments, then computes y and writes the state.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::gated_delta_rule
