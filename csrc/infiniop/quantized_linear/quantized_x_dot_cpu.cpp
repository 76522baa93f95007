// The CPU kernel of linear_int8 and linear_int4 with quantized x: each row of x becomes int8 with one scale, then exact
// integer products (int8_gemm/int8_product.h). Limit: for few rows memory bandwidth of the weight's bytes, for many the
// multiply-adds of bytes (VNNI: 64 per unit and cycle).
#include "group_scales.h"
#include "int8_gemm/int8_product.h"
#include "quantized_epilogue.h"
#include "parallel.h"
#include "quantize_row.h"
#include "quantized_linear.h"
#include "row_iterator.h"

namespace infini::INFINI_LEVEL {
namespace {

using quantized_linear::Args;

constexpr int64_t kMaxRows = 1024; // rows of x quantized at once; the weights are packed again for the next ones

template <typename F, typename Scales> void multiply(const Args &a, int64_t groups, const Scales &scales) {
    const int64_t k = a.x.size(-1), n = a.weight.size(0);
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    const int64_t passes = (rows.count() + kMaxRows - 1) / kMaxRows;
    const int64_t pass_rows = passes > 0 ? (rows.count() + passes - 1) / passes : 0;
    float x_scales[kMaxRows];
    int64_t offsets[kMaxRows];
    for (int64_t begin = 0; begin < rows.count(); begin += pass_rows) {
        const int64_t left = rows.count() - begin, m = left < pass_rows ? left : pass_rows;
        Int8Product<F> product(m, k, groups);
        const int64_t block = product.block_rows(), blocks = (n + block - 1) / block;
        const int64_t x_bytes = m * k * static_cast<int64_t>(size_of(a.x.dtype));
        const int64_t work = n * a.weight.size(1) * ((m + 3) / 4);
        const int64_t threads = parallel_threads(INT64_MAX, x_bytes > work ? x_bytes : work);
        const int64_t needs = product.scratch_bytes() > product.padded() ? product.scratch_bytes() : product.padded();
        const int64_t pitch = (needs + 63) / 64 * 64;
        char *const memory =
            static_cast<char *>(cpu::scratch(static_cast<size_t>(product.x_bytes() + threads * pitch)));
        product.set_memory(memory);
        const auto own_scratch = [&] { return memory + product.x_bytes() + omp_get_thread_num() % threads * pitch; };
        parallel_for(m, x_bytes, [&](int64_t first, int64_t last) {
            auto *const q = reinterpret_cast<int8_t *>(own_scratch());
            int64_t row = first;
            rows.visit(begin + first, begin + last, [&](const int64_t *at) {
                offsets[row] = at[1];
                with_float_type(a.x.dtype, [&](auto type) {
                    x_scales[row] = quantize_row(a.x.as<const decltype(type)>() + at[0], k, q);
                });
                std::memset(q + k, 0, static_cast<size_t>(product.padded() - k));
                product.set_row(row++, q);
            });
        });
        const QuantizedEpilogue output{a, offsets, x_scales, !F::kGrouped};
        parallel_for(blocks, work, [&](int64_t first, int64_t last) {
            const auto *const weight = a.weight.as<const uint8_t>();
            const int64_t end = last * block < n ? last * block : n, stride = a.weight.stride(0);
            product.multiply({weight + first * block * stride, stride, first * block, end - first * block}, scales,
                             own_scratch(), output);
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::quantized_linear::INFINI_LEVEL::int8_quantized_x_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    multiply<ByteWeights>(args, 1, NoScales{});
}

void infini::quantized_linear::INFINI_LEVEL::int4_quantized_x_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    multiply<NibbleWeights>(args, args.scales.size(1), GroupScales{args.scales, args.zeros});
}
