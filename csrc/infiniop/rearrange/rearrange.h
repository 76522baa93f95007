// rearrange: dst = src, element by element, between any strides and for any dtype (only its size matters). src may be
// broadcast by stride 0.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::rearrange {

struct Args {
    TensorView dst; // any shape
    TensorView src; // the shape and dtype of dst
};

// The names of dst and src in messages, and which of them the other one is compared with.
struct Names {
    const char *tensors[2];
    int first;
};

constexpr Names kNames{{"dst", "src"}, 0};

// Checks the arguments against the rules above. dst may alias src; then nothing is copied.
void check(const Args &args, const Names &names = kNames);

// Checks them, then copies.
void run(const ExecutionContext &context, const Args &args, const Names &names = kNames);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::rearrange
