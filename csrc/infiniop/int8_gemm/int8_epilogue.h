// The epilogue of int8_gemm: both scales, the bias, one rounding.
#pragma once

#include "int8_gemm.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

using int8_gemm::Args;

template <typename T, typename Lanes> VecF load_strided(const T *p, int64_t stride, int64_t first, Lanes lanes) {
    if (stride == 1) {
        return load_at(p, first, lanes);
    }
    VecF values{};
    for (int i = 0; i < lanes; ++i) {
        values[i] = widen(p[(first + i) * stride]);
    }
    return values;
}

struct Int8Epilogue {
    const Args &args;
    int64_t first; // the row of the output at which the sums start

    template <typename Lanes>
    __attribute__((noinline)) void operator()(int64_t row, int64_t column, VecF value, Lanes lanes) const {
        const VecF scale =
            load_strided(args.weights_scale.as<const float>(), args.weights_scale.stride(0), column, lanes);
        value = value * (splat(args.x_scale.as<const float>()[(first + row) * args.x_scale.stride(0)]) * scale);
        with_float_type(args.out.dtype, [&](auto type) {
            using T = decltype(type);
            if (args.bias.dtype != INFINI_DTYPE_INVALID) {
                value = value + load_strided(args.bias.as<const T>(), args.bias.stride(0), column, lanes);
            }
            store_at(args.out.as<T>() + (first + row) * args.out.stride(0), column, value, lanes);
        });
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
