// What the vendor's kernels share: float32 only, any strides, and a note of the last call for the test.
#pragma once

#include "kernel_table.h"
#include "tensor_view.h"

namespace qy {

struct LastCall {
    const char *kernel = "";
    infini::ExecutionContext context;
};
inline LastCall last_call;

inline void begin(const char *kernel, const infini::ExecutionContext &context, infiniDtype_t dtype) {
    if (dtype != INFINI_DTYPE_F32) {
        throw infini::Error(INFINI_STATUS_BAD_TENSOR_DTYPE,
                            infini::message("qy::", kernel, ": tensors must be float32, got ", infini::name_of(dtype)));
    }
    last_call = {kernel, context};
}

// Where element number i, in row-major order over the first `dims` dimensions, begins.
inline int64_t offset_of(const infini::TensorView &view, int dims, int64_t i) {
    int64_t offset = 0;
    for (int dim = dims - 1; dim >= 0; --dim) {
        offset += i % view.shape[dim] * view.strides[dim];
        i /= view.shape[dim];
    }
    return offset;
}

} // namespace qy
