// How NVFP4 in panels is multiplied: its header, and its codes' values, doubled.
#include "nvfp4_panels.h"

#include "panel_kernels.h"

namespace infini::INFINI_LEVEL {
namespace {

#if defined(INFINI_BF16_PANELS)

struct Nvfp4 {
    static constexpr int kElements = 128, kGroup = 16, kBits = 4, kHeaderBytes = 192;
    static constexpr bool kShifts = false;
    struct Header {
        const uint8_t *scales;
        VecF half;
        explicit Header(const uint8_t *p) : scales(p + 64), half(_mm512_loadu_ps(p) * splat(0.5f)) {}
        INFINI_ALWAYS_INLINE VecF scale(int g) const {
            const __m512i code =
                _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(scales + kPanel * g)));
            const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
            const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(code, 7), 31);
            // Exponent and mantissa at the place of float's; a power of two makes up for the bias, exactly.
            const VecF value = (VecF)_mm512_or_si512(_mm512_slli_epi32(magnitude, 20), sign) * splat(0x1p120f);
            const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
            return (VecF)_mm512_mask_blend_ps(is_nan, value, splat(__builtin_nanf(""))) * half;
        }
    };
    static Table16 table() { return fp4_table(); }
};

#elif defined(INFINI_INTEGER_PANELS)

struct Nvfp4 {
    static constexpr int kElements = 128, kGroup = 16, kBits = 4, kHeaderBytes = 192, kOffset = 12;
    static constexpr bool kShifts = false;
    struct Header {
        const uint8_t *p;
        explicit Header(const uint8_t *bytes) : p(bytes) {}
        VecF scale(int g, int part) const {
            const VecU code = bytes_at(p + 64 + kPanel * g, part), magnitude = code & 0x7f;
            const VecF value = (VecF)(magnitude << 20 | code >> 7 << 31) * splat(0x1p120f);
            const VecF half = load(reinterpret_cast<const float *>(p) + part * kLanes) * splat(0.5f);
            return ((VecI)magnitude == 0x7f ? splat(__builtin_nanf("")) : value) * half;
        }
    };
    INFINI_ALWAYS_INLINE static VecS value(VecS code) { return fp4_value(code); }
};

#endif

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_block_panels::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_PANEL_KIND(nvfp4, Nvfp4)

} // namespace infini::linear_block_panels::INFINI_LEVEL
