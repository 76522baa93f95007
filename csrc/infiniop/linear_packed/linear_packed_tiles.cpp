// The kernel of linear_packed in tile registers: a packed weight is a right operand as it lies. gemm/tile_rows.h.
#include "gemm/tile_rows.h"
#include "linear_packed.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_packed::kPanel;

// A panel's first 32 columns, or its last 16.
struct PanelBlock {
    const char *words; // of the first column
    int64_t count;     // of columns that belong to y

    static constexpr Weights kWeights = Weights::kInPlace;
    static constexpr int64_t kWordBytes = kPanel * 4, kStepWords = kTileStep<bf16> / 2;

    // Never copied but for the end of k.
    TileSource source(int64_t k, int64_t first, int64_t steps, bool, char *to) const {
        const char *const from = words + first * kStepWords * kWordBytes;
        const int64_t there = ceil_div(k, 2) - first * kStepWords, last = there - (steps - 1) * kStepWords;
        const TileSource all{from, kWordBytes, kStepWords * kWordBytes, kTmmRowBytes};
        if (steps == 0 || last >= kStepWords) {
            return all;
        }
        std::memset(to, 0, kPackedStep);
        for (int64_t tile = 0; tile * kTmmRows < count; ++tile) {
            for (int64_t word = 0; word < last; ++word) {
                std::memcpy(to + tile * kTmmBytes + word * kTmmRowBytes,
                            from + ((steps - 1) * kStepWords + word) * kWordBytes + tile * kTmmRowBytes, kTmmRowBytes);
            }
        }
        return {all.data, all.pitch, all.step, all.tile, to};
    }
    Ahead ahead(int64_t first, int64_t pair, int64_t pairs) const {
        const int64_t begin = kStepWords * pair / pairs, end = kStepWords * (pair + 1) / pairs;
        return {words + (first * kStepWords + begin) * kWordBytes, kWordBytes, kStepWords * kWordBytes, end - begin};
    }
    bool is_left() const { return false; }
};

void multiply(const linear_packed::Args &a) {
    const int64_t panel_bytes = ceil_div(a.x.size(-1), 2) * PanelBlock::kWordBytes;
    const int64_t blocks = a.n / kPanel * 2 + ceil_div(a.n % kPanel, kPairRows);
    const auto column_of = [](int64_t block) { return block / 2 * kPanel + block % 2 * kPairRows; };
    const auto block_of = [&](int64_t block) -> PanelBlock {
        const int64_t most = block % 2 == 0 ? kPairRows : kPanel - kPairRows, left = a.n - column_of(block);
        return {a.weight.as<const char>() + block / 2 * panel_bytes + block % 2 * kPairRows * 4,
                left < most ? left : most};
    };
    const bf16 *const bias = a.bias.dtype != INFINI_DTYPE_INVALID ? a.bias.as<const bf16>() : nullptr;
    multiply_rows(a.x, a.y, blocks, block_of, [&](int64_t block, int64_t offset, int64_t n, VecF value, auto lanes) {
        const int64_t column = column_of(block) + n;
        store_at(a.y.as<bf16>() + offset, column, bias ? value + load_at(bias, column, lanes) : value, lanes);
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_packed::INFINI_LEVEL::tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
