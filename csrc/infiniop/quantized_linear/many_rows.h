// Many rows of x by quantized weights on CUDA, for linear_int8, linear_int4 and int8_gemm: the weight becomes dense in
// a workspace, slice by slice of its rows, and cuBLAS multiplies. Fewer rows stream it (linear/weight_stream.cuh).
//
// What is rounded:
// * int8 weights are exact in every dtype of x. cuBLAS leaves the sums in float32, and gemm/scale_sums.cu multiplies
//   them
//   by the scales, adds the bias and rounds once: a result is as exact as one of few rows, and no scale is too small or
//   too large for float16. Scales in the weights would save the sums' way through memory, on paper (H200, 2048 rows) 13 %
//   of the time at k = 4096 and 4 % at 14336, but round each weight to bfloat16 (half a spacing, 2^-8 of it), which puts
//   as much noise into a result as its own rounding does.
// * int4 weights have scales of groups of k, which cannot be applied to a sum over all of k: a weight is
//   (q - 8) * scale + zero, rounded once to the dtype of x, with 1/50 of the error of its rounding to 4 bits. cuBLAS
//   writes y directly where there is no bias and its rows are evenly spaced. In float16 a weight must be in range.
// * int8 x by int8 weights gives exact sums in int32, and so the bits of few rows.
// int8 x by int4 weights is always streamed: an exact sum spans a group of 32 to 128 elements, and to write and read it
// (8 bytes) would take 10 to 40 times as long as its products.
#pragma once

#include <cstddef>

#include "execution_context.h"
#include "tensor_view.h"

namespace infini::many_rows {

// Rows of x from which on cuBLAS multiplies. On paper, in picoseconds a weight on an H200 (a copy moves 4.3 TB/s,
// cuBLAS does 750 TFLOP/s in bfloat16): streaming, at 60 to 90 TFLOP/s, takes 0.7 to 1.1 for each 32 rows. Unpacking
// int8 takes 0.7 (1 byte to 2; int4 0.6), its product 0.5 (2 bytes) up to 175 rows, 1.2 in all, and some microseconds
// for launches. So they meet between 33 and 64 rows. To be measured.
constexpr int64_t kCublasRowsFrom = 64;

// The most bytes of an unpacked slice of the weight, and of its sums: it stays in L2, 50 MB on an H200, until cuBLAS
// has read it. INFINI_SLICE_BYTES, read at each call, overrides it. A slice has at least 64 rows and is a power of two,
// as the number of rows of x often is: cuBLAS's tiles of 128 by 256 then are 128 for 132 multiprocessors, or a
// multiple.
constexpr int64_t kSliceBytes = 32 << 20;

struct Problem {
    TensorView y;             // [..., n], stride 1 in the last dimension
    TensorView x;             // [..., k], the dtype of y; or [m, k] int8
    TensorView weight;        // [n, k] int8, or [n, k / 2] uint8 as linear_int4 has it; stride 1 in a row
    TensorView group_scales;  // of uint8: [n, groups]
    TensorView group_zeros;   // the same, or dtype == INFINI_DTYPE_INVALID: none
    TensorView row_scales;    // [m] of x, or none as above
    TensorView column_scales; // [n], or none as above
    TensorView bias;          // [n], or none as above
    int64_t slice_bytes = 0;  // 0: as slice_bytes() says when it is run
    void *workspace = nullptr;
};

// INFINI_SLICE_BYTES, or kSliceBytes.
int64_t slice_bytes();

// Whether cuBLAS computes the product. Not for int8 x where addresses or rows are not aligned to 4 bytes, as cuBLAS
// requires, or elements are not contiguous.
bool takes(const Problem &problem);

// The row stride of a slice's sums, aligned for vectors of four.
constexpr int64_t padded_columns(int64_t slice) {
    return (slice + 3) / 4 * 4;
}

constexpr int64_t kAlignment = 256; // of buffers in the workspace

// The steps of the product, and the offsets of its buffers in the workspace once its begin is aligned.
struct Plan {
    explicit Plan(const Problem &problem);

    int64_t m, n, k;
    int64_t slice;  // rows of the weight that are multiplied at a time
    bool unpacks;   // the weight, which is int8 as x is otherwise
    int64_t x_step; // from one row of x to the next; 0: x is copied, because its rows are not evenly spaced
    int64_t y_step; // the same of y, where cuBLAS writes it; 0: cuBLAS writes sums
    int64_t copied_x_at, weight_at, sums_at, cublas_at; // in bytes
    int64_t bytes;                                      // in all
};

// The bytes that run needs at problem.workspace, independent of addresses.
size_t workspace_size(const Problem &problem);

// Computes y of a problem that cuBLAS computes. In many_rows.cu.
void run(const ExecutionContext &context, const Problem &problem);

} // namespace infini::many_rows
