// linear_group8 by dot products of bytes.
#include "linear_group8.h"
#include "panel_weights/panel_dots.h"

namespace infini::INFINI_LEVEL {
namespace {

struct ByteLines : linear_group8::Layout {
#if defined(INFINI_SCALED_PAIRS)
    static constexpr int kOffset = 0;
#else
    static constexpr int kOffset = ByteWeights::kOffset;
#endif

    static void unpack(const uint8_t *lines, int pair, int v, VecU (&columns)[2]) {
        for (int i = 0; i < 2; ++i) {
            VecU stored = load_bytes(lines + (2 * pair + i) * kLineBytes + v * kVectorBytes);
            keep_in_register(stored); // GCC would load the line for each row of x
            VecU bytes[] = {stored};
            if constexpr (kOffset != 0) {
                ByteWeights::split(stored, bytes);
            }
            columns[i] = bytes[0];
        }
    }

    static VecI add_products(VecI sum, VecU columns, VecI x) { return dot(sum, columns, x); }
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_group8::INFINI_LEVEL::dot_kernel(const panels::Args &args) {
    infini::INFINI_LEVEL::multiply_by_dots<infini::INFINI_LEVEL::ByteLines>(args);
}
