// The kernels of linear_int8 and linear_int4 in tile registers with quantized x: each row of x becomes int8 with one
// scale, then int8_gemm/int8_tiles.h or nibble_tiles.h, which state the limits.
#include "int8_gemm/int8_tiles.h"
#include "nibble_tiles.h"
#include "quantized_epilogue.h"
#include "quantize_row.h"
#include "quantized_linear.h"
#include "row_iterator.h"

namespace infini::INFINI_LEVEL {
namespace {

// Calls body(m, quantize, output) for all rows of x, m at a time: quantize(row, q) writes row `row` of these as int8.
template <typename Body> void for_each_pass(const Args &a, int64_t k, Weights weights, const Body &body) {
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    const int64_t most = pass_rows(rows.count(), k, weights);
    float x_scales[kMaxRows];
    int64_t x_offsets[kMaxRows], y_offsets[kMaxRows];
    for (int64_t begin = 0; begin < rows.count(); begin += most) {
        int64_t m = 0;
        rows.visit(begin, rows.count() - begin < most ? rows.count() : begin + most, [&](const int64_t *at) {
            x_offsets[m] = at[0];
            y_offsets[m++] = at[1];
        });
        body(
            m,
            [&](int64_t row, int8_t *q) {
                with_float_type(a.x.dtype, [&](auto type) {
                    x_scales[row] = quantize_row(a.x.as<const decltype(type)>() + x_offsets[row], a.x.size(-1), q);
                });
            },
            QuantizedEpilogue{a, y_offsets, x_scales, weights == Weights::kInPlace});
    }
}

void multiply_int8_by_bytes(const Args &a) {
    const int64_t k = a.x.size(-1);
    for_each_pass(a, k, Weights::kInPlace, [&](int64_t m, const auto &quantize, const QuantizedEpilogue &output) {
        multiply_bytes(
            m, a.weight.size(0), k, a.weight.as<const int8_t>(), a.weight.stride(0),
            [&](int64_t row, char *room) {
                auto *const q = reinterpret_cast<int8_t *>(room);
                quantize(row, q);
                return static_cast<const int8_t *>(q);
            },
            output);
    });
}

void multiply_int4_by_bytes(const Args &a) {
    const NibbleWeight<int8_t> weight{a};
    const GroupScales scales{a.scales, a.zeros};
    const int64_t group = weight.group, padded = weight.steps * kTileStep<int8_t>;
    for_each_pass(a, weight.k, Weights::kGrouped,
                  [&](int64_t m, const auto &quantize, const QuantizedEpilogue &output) {
                      multiply_tiles<int8_t>(
                          m, weight.k, weight.blocks(), byte_room(weight.k),
                          [&](int64_t row, char *room) {
                              auto *const q = reinterpret_cast<int8_t *>(room);
                              quantize(row, q);
                              for (int64_t g = weight.groups - 1; padded > group && g >= 0; --g) {
                                  std::memmove(q + g * padded, q + g * group, static_cast<size_t>(group));
                                  std::memset(q + g * padded + group, 0, static_cast<size_t>(padded - group));
                              }
                              return static_cast<const int8_t *>(q);
                          },
                          [&](int64_t i) { return weight.block(i); },
                          [&](int64_t block, int64_t row, int64_t column, VecF value, auto lanes) {
                              output(row, block * kPairRows + column, value, lanes);
                          },
                          weight.sums(scales));
                  });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::quantized_linear::INFINI_LEVEL::int8_quantized_x_tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply_int8_by_bytes(args);
}

void infini::quantized_linear::INFINI_LEVEL::int4_quantized_x_tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply_int4_by_bytes(args);
}
