// The kernel of linear and fused_linear in tile registers, for any number of rows of bfloat16: gemm/tile_rows.h.
#include "gemm/tile_rows.h"
#include "linear.h"

namespace infini::INFINI_LEVEL {
namespace {

int64_t blocks_of(const TensorView &weight) {
    return ceil_div(weight.size(0), kPairRows);
}

// One of the weights, and the epilogue of its products.
struct Factor {
    const bf16 *weight, *bias;
    int64_t stride, n, first_block;
    bf16 *y;
};

void multiply(const linear::Args &a) {
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
    multiply_rows(a.x, a.y, blocks, block_of, [&](int64_t block, int64_t offset, int64_t n, VecF value, auto lanes) {
        const Factor &factor = factor_of(block);
        const int64_t column = (block - factor.first_block) * kPairRows + n;
        store_at(factor.y + offset, column, factor.bias ? value + load_at(factor.bias, column, lanes) : value, lanes);
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear::INFINI_LEVEL::tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
