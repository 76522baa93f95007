// add_lora: LoRA adapters of many requests in one batch. For each row t with s = index[t] >= 0:
//     y[t] += (x[t] a[s]^T) b[s],  y [tokens, n], x [tokens, k], a [slots, r, k], b [slots, r, n], index [tokens];
// other rows of y stay as they are. In float, y rounded once; the bits of a row depend on no other row.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::add_lora {

struct Args {
    TensorView y;     // [tokens, n], the dtype of x, read and written; any row stride
    TensorView x;     // [tokens, k], any row stride
    TensorView a;     // [slots, r, k], the dtype of x
    TensorView b;     // [slots, r, n], the dtype of x: transposed, and multiplied by the adapter's scale
    TensorView index; // [tokens] int64 or int32, below slots; negative: no adapter
};

// Checks the arguments, on the CPU also the values of index, then adds.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::add_lora
