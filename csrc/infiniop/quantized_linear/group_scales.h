// Loads the scales and zeros of linear_int4's groups for integer products (int8_gemm/int8_dots.h). Dispatches on their
// type once per several vectors of rows: compiling all products for each type would take long. Included only by kernel
// files.
#pragma once

#include "tensor_view.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

struct GroupScales {
    const TensorView &scale, &zero;

    bool has_zeros() const { return zero.dtype != INFINI_DTYPE_INVALID; }
    template <typename Lanes, int kRows>
    INFINI_ALWAYS_INLINE void scales(int64_t row, int64_t apart, int64_t group, Lanes lanes, VecF (&to)[kRows]) const {
        of(scale, row, apart, group, lanes, to);
    }
    template <typename Lanes, int kRows>
    INFINI_ALWAYS_INLINE void zeros(int64_t row, int64_t apart, int64_t group, Lanes lanes, VecF (&to)[kRows]) const {
        of(zero, row, apart, group, lanes, to);
    }

private:
    template <typename Lanes, int kRows>
    INFINI_ALWAYS_INLINE static void of(const TensorView &view, int64_t row, int64_t apart, int64_t group, Lanes lanes,
                                        VecF (&to)[kRows]) {
        with_float_type(view.dtype, [&](auto type) __attribute__((always_inline)) {
            const auto *values = view.as<const decltype(type)>() + row * view.stride(0) + group;
#pragma GCC unroll 4
            for (int i = 0; i < kRows; ++i, values += apart * view.stride(0)) {
                __builtin_prefetch(values + kLanes * view.stride(0)); // prefetches the next rows' values
                to[i] = load_at(values, 0, lanes);
            }
        });
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
