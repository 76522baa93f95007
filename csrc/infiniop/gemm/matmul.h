// matmul: out = alpha * a @ b + beta * c by gemm's kernel, with the shapes of torch.matmul: a [..., m, k] and b [...,
// k, n] with leading dimensions that broadcast. A one-dimensional a is a row and a one-dimensional b a column; out
// lacks that dimension. c broadcasts to out. Each matrix is row-major or column-major, as in gemm.
#pragma once

#include "gemm.h"

namespace infini::matmul {

struct Args {
    TensorView out; // as output_of() returns; shares no memory with a or b, and may be c itself
    TensorView a;   // float32, bfloat16 or float16
    TensorView b;   // the dtype of a
    TensorView c;   // the dtype of a; dtype == INFINI_DTYPE_INVALID: no c, and beta is 0
    double alpha = 1, beta = 0;
};

// Checks a and b; returns the shape and dtype of their product.
TensorView output_of(const char *op, const TensorView &a, const TensorView &b);

// Calls gemm's kernel for any number of leading dimensions, equal in a, b and c (a and b are broadcast by stride 0).
// Call after check().
void multiply_batches(const ExecutionContext &context, gemm::Args args);

// Checks all arguments; returns the product for compute(), with its leading dimensions merged.
gemm::Args product_of(const char *op, const Args &args);

// The bytes that compute() needs at product.workspace.
size_t workspace_bytes(const ExecutionContext &context, gemm::Args product);

// Computes out. If beta == 0, c is not read.
void compute(const ExecutionContext &context, const Args &args, const gemm::Args &product);

} // namespace infini::matmul
