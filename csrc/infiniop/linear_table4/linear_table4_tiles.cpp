// linear_table4 in tile registers.
#include "linear_table4.h"
#include "panel_weights/panel_tiles.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_table4::kTable;

struct TableWeights : linear_table4::Layout {
#if defined(__AVX512F__)
    static void load(const uint8_t *lines, int pair, __m512i (&columns)[2]) {
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(kTable)));
        const __m512i nibbles = _mm512_set1_epi8(15), indices = _mm512_loadu_si512(lines + pair * kLineBytes);
        columns[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(indices, nibbles));
        columns[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(indices, 4), nibbles));
    }
#endif
    static int at(const uint8_t *lines, int pair, int half, int64_t byte) {
        return kTable[lines[pair * kLineBytes + byte] >> (4 * half) & 15];
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_table4::INFINI_LEVEL::tile_kernel(const panels::Args &args) {
    infini::INFINI_LEVEL::multiply_by_tiles<infini::INFINI_LEVEL::TableWeights>(args);
}
