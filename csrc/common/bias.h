// Bias: an optional vector of numbers (of T or of float) that CPU kernels add to their sums, as vectors of floats.
#pragma once

#include "tensor_view.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

template <typename T> class Bias {
public:
    Bias() = default;
    // Starts at element `first` of the view.
    explicit Bias(const TensorView &view, int64_t first = 0) {
        if (view.dtype == INFINI_DTYPE_F32) {
            wide_ = view.as<const float>() + first;
        } else if (view.dtype != INFINI_DTYPE_INVALID) {
            own_ = view.as<const T>() + first;
        }
    }

    // Returns values plus the elements from i on.
    template <typename Lanes> VecF plus(VecF values, int64_t i, Lanes lanes) const {
        return wide_ ? values + load_at(wide_, i, lanes) : own_ ? values + load_at(own_, i, lanes) : values;
    }

private:
    const float *wide_ = nullptr;
    const T *own_ = nullptr;
};

} // namespace
} // namespace infini::INFINI_LEVEL
