// Unpacks rows of int8 or int4 to dense rows of a floating dtype, on CUDA, for products by cuBLAS.
#pragma once

#include "execution_context.h"
#include "tensor_view.h"

namespace infini::unpack {

struct Args {
    TensorView to;     // [rows, k] float32, bfloat16 or float16: aligned to 16 bytes, rows padded(k) apart
    TensorView from;   // [rows, k] int8, or [rows, k / 2] uint8 as linear_int4 has it; stride 1 in a row
    TensorView scales; // for uint8: [rows, groups], float32 or the dtype of `to`; stride 1 in a row
    TensorView zeros;  // as scales; dtype == INFINI_DTYPE_INVALID: no zeros
};

// The number of elements written per row; those beyond k are zeros.
constexpr int64_t padded(int64_t k) {
    return (k + 15) / 16 * 16;
}

// Unpacks int8 exactly, without scales; uint8 to (q - 8) * scale + zero, computed in float32 and rounded once.
void run(const ExecutionContext &context, const Args &args);

} // namespace infini::unpack
