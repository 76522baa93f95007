// embedding: out[...] = weight[ids[...]]: copies rows of a table [v, n] bit for bit, by ids of any shape. If weight is
// a rank's shard of a larger table, ids of the other shards give zeros.
// On the CPU every id is checked before anything is copied. On CUDA the host does not read the ids; an id out of range
// gives a row of NaN.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::embedding {

struct Args {
    TensorView out;    // [*ids.shape, n], the dtype of weight
    TensorView ids;    // any shape of up to 7 dimensions and any strides, int64 or int32, in 0 .. total - 1
    TensorView weight; // [v, n], stride 1 in the last dimension: rows first .. first + v - 1 of the table
    int64_t first = 0, total = 0;
};

// Checks the arguments against the rules above, except the values of ids. Overlap is checked only for tensors that have
// memory (data != nullptr): out must not share any with the others.
void check(const Args &args);

// Checks the arguments, then copies.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::embedding
