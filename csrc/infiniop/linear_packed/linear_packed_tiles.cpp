// The kernel of linear_packed in tile registers: a packed weight already has the layout of a right operand
// (gemm/tile_rows.h). A few rows of x are multiplied in vector registers, with the same bits (gemm/few_tile_rows.h).
#include "bias.h"
#include "gemm/few_tile_rows.h"
#include "gemm/tile_rows.h"
#include "linear_packed.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_packed::kPanel;

// The first 32 columns of a panel, or its last 16.
struct PanelBlock {
    const char *words; // of the first column
    int64_t count;     // columns that belong to y

    static constexpr Weights kWeights = Weights::kInPlace;
    static constexpr int64_t kWordBytes = kPanel * 4, kStepWords = kTileStep<bf16> / 2;

    // Copies only if k ends within the steps.
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
    PrefetchSpan ahead(int64_t first, int64_t pair, int64_t pairs) const {
        const int64_t begin = kStepWords * pair / pairs, end = kStepWords * (pair + 1) / pairs;
        return {words + (first * kStepWords + begin) * kWordBytes, kWordBytes, kStepWords * kWordBytes, end - begin};
    }
    bool is_left() const { return false; }
};

// The sums of kM rows of x and a panel. x holds the elements of all rows interleaved. Each lane holds a column.
template <int kM>
__attribute__((noinline)) void multiply_panel(const char *panel, int64_t k, const float *x,
                                              VecF (&sums)[kPanel / kLanes][kM]) {
    constexpr int kVectors = kPanel / kLanes;
    const int64_t words = ceil_div(k, 2);
    VecF total[kVectors][kM] = {};
    for (int64_t step = 0; step < words; step += kTmmRows) {
        const int64_t end = step + kTmmRows < words ? step + kTmmRows : words;
        VecF even[kVectors][kM] = {}, odd[kVectors][kM] = {};
        for (int64_t word = step; word < end; ++word, x += 2 * kM, panel += PanelBlock::kWordBytes) {
#pragma GCC unroll 16
            for (int64_t line = 0; line < PanelBlock::kWordBytes; line += kTmmRowBytes) {
                __builtin_prefetch(panel + kAheadBytes + line, 0, 2);
            }
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                const auto columns = (VecU)load(reinterpret_cast<const float *>(panel) + v * kLanes);
#pragma GCC unroll 16
                for (int m = 0; m < kM; ++m) {
                    even[v][m] = add_tile_products((VecF)(columns << 16), splat(x[m]), even[v][m]);
                    odd[v][m] = add_tile_products((VecF)(columns & 0xffff0000u), splat(x[kM + m]), odd[v][m]);
                }
            }
        }
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
            for (int m = 0; m < kM; ++m) {
                if (end - step < kTmmRows) { // adding the zeros beyond the end of k turns -0 into +0
                    even[v][m] = add_tile_sums(even[v][m], VecF{});
                    odd[v][m] = add_tile_sums(odd[v][m], VecF{});
                }
                total[v][m] = add_tile_sums(total[v][m], add_tile_sums(even[v][m], odd[v][m]));
            }
        }
    }
    std::memcpy(sums, total, sizeof total);
}

// Passes results to write(column, row, sums, lanes).
template <int kM, typename Write>
void multiply_few(const linear_packed::Args &a, const int64_t *x_at, const Write &write) {
    const int64_t k = a.x.size(-1), padded = ceil_div(k, 2) * 2;
    const int64_t panels = ceil_div(a.n, kPanel), panel_bytes = padded / 2 * PanelBlock::kWordBytes;
    auto *const x = static_cast<float *>(cpu::scratch(static_cast<size_t>(padded * kM) * sizeof(float)));
    for (int64_t i = 0; i < padded; ++i) {
        for (int m = 0; m < kM; ++m) {
            x[i * kM + m] = i < k ? widen(a.x.as<const bf16>()[x_at[m] + i]) : 0.0f;
        }
    }
    parallel_for(panels, panels * panel_bytes, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
            VecF sums[kPanel / kLanes][kM];
            {
                const DenormalsAreZero scope;
                multiply_panel<kM>(a.weight.as<const char>() + panel * panel_bytes, k, x, sums);
            }
            for (int64_t v = 0; v < kPanel / kLanes; ++v) {
                const int64_t column = panel * kPanel + v * kLanes;
                write_columns(write, 0, column, a.n - column, sums[v]);
            }
        }
    });
}

void multiply(const linear_packed::Args &a) {
    const int64_t panel_bytes = ceil_div(a.x.size(-1), 2) * PanelBlock::kWordBytes;
    const int64_t blocks = a.n / kPanel * 2 + ceil_div(a.n % kPanel, kPairRows);
    const auto column_of = [](int64_t block) { return block / 2 * kPanel + block % 2 * kPairRows; };
    const auto block_of = [&](int64_t block) -> PanelBlock {
        const int64_t most = block % 2 == 0 ? kPairRows : kPanel - kPairRows, left = a.n - column_of(block);
        return {a.weight.as<const char>() + block / 2 * panel_bytes + block % 2 * kPairRows * 4,
                left < most ? left : most};
    };
    const Bias<bf16> bias(a.bias);
    const auto write = [&](int64_t offset, int64_t column, VecF value, auto lanes) {
        store_at(a.y.as<bf16>() + offset, column, bias.plus(value, column, lanes), lanes);
    };
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    if (rows.count() > 0 && rows.count() <= kFewTileRows) {
        return with_few_rows(rows.count(), [&](auto m) {
            int64_t x_at[kFewTileRows], y_at[kFewTileRows];
            offsets(rows, 0, m, x_at, y_at);
            multiply_few<m>(a, x_at, [&](int64_t, int64_t row, int64_t column, VecF value, auto lanes) {
                write(y_at[row], column, value, lanes);
            });
        });
    }
    multiply_rows(a.x, a.y, blocks, block_of, [&](int64_t block, int64_t offset, int64_t n, VecF value, auto lanes) {
        write(offset, column_of(block) + n, value, lanes);
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_packed::INFINI_LEVEL::tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply(args);
}
