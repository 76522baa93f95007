// Quantizes a row to int8 with a scale, on CUDA, given its largest magnitude: bit for bit as common/quantize_row.h.
#pragma once

#include "scalar_types.cuh"

namespace infini::cuda {

// x is approximately q * scale, with scale = max |x| / 127 and q = x / scale rounded to nearest even. A row that holds
// infinity or NaN has scale NaN and q = 0; a row of zeros has scale 0.
class RowScale {
public:
    // largest: the row's largest magnitude, NaN if the row holds one. (No member initializers: nvcc passes those to the
    // host compiler, which does not know the intrinsics.)
    __device__ __forceinline__ explicit RowScale(float largest) {
        finite_ = largest <= 3.402823466e38f;
        scale_ = finite_ ? largest / 127 : __uint_as_float(0x7fc00000u);
    }

    __device__ __forceinline__ float scale() const { return scale_; }
    __device__ __forceinline__ int8_t quantize(float x) const {
        const float value = min(127.0f, max(-127.0f, x / (scale_ > 0 ? scale_ : 1)));
        return static_cast<int8_t>(finite_ ? __float2int_rn(value) : 0);
    }

private:
    bool finite_; // neither infinity nor NaN
    float scale_;
};

} // namespace infini::cuda
