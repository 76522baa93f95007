// dequantize_awq: out = (q - zero) * scale, half-precision weights from AWQ's 4-bit integers.
// Eight columns share an int32: column 8c + j is in bits 4b to 4b + 3 of integer c, b = (0, 4, 1, 5, 2, 6, 3, 7)[j].
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::dequantize_awq {

struct Args {
    TensorView out;     // [in, n] float16, n a multiple of 8
    TensorView qweight; // [in, n / 8] int32
    TensorView scales;  // [groups, n] float16; row i belongs to group i / (in / groups)
    TensorView zeros;   // [groups, n / 8] int32
};

void check(const Args &args);

// Checks the arguments, then computes out.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::dequantize_awq
