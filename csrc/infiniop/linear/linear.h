// linear: y = x @ weight^T + bias; x [..., k], weight [n, k], bias [n], y [..., n].
// The kernel reads the row-major weight as it lies in memory, once for every 32 rows of x, with no second copy of it.
// Products are summed in float in an order that depends on k alone: a row of x gives the same bits in any batch.
#pragma once

#include "cpu_capability.h"
#include "tensor_view.h"

namespace infini::linear {

struct Args {
    TensorView y;      // [..., n], the dtype of x
    TensorView x;      // [..., k]
    TensorView weight; // [n, k], the dtype of x; any row stride
    TensorView bias;   // [n], the dtype of x; dtype == INFINI_DTYPE_INVALID: none
};

// Check the arguments against the rules above: first all but y, whose shape follows from them, then y.
void check_inputs(const Args &args);
void check_output(const Args &args);

// Whether run() is faster for this many rows, or the dense product that ATen borrows from oneDNN and MKL.
bool kernel_is_faster(const Args &args);

// Computes y of arguments that were checked; any number of rows.
void run(const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)

} // namespace infini::linear
