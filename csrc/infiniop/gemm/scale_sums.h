// The epilogue of a product on CUDA whose sums are in memory, in float32 or int32: scales, a bias, one rounding.
#pragma once

#include "execution_context.h"
#include "tensor_view.h"

namespace infini::gemm {

// y = sums * (row scale * column scale) + bias. A vector with dtype == INFINI_DTYPE_INVALID is absent.
struct ScaledSums {
    TensorView sums;          // [m, n] float32 or int32, rows of stride 1; or [parts, m, n]: added in order first
    TensorView y;             // [..., n] float32, bfloat16 or float16, m rows of stride 1
    TensorView row_scales;    // [m], any floating dtype and stride, as are the others
    TensorView column_scales; // [n]
    TensorView bias;          // [n]
};

void scale_sums(const ExecutionContext &context, const ScaledSums &args);

} // namespace infini::gemm
