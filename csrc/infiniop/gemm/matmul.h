// matmul: out = alpha * a @ b + beta * c by gemm's kernel, with the shapes of torch.matmul: a [..., m, k] and
// b [..., k, n], whose leading dimensions broadcast; a of one dimension is a row and b of one a column, and out lacks
// that dimension. c broadcasts to out. Each matrix is row-major or column-major, as in gemm.
#pragma once

#include "gemm.h"

namespace infini::matmul {

struct Args {
    TensorView out; // as output_of says; shares no memory with a or b, and may be c itself
    TensorView a;   // float32, bfloat16 or float16
    TensorView b;   // the dtype of a
    TensorView c;   // the dtype of a; dtype == INFINI_DTYPE_INVALID: none, and beta is 0
    double alpha = 1, beta = 0;
};

// Checks a and b; the shape and dtype of their product.
TensorView output_of(const char *op, const TensorView &a, const TensorView &b);

// gemm's kernel for any number of leading dimensions, the same in all three: those of a and b by stride 0 where they
// broadcast. The arguments were checked.
void multiply_batches(const ExecutionContext &context, gemm::Args args);

// Checks all arguments; the product that compute() computes of them, its leading dimensions merged.
gemm::Args product_of(const char *op, const Args &args);

// The bytes that compute() needs at product.workspace.
size_t workspace_bytes(const ExecutionContext &context, gemm::Args product);

// Computes out. With beta == 0, c is not read.
void compute(const ExecutionContext &context, const Args &args, const gemm::Args &product);

} // namespace infini::matmul
