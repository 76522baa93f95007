// How blocks of 4-bit codes with a scale and a zero point are multiplied in panels.
#include "int4_panels.h"

#include "panel_kernels.h"

namespace infini::INFINI_LEVEL {
namespace {

#if defined(INFINI_BF16_PANELS)
// Elements are (code - zero) * scale. Codes count from -8, so that little remains for the shift.
template <int kGroupOf> struct Int4 {
    static constexpr int kElements = kGroupOf, kGroup = kGroupOf, kBits = 4, kHeaderBytes = 64;
    static constexpr bool kShifts = true;
    struct Header {
        VecF of, zero;
        explicit Header(const uint8_t *p) : of(halves_at(p)), zero(halves_at(p + 32)) {}
        VecF scale(int) const { return of; }
        VecF shift(int) const { return (splat(8) - zero) * of; }
    };
    static Table16 table() { return Table16(counted_from(-8)); }
};
#elif defined(INFINI_INTEGER_PANELS)
template <int kGroupOf> struct Int4 {
    static constexpr int kElements = kGroupOf, kGroup = kGroupOf, kBits = 4, kHeaderBytes = 64, kOffset = 8;
    static constexpr bool kShifts = true;
    struct Header {
        const uint8_t *p;
        explicit Header(const uint8_t *bytes) : p(bytes) {}
        VecF scale(int, int part) const { return halves_at(p, part); }
        VecF shift(int g, int part) const { return (splat(8) - halves_at(p + 32, part)) * scale(g, part); }
    };
    static VecS value(VecS code) { return code; }
};
#endif

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_block_panels::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_PANEL_KIND(int4_32, Int4<32>)
INFINI_DEFINE_PANEL_KIND(int4_64, Int4<64>)
INFINI_DEFINE_PANEL_KIND(int4_128, Int4<128>)

} // namespace infini::linear_block_panels::INFINI_LEVEL
