// linear_group8 in tile registers.
#include "linear_group8.h"
#include "panel_weights/panel_tiles.h"

namespace infini::INFINI_LEVEL {
namespace {

struct ByteLines : linear_group8::Layout {
#if defined(__AVX512F__)
    static void load(const uint8_t *lines, int pair, __m512i (&columns)[2]) {
        columns[0] = _mm512_loadu_si512(lines + 2 * pair * kLineBytes);
        columns[1] = _mm512_loadu_si512(lines + (2 * pair + 1) * kLineBytes);
    }
#endif
    static int at(const uint8_t *lines, int pair, int half, int64_t byte) {
        return static_cast<int8_t>(lines[(2 * pair + half) * kLineBytes + byte]);
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_group8::INFINI_LEVEL::tile_kernel(const panels::Args &args) {
    infini::INFINI_LEVEL::multiply_by_tiles<infini::INFINI_LEVEL::ByteLines>(args);
}
