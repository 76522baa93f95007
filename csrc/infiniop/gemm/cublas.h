// Dense products by cuBLAS, which is loaded at the first call: no build and no library depends on it.
// Its workspace comes with each call, so that a call allocates nothing and can be captured into a graph.
#pragma once

#include "gemm.h"

namespace infini::gemm {

// Whether cuBLAS takes the layouts: rows (or columns) of stride 1 that do not overlap, steps that are not negative.
bool cublas_takes(const Args &args);

// c = alpha * a @ b + beta * c for layouts that it takes, k > 0, summed in float (in int32 for int8). Beside the dtypes
// of gemm: a and b in a half type with c in float32, and int8 with c in int32. Which of its kernels cuBLAS runs, and so
// the order of the sum, depends on shapes, strides and alignment.
void multiply_by_cublas(const ExecutionContext &context, const Args &args);

} // namespace infini::gemm
