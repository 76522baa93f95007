// The arithmetic of the reductions: out[i] = in[0][i] op in[1][i] op ..., from left to right, for dense arrays of any
// alignment and any dtype that infiniccl.cpp accepts. Half types are computed in float and rounded once. infiniccl.h
// defines each op.
#pragma once

#include "cpu_capability.h"
#include "infiniccl.h"

namespace infini::ccl {

struct Reduction {
    void *out = nullptr;
    const void *const *in = nullptr; // one array per rank; any of them may be `out` itself
    int inputs = 0;                  // at least 1
    int64_t count = 0;
    infiniDtype_t dtype = INFINI_DTYPE_INVALID;
    infinicclReduceOp_t op = INFINICCL_SUM;
};

INFINI_CPU_KERNEL(reduce, Reduction)

} // namespace infini::ccl
