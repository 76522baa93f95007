// The CPU decoder of NVFP4: a scale times the block's factor, rounded, times the code's value, rounded once more.
#include "nvfp4_kind.h"

#include "codes.h"

namespace infini::INFINI_LEVEL {
namespace {

struct Nvfp4 {
    static constexpr int kElements = 128, kBytes = 76;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const Bytes table = fp4_levels();
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            const Bytes q = load_bytes(p + 12 + 16 * part);
            scaled(look_up(table, q & 15), half_of_scale(p, 2 * part), 32 * part, sink);
            scaled(look_up(table, shifted_right<4>(q, 15)), half_of_scale(p, 2 * part + 1), 32 * part + 16, sink);
        }
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        VecF levels[1];
        widen(fp4_levels(), levels);
        const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) {
            // The upper nibbles are of the second scale.
            const __m512i codes = _mm512_and_si512(nibble_words(p + 12 + 16 * part), nibble);
            const __m512i table = table_of(levels[0] * splat(half_of_scale(p, 2 * part)),
                                           levels[0] * splat(half_of_scale(p, 2 * part + 1)));
            sink(32 * part, look_up(table, _mm512_mask_or_epi32(codes, 0xff00, codes, second)));
        }
    }
#endif

private:
    // Of 16 elements; half, for doubled values.
    INFINI_ALWAYS_INLINE static float half_of_scale(const uint8_t *p, int group) {
        const uint32_t code = p[4 + group], magnitude = code & 0x7f;
        // Exponent and mantissa at the place of float's; a power of two makes up for the bias, exactly.
        const float scale = float_of(magnitude << 20 | code >> 7 << 31) * 0x1p120f;
        return (magnitude == 0x7f ? __builtin_nanf("") : scale) * (0.5f * float_at(p));
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_blocks::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_BLOCK_KIND(nvfp4, Nvfp4)

} // namespace infini::linear_blocks::INFINI_LEVEL
