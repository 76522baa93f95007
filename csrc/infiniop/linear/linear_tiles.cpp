// The kernel of linear and fused_linear in tile registers, for any number of rows of bfloat16: gemm/tile_rows.h.
#include "epilogue.h"
#include "gemm/tile_rows.h"

namespace infini::INFINI_LEVEL {
namespace {

int64_t blocks_of(const TensorView &weight) {
    return ceil_div(weight.size(0), kPairRows);
}

// One weight, and the epilogue of its products.
struct Factor {
    const bf16 *weight;
    int64_t stride, n, first_block;
    Epilogue<bf16> epilogue;
};

void multiply(const linear::Args &a) {
    Factor factors[linear::kMaxWeights];
    int64_t blocks = 0;
    int64_t column = 0;
    for (int i = 0; i < a.weights; ++i) {
        const TensorView &weight = a.weight[i];
        factors[i] = {weight.as<const bf16>(), weight.stride(0), weight.size(0), blocks, Epilogue<bf16>(a, i, column)};
        blocks += blocks_of(weight);
        column += weight.size(0);
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
        factor.epilogue(offset, (block - factor.first_block) * kPairRows + n, value, lanes);
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear::INFINI_LEVEL::tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
