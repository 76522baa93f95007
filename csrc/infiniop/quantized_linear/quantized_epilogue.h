// The epilogue of linear_int8 and linear_int4 with quantized x and in tile registers: scales, the bias, one rounding.
#pragma once

#include "bias.h"
#include "quantized_linear.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using quantized_linear::Args;

// Stores kLanes results at a time. Not inlined, and dispatches on types: that is rare enough not to matter.
struct QuantizedEpilogue {
    const Args &args;
    const int64_t *offsets; // one per row of y
    const float *x_scales;  // nullptr: x is not quantized
    bool scales_rows; // whether the weight has one scale per row; scales of groups are already applied to the sums

    template <typename Lanes>
    __attribute__((noinline)) void operator()(int64_t row, int64_t column, VecF value, Lanes lanes) const {
        VecF scale = splat(x_scales != nullptr ? x_scales[row] : 1.0f);
        if (scales_rows) {
            with_float_type(args.scales.dtype, [&](auto type) {
                scale = scale * load_at(args.scales.as<const decltype(type)>(), column, lanes);
            });
        }
        value = value * scale;
        with_float_type(args.y.dtype, [&](auto type) {
            using T = decltype(type);
            store_at(args.y.as<T>() + offsets[row], column, Bias<T>(args.bias).plus(value, column, lanes), lanes);
        });
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
