// causal_conv1d: y[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - width + 1 + j, c]), for each sequence and channel.
// What precedes a sequence is in its row of the state, which is replaced by the sequence's last columns; without a state
// it is zero. Arithmetic in float, one rounding; act is silu or nothing.
#pragma once

#include "sequence_states/sequence_states.h"
#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::causal_conv1d {

constexpr int64_t kMinWidth = 2, kMaxWidth = 8;

struct Args {
    TensorView y;      // the shape and dtype of x
    TensorView x;      // [batch, length, channels] or [tokens, channels]
    TensorView weight; // [channels, width], the dtype of x or float32
    TensorView bias;   // [channels], the dtype of weight; or absent
    // [rows, channels, columns], the dtype of x, columns >= width - 1, the newest last; or absent.
    TensorView state;
    Sequences sequences;
    bool silu = false;
};

void check(const Args &args);

// Checks the arguments, then computes y and writes the state.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::causal_conv1d
