// Products that a library computes if it is faster on this CPU than our kernels. In torch that is ATen (oneDNN, MKL);
// the C libraries have none. The table of library.cpp holds the sizes for each dtype and level; `python -m torch_infini
// tune` measures them.
#pragma once

#include "gemm.h"

namespace infini::gemm {

enum class Products : int {
    kLinear,  // linear and fused_linear: rows of x times a weight's rows
    kMatmul,  // gemm and matmul, and conv computed by gemm: matrices in any layout
    kBatched, // gemm and matmul of several products that do not share b
    kConv,    // conv with overlapping windows; torch operator only
    kPatches, // conv with windows that do not overlap
    kCount
};

// c = a @ b for float32, bfloat16 and float16, in 2 or 3 dimensions; or c = a @ b + bias in 2 dimensions, with one bias
// per column (no bias: dtype INFINI_DTYPE_INVALID). A caller that has such a library passes it in the call's context.
using Library = decltype(ExecutionContext::library);

// The multiply-adds from which a call of a library, which costs some microseconds, can be faster.
constexpr double kMinProducts = 1 << 20;

constexpr int64_t kNever = INT64_MAX;

// The least number of rows (or columns, if these are fewer) for which the CPU calls the library at the level in use:
// the override, or the table's value. Throws Error for a dtype without products.
int64_t library_from(Products products, infiniDtype_t dtype);
// The size from which on the library is no longer called: kNever except for some entries of the table.
int64_t library_below(Products products, infiniDtype_t dtype);
// size: at least 1, or kNever; 0 restores the table's value.
void set_library_from(Products products, infiniDtype_t dtype, int64_t size);

// Whether the library is called for this size.
inline bool library_takes_size(Products products, infiniDtype_t dtype, int64_t size) {
    return size >= library_from(products, dtype) && size < library_below(products, dtype);
}

// Whether the context's library computes c = a @ b: never if alpha or beta scale, if k is 0, or for little work.
bool library_takes(const ExecutionContext &context, Products products, const Args &args);

// Computes c by the library. Call only if library_takes().
void multiply_by_library(const ExecutionContext &context, const Args &args, const TensorView &bias = {});

} // namespace infini::gemm
