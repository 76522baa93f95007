// The kernel of linear_int8 in tile registers where x is quantised too: a scale and int8 values for each row of x, then
// int8_gemm/tile_bytes.h.
#include "int8_gemm/tile_bytes.h"
#include "output.h"
#include "quantise.h"
#include "quantised_linear.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kMaxRows = 1024; // rows of x that are quantised at once

void multiply(const Args &a) {
    const int64_t k = a.x.size(-1);
    const TensorView *const views[] = {&a.x, &a.y};
    const Rows<2> rows(views);
    float x_scales[kMaxRows];
    int64_t x_offsets[kMaxRows], y_offsets[kMaxRows];
    for (int64_t begin = 0; begin < rows.count(); begin += kMaxRows) {
        const int64_t end = rows.count() - begin < kMaxRows ? rows.count() : begin + kMaxRows;
        int64_t m = 0;
        rows.visit(begin, end, [&](const int64_t *at) {
            x_offsets[m] = at[0];
            y_offsets[m++] = at[1];
        });
        multiply_bytes(
            m, a.weight.size(0), k, a.weight.as<const int8_t>(), a.weight.stride(0),
            [&](int64_t row, int8_t *q) {
                with_float_type(a.x.dtype, [&](auto type) {
                    x_scales[row] = quantise_row(a.x.as<const decltype(type)>() + x_offsets[row], k, q);
                });
                return static_cast<const int8_t *>(q);
            },
            Output{a, y_offsets, x_scales, true});
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::quantised_linear::INFINI_LEVEL::int8_quantised_x_tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
