// The CPU kernel of quantize_group8. A group's scale is its largest magnitude divided by 127, rounded up to a multiple
// of the row's scale, so that no weight is clipped; weights are rounded to nearest.
// Limit: memory bandwidth.
#include "linear_group8.h"
#include "panel_weights/panel_rows.h"

namespace infini::INFINI_LEVEL {
namespace {

VecF fit(const VecF (&w)[kGroup]) {
    VecF largest{};
    for (const VecF x : w) {
        largest = max(magnitude(x), largest);
    }
    return largest / splat(127);
}

VecI round_up(VecF value) {
    const VecI integer = nearest(value);
    const VecI larger = integer - (VecI)(__builtin_convertvector(integer, VecF) < value); // a true lane is -1
    return larger > 127 ? VecI{} + 127 : larger;
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_group8::INFINI_LEVEL::quantize_kernel(const panels::QuantizeArgs &args) {
    using namespace infini::INFINI_LEVEL;
    quantize_panels<Layout>(args, [](const auto &rows, VecF *scales) {
        rows.quantize(scales, fit, round_up, [&](int64_t g, const VecF(&w)[kGroup], VecF step, VecI finite) {
            for (int line = 0; line < kGroup / 4; ++line) {
                VecI integers[4];
                for (int b = 0; b < 4; ++b) {
                    const VecF value = min(splat(127), max(splat(-127), w[4 * line + b] / step));
                    integers[b] = nearest(value) & finite;
                }
                for (int lane = rows.begin(); lane < rows.end(); ++lane) {
                    uint8_t *const to = rows.line(g, line) + 4 * lane;
                    for (int b = 0; b < 4; ++b) {
                        to[b] = static_cast<uint8_t>(integers[b][lane]);
                    }
                }
            }
        });
    });
}
