// Many rows of x by quantized weights on CUDA, for linear_int8, linear_int4 and int8_gemm: the weight is unpacked to a
// dense one in a workspace, slice by slice of its rows, and cuBLAS multiplies. For fewer rows the weight is streamed
// (linear/weight_stream.cuh), or unpacked on the way to the tensor cores (linear/weight_tiles.cuh).
//
// Rounding:
// * int8 weights are exact in every dtype of x. cuBLAS leaves the sums in float32, and gemm/scale_sums.cu multiplies
//   them by the scales, adds the bias and rounds once: a result is as exact as one of few rows, and no scale is too
//   small or too large for float16. Applying scales to the weights instead would save the sums' trip through memory, on
//   paper (H200, 2048 rows) 13 % of the time at k = 4096 and 4 % at 14336, but would round each weight to bfloat16 (an
//   error of up to 2^-8 of it), which adds as much noise to a result as the result's own rounding.
// * int4 weights have scales of groups of k, which cannot be applied to a sum over all of k: a weight is (q - 8) *
//   scale + zero, rounded once to the dtype of x, with 1/50 of the error of its rounding to 4 bits. cuBLAS writes y
//   directly if there is no bias and y's rows are evenly spaced. In float16 a weight must be in range.
// * int8 x by int8 weights gives exact sums in int32, and so the bits of few rows.
// int8 x by int4 weights never comes here: an exact sum spans a group of 32 to 128 elements, and writing and reading
// it (8 bytes) would take 10 to 40 times as long as its products.
#pragma once

#include <cstddef>

#include "execution_context.h"
#include "tensor_view.h"

namespace infini::many_rows {

struct Problem;

// cuBLAS is used from so many rows of x on. Measured on an H100, 4096 x 14336, x of bfloat16, in microseconds: tiles
// (linear/weight_tiles.cuh) of int8 weights take 51 for 64 rows and 100 for 128, of int4 63 to 73 and 123 to 142;
// unpacking and cuBLAS take 108 and 117, for int4 93 and 102. float32 x has no tiles, and int8 x by int8 weights is not
// unpacked.
int64_t cublas_rows_from(const Problem &problem);

// The most bytes of an unpacked slice of the weight, and of its sums: the slice stays in L2 (50 MB on an H200) until
// cuBLAS has read it. INFINI_SLICE_BYTES, read at each call, overrides it. A slice has at least 64 rows, and a power of
// two, as the number of rows of x often is: then cuBLAS's tiles of 128 by 256 number 128 for 132 multiprocessors, or a
// multiple of 128.
constexpr int64_t kSliceBytes = 32 << 20;

struct Problem {
    TensorView y;             // [..., n], stride 1 in the last dimension
    TensorView x;             // [..., k], the dtype of y; or [m, k] int8
    TensorView weight;        // [n, k] int8, or [n, k / 2] uint8 as linear_int4 has it; stride 1 in a row
    TensorView group_scales;  // for uint8 weights: [n, groups]
    TensorView group_zeros;   // as group_scales; dtype == INFINI_DTYPE_INVALID: absent
    TensorView row_scales;    // [m], one per row of x, or absent
    TensorView column_scales; // [n], or absent
    TensorView bias;          // [n], or absent
    int64_t slice_bytes = 0;  // 0: slice_bytes() at the time of the run
    void *workspace = nullptr;
};

// The value of INFINI_SLICE_BYTES, or kSliceBytes.
int64_t slice_bytes();

// Whether cuBLAS computes the product. Not for int8 x whose addresses or rows are not aligned to 4 bytes, which cuBLAS
// requires, or whose elements are not contiguous.
bool takes(const Problem &problem);

// The row stride of a slice's sums, aligned for vectors of four.
constexpr int64_t padded_columns(int64_t slice) {
    return (slice + 3) / 4 * 4;
}

constexpr int64_t kAlignment = 256; // of buffers in the workspace, in bytes

// The steps of the product, and the offsets of its buffers from the aligned start of the workspace.
struct Plan {
    explicit Plan(const Problem &problem);

    int64_t m, n, k;
    int64_t slice;  // rows of the weight per product
    bool unpacks;   // whether the weight is unpacked; not if x is int8 too
    int64_t x_step; // distance between rows of x; 0: x is copied, because its rows are not evenly spaced
    int64_t y_step; // distance between rows of y if cuBLAS writes y; 0: cuBLAS writes sums
    int64_t copied_x_at, weight_at, sums_at, cublas_at; // offsets in bytes
    int64_t bytes;                                      // in total
};

// The bytes that run needs at problem.workspace, whatever the addresses.
size_t workspace_size(const Problem &problem);

// The bytes at problem.workspace for any number of rows: those of run, or where it does not take the problem those of
// weight_tiles.h.
size_t workspace_of(const Problem &problem);

// Computes y. Call only if takes(problem). Defined in many_rows.cu.
void run(const ExecutionContext &context, const Problem &problem);

} // namespace infini::many_rows
