// The CPU kernel of quantize_table4. For each group and each entry of kTries, weights are assigned indices and the
// scale is fitted to them by least squares; the scale with the least error wins. Then scales and weights are rounded.
// Limit: arithmetic, kTries times 16 comparisons per weight.
#include "linear_table4.h"
#include "panel_weights/panel_rows.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_table4::kTable;

// The values, on the scale of the table (-64 to 57), that a group's largest element (by magnitude) is mapped to.
constexpr float kTries[] = {-48, -52, -56, -60, -64, -68, -72, -76, 44, 48, 52, 56, 60, 64, 68};

// The index of the level nearest to each lane: midpoints go to the upper level, NaN to index 0.
inline VecI index_of(VecF value) {
    VecI index{};
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i) {
        index -= (VecI)(value >= splat(0.5f * static_cast<float>(kTable[i] + kTable[i + 1])));
    }
    return index;
}

inline VecF level_of(VecI index) {
#if defined(__AVX512F__)
    alignas(64) float levels[16];
    for (int i = 0; i < 16; ++i) {
        levels[i] = kTable[i];
    }
    return _mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(levels));
#else
    VecF level;
    for (int i = 0; i < kLanes; ++i) {
        level[i] = kTable[index[i]];
    }
    return level;
#endif
}

// The scales of kLanes groups, one per lane.
VecF fit(const VecF (&w)[kGroup]) {
    VecF largest{};
    for (int i = 0; i < kGroup; ++i) {
        largest = select(magnitude(w[i]) > magnitude(largest), w[i], largest);
    }
    const VecF divisor = select(largest == splat(0), splat(1), largest);
    VecF parts[kGroup]; // from -1 to 1: no sum overflows
    for (int i = 0; i < kGroup; ++i) {
        parts[i] = w[i] / divisor;
    }
    VecF best = splat(-1), scale{};
    for (const float place : kTries) {
        VecF products{}, squares{};
        for (int i = 0; i < kGroup; ++i) {
            const VecF level = level_of(index_of(parts[i] * splat(place)));
            products += level * parts[i];
            squares += level * level;
        }
        // The fitted scale, products / squares, reduces the squared error by this much.
        const VecF gain = products * products / squares;
        const VecI better = gain > best;
        best = select(better, gain, best);
        scale = select(better, products / squares, scale);
    }
    return scale * largest;
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_table4::INFINI_LEVEL::quantize_kernel(const panels::QuantizeArgs &args) {
    using namespace infini::INFINI_LEVEL;
    quantize_panels<Layout>(args, [](const auto &rows, VecF *scales) {
        rows.quantize(scales, fit, nearest, [&](int64_t g, const VecF(&w)[kGroup], VecF step, VecI finite) {
            VecI indices[kGroup];
            for (int i = 0; i < kGroup; ++i) {
                indices[i] = index_of(w[i] / step) & finite;
            }
            for (int line = 0; line < 2; ++line) {
                const VecI *const of_line = indices + 8 * line;
                for (int lane = rows.begin(); lane < rows.end(); ++lane) {
                    uint8_t *const to = rows.line(g, line) + 4 * lane;
                    for (int b = 0; b < 4; ++b) {
                        to[b] = static_cast<uint8_t>(of_line[b][lane] | of_line[4 + b][lane] << 4);
                    }
                }
            }
        });
    });
}
