// Indices: an int32 or int64 tensor of row, block or slot indices, or of counts, read as int64.
#pragma once

#include "tensor_view.h"

namespace infini {

struct Indices {
    const void *data = nullptr; // nullptr: the argument is absent
    int64_t stride = 0;         // of dimension 0, in elements
    bool wide = false;          // int64, not int32

    Indices() = default;
    INFINI_ALWAYS_INLINE explicit Indices(const TensorView &view)
        : data(view.data), stride(view.strides[0]), wide(view.dtype == INFINI_DTYPE_I64) {}

    // The element at an offset in elements.
    INFINI_ALWAYS_INLINE int64_t at(int64_t offset) const {
        return wide ? static_cast<const int64_t *>(data)[offset] : static_cast<const int32_t *>(data)[offset];
    }

    // Entry i of dimension 0.
    INFINI_ALWAYS_INLINE int64_t operator[](int64_t i) const { return at(i * stride); }
};

} // namespace infini
