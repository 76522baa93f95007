// rearrange: dst = src, element by element, between any strides; of any dtype, since only its size counts.
// src may be broadcast by stride 0.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::rearrange {

struct Args {
    TensorView dst; // any shape
    TensorView src; // the shape and dtype of dst
};

// The names of dst and src in messages, and which of the two the other is compared with.
struct Names {
    const char *tensors[2];
    int first;
};

constexpr Names kNames{{"dst", "src"}, 0};

// Checks the arguments against the rules above; dst may be src itself, and then nothing is done.
void check(const Args &args, const Names &names = kNames);

// Checks them, then copies.
void run(const ExecutionContext &context, const Args &args, const Names &names = kNames);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::rearrange
