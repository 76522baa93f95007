// The kinds of blocks on CUDA: a source registers its kinds with their kernels, beside those of the CPU (kinds.h).
#pragma once

#include "indices.h"
#include "linear_blocks.h"

namespace infini::linear_blocks {

// Rows of a weight, decoded to `to` [rows, k] in its dtype: all, or those of the ids, where others give rows of NaN.
struct RowsToDecode {
    TensorView weight, to;
    Indices ids; // or absent
};

struct KindOnCuda {
    int64_t number;                                           // that of its Kind
    void (*multiply)(const ExecutionContext &, const Args &); // y of a few rows of x
    void (*decode)(const ExecutionContext &, const RowsToDecode &);
};

struct RegisteredKindOnCuda {
    explicit RegisteredKindOnCuda(const KindOnCuda &kind);
};

// Throws for a kind without kernels; `op`: the name in the message.
const KindOnCuda &kind_on_cuda(const char *op, const Kind &kind);

} // namespace infini::linear_blocks
