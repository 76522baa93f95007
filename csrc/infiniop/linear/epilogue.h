// What the CPU kernels of linear do with sums of products: add the bias and round, then add the residual and round
// again. The second rounding is that of a separate addition, so linear with a residual has the bits of two ops.
#pragma once

#include "bias.h"
#include "linear.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

inline VecF rounded(VecF value, const float *) {
    return value;
}

// Rounds to T if T is a half type.
template <typename T> VecF rounded(VecF value, const T *) {
    T room[kLanes];
    store(room, value);
    return load(room);
}

// The columns of y that come from one weight.
template <typename T> struct Epilogue {
    T *y = nullptr; // at the first row and column
    Bias<T> bias;
    const T *residual = nullptr; // laid out as y, which it may alias; nullptr: no residual

    Epilogue() = default;
    // first: the column of y at which the weight's columns start.
    Epilogue(const linear::Args &args, int weight, int64_t first) : y(args.y.as<T>() + first), bias(args.bias[weight]) {
        residual = args.residual.dtype != INFINI_DTYPE_INVALID ? args.residual.as<const T>() + first : nullptr;
    }

    // Stores `sums` as the results of some columns of the row of y at `offset`.
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
