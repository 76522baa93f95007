// Dense products by cuBLAS, which is loaded at the first call: neither the build nor a library depends on it. Each call
// passes cuBLAS's workspace, so a call allocates nothing and can be captured into a graph.
#pragma once

#include "gemm.h"

namespace infini::gemm {

// Whether cuBLAS supports the layouts: rows (or columns) of stride 1 that do not overlap, and no negative strides.
bool cublas_takes(const Args &args);

// c = alpha * a @ b + beta * c for layouts that cublas_takes, k > 0, summed in float (int8: in int32). Besides gemm's
// dtypes it supports a and b in a half type with c in float32, and int8 with c in int32. cuBLAS chooses a kernel, and
// with it the order of the sum, by shapes, strides and alignment. With beta, an H100's kernels round alpha * a @ b to
// the dtype of c before they add.
void multiply_by_cublas(const ExecutionContext &context, const Args &args);

// c = a @ b + bias, rounded once, for matrices of one float dtype; the bias is dense, of c's dtype, one element for each
// column of c. alpha and beta are not read. Returns false, and does nothing, if cuBLASLt supports no such product.
bool multiply_with_bias(const ExecutionContext &context, const Args &args, const void *bias);

} // namespace infini::gemm
