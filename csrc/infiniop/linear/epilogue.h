// What the CPU kernels of linear do with sums of products: the bias, one rounding; then the residual, and another.
// The second rounding is that of an addition of its own, so that linear with a residual has the bits of two ops.
#pragma once

#include "bias.h"
#include "linear.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

inline VecF rounded(VecF value, const float *) {
    return value;
}

// Values of half types: rounded to T.
template <typename T> VecF rounded(VecF value, const T *) {
    T room[kLanes];
    store(room, value);
    return load(room);
}

// The columns of y that come from one weight.
template <typename T> struct Epilogue {
    T *y = nullptr; // of the first row and column
    Bias<T> bias;
    const T *residual = nullptr; // as y, which it may be; or none

    Epilogue() = default;
    // first: the first of a weight's columns in y.
    Epilogue(const linear::Args &args, int weight, int64_t first) : y(args.y.as<T>() + first), bias(args.bias[weight]) {
        residual = args.residual.dtype != INFINI_DTYPE_INVALID ? args.residual.as<const T>() + first : nullptr;
    }

    // Stores the results of some columns of the row of y at `offset`, of `sums`.
    template <typename Lanes> void operator()(int64_t offset, int64_t column, VecF sums, Lanes lanes) const {
        VecF value = bias.plus(sums, column, lanes);
        if (residual) {
            value = rounded(value, y) + load_at(residual + offset, column, lanes);
        }
        store_at(y + offset, column, value, lanes);
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
