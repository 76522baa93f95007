// The kernel of linear and fused_linear in tile registers, for any number of rows of bfloat16: gemm/tile_product.h.
#include "gemm/tile_product.h"
#include "linear.h"
#include "parallel.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

int64_t blocks_of(const TensorView &weight) {
    return ceil_div(weight.size(0), kPairRows);
}

// One of the weights, and what becomes of its products.
struct Factor {
    const bf16 *weight, *bias;
    int64_t stride, n, first_block;
    bf16 *y;
};

void multiply(const linear::Args &a) {
    const int64_t k = a.x.size(-1);
    Factor factors[linear::kMaxWeights];
    int64_t blocks = 0;
    auto *y = a.y.as<bf16>();
    for (int i = 0; i < a.weights; ++i) {
        const TensorView &weight = a.weight[i], &bias = a.bias[i];
        factors[i] = {weight.as<const bf16>(),
                      bias.dtype != INFINI_DTYPE_INVALID ? bias.as<const bf16>() : nullptr,
                      weight.stride(0),
                      weight.size(0),
                      blocks,
                      y};
        blocks += blocks_of(weight);
        y += weight.size(0);
    }
    const auto factor_of = [&](int64_t block) -> const Factor & {
        int i = a.weights - 1;
        while (i > 0 && (block < factors[i].first_block || factors[i].n == 0)) {
            --i;
        }
        return factors[i];
    };
    const auto block_of = [&](int64_t block) -> Block<bf16> {
        const Factor &factor = factor_of(block);
        const int64_t row = (block - factor.first_block) * kPairRows, left = factor.n - row;
        return {{factor.weight + row * factor.stride, 1, factor.stride, true}, left < kPairRows ? left : kPairRows};
    };
    const TensorView *const views[] = {&a.x, &a.y};
    const Rows<2> rows(views);
    const int64_t most = pass_rows<bf16>(rows.count(), k);
    const Pass<bf16> largest{most, k};
    const int64_t bytes = blocks * kPairRows * k * most, threads = parallel_threads(blocks, bytes);
    char *const packed = static_cast<char *>(
        cpu::scratch(static_cast<size_t>(largest.packed_bytes() + threads * largest.scratch_bytes())));
    for (int64_t begin = 0; begin < rows.count(); begin += most) {
        const Pass<bf16> pass = largest.with_rows(rows.count() - begin < most ? rows.count() - begin : most);
        int64_t x_offsets[kPassRows], y_offsets[kPassRows], m = 0;
        rows.visit(begin, begin + pass.m, [&](const int64_t *at) {
            x_offsets[m] = at[0];
            y_offsets[m++] = at[1];
        });
        parallel_for(pass.tiles, pass.m * k * 2, [&](int64_t first, int64_t last) {
            for (int64_t tile = first; tile < last; ++tile) {
                const int64_t row = tile * kTmmRows, left = pass.m - row;
                pack_rows([&](int64_t i) { return a.x.as<const bf16>() + x_offsets[row + i]; },
                          left < kTmmRows ? left : kTmmRows, k, true, packed + tile * pass.steps * kTmmBytes);
            }
        });
        parallel_for(threads, bytes, [&](int64_t first, int64_t last) {
            for (int64_t part = first; part < last; ++part) {
                multiply_blocks(pass, packed, blocks * part / threads, blocks * (part + 1) / threads, block_of,
                                packed + largest.packed_bytes() + part * largest.scratch_bytes(),
                                [&](int64_t block, int64_t row, int64_t n, VecF value, auto lanes) {
                                    const Factor &factor = factor_of(block);
                                    const int64_t column = (block - factor.first_block) * kPairRows + n;
                                    store_at(factor.y + y_offsets[row], column,
                                             factor.bias ? value + load_at(factor.bias, column, lanes) : value, lanes);
                                });
            }
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear::INFINI_LEVEL::tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
