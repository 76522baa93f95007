// embedding: out[...] = weight[ids[...]]: rows of a table [v, n], picked by ids of any shape, one copied after another.
// Where weight is a part of a larger table, as ranks that share one have it, ids of the other parts give zeros.
// On the CPU every id is checked before anything is copied; on CUDA, where the host does not read the ids, the row of
// one out of range becomes NaN.
// The copy knows no arithmetic, so a row arrives bit for bit.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::embedding {

struct Args {
    TensorView out;    // [*ids.shape, n], the dtype of weight
    TensorView ids;    // any shape of up to 7 dimensions and any strides, int64 or int32, in 0 .. total - 1
    TensorView weight; // [v, n], stride 1 in the last dimension: the rows first .. first + v - 1 of the table
    int64_t first = 0, total = 0;
};

// Checks the arguments against the rules above, all but the values of ids; memory only where there is some (data ==
// nullptr: not yet). out shares no memory with the others.
void check(const Args &args);

// Checks the arguments, then copies.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::embedding
