// quantize_int8 and quantize_int4: weights [n, k] as integers with float scales, in the form that linear_int8 and
// linear_int4 read. int8, by rows: scale = max |w| / 127, q = round(w / scale). int4, by groups of a row: scale = (most
// - least) / 15 and zero = least + 8 scale, both rounded to the dtype of w; q = round((w - zero) / scale) + 8, element
// 2i in the lower half of byte i. Computed in float, rounded to nearest even; a scale of 0 divides as 1. If a row or
// group of w is not finite, its scale (and zero) is NaN and q is 0.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::quantize {

// Up to this size the calling thread quantizes alone, so that each thread of a loader can do a part of a weight.
constexpr int64_t kParallelBytes = 2 << 20;

struct Args {
    TensorView q;       // int8 [n, k], or uint8 [n, k / 2]
    TensorView scales;  // float32 [n], or of weight's dtype [n, k / group_size]
    TensorView zeros;   // int4: as scales; dtype INFINI_DTYPE_INVALID: int8
    TensorView weight;  // [n, k] float32, bfloat16 or float16
    int64_t group_size; // int4: 32, 64 or 128; divides k
};

// Check only weight and group_size, which determine the outputs' shapes.
void check_int8(const Args &args);
void check_int4(const Args &args);

// Check the arguments, then compute the outputs.
void run_int8(const ExecutionContext &context, const Args &args);
void run_int4(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(int8_kernel, Args)
INFINI_CPU_KERNEL(int4_kernel, Args)
extern KernelTable<Args> int8_kernels, int4_kernels;

} // namespace infini::quantize
