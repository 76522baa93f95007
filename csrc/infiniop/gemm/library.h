// Products that a library computes where it is faster on this CPU than our kernels. In torch that is ATen (oneDNN,
// MKL); the C libraries have none. The table of library.cpp gives the sizes for each dtype and level; `python -m
// torch_infini tune` measures them.
#pragma once

#include "gemm.h"

namespace infini::gemm {

enum class Products : int {
    kLinear,  // linear and fused_linear: rows of x times a weight's rows
    kMatmul,  // gemm and matmul, and conv where it is ours: matrices in any layout
    kBatched, // gemm and matmul of several products that do not share b
    kConv,    // conv whose windows overlap; of the torch operator only
    kPatches, // conv whose windows do not
    kCount
};

// c = a @ b for float32, bfloat16 and float16, in 2 or 3 dimensions; or c = a @ b + bias in 2, with a number for each
// column, unless its dtype is INFINI_DTYPE_INVALID.
// A caller that has such a library passes it in the call's context.
using Library = decltype(ExecutionContext::library);

// Multiply-adds from which on a call of a library (some microseconds) can be faster.
constexpr double kMinProducts = 1 << 20;

constexpr int64_t kNever = INT64_MAX;

// From how many rows on (columns too, if they are fewer) the library is called, on the CPU with the level in use: the
// override, or the table's value. Throws Error for a dtype without products.
int64_t library_from(Products products, infiniDtype_t dtype);
// Below how many it is called: kNever except for some entries of the table.
int64_t library_below(Products products, infiniDtype_t dtype);
// size: at least 1, kNever; 0: what the table says.
void set_library_from(Products products, infiniDtype_t dtype, int64_t size);

// Whether the library is called for a size.
inline bool library_takes_size(Products products, infiniDtype_t dtype, int64_t size) {
    return size >= library_from(products, dtype) && size < library_below(products, dtype);
}

// Whether the context's library computes c = a @ b: never with alpha, beta, an empty k or little work.
bool library_takes(const ExecutionContext &context, Products products, const Args &args);

// Computes c of arguments that it takes.
void multiply_by_library(const ExecutionContext &context, const Args &args, const TensorView &bias = {});

} // namespace infini::gemm
