// How GGML's kinds of blocks in panels are multiplied: their headers and their codes' values.
#include "ggml_panels.h"

#include "panel_kernels.h"

namespace infini::INFINI_LEVEL {
namespace {

#if defined(INFINI_BF16_PANELS)

// A scale in float16, and its negative or positive shift, for each block of 32.
struct OneScale {
    VecF of;
    explicit OneScale(const uint8_t *p) : of(halves_at(p)) {}
    VecF scale(int) const { return of; }
};
struct ScaleAndShift : OneScale {
    VecF least;
    explicit ScaleAndShift(const uint8_t *p) : OneScale(p), least(halves_at(p + 32)) {}
    VecF shift(int) const { return least; }
};

template <int kBitsOf, typename HeaderOf> struct Of32 {
    static constexpr int kElements = 32, kGroup = 32, kBits = kBitsOf;
    static constexpr bool kShifts = std::is_same_v<HeaderOf, ScaleAndShift>;
    static constexpr int kHeaderBytes = kShifts ? 64 : 32;
    using Header = HeaderOf;
};

struct Q4_0 : Of32<4, OneScale> {
    static Table16 table() { return Table16(counted_from(-8)); }
};
struct Q4_1 : Of32<4, ScaleAndShift> {
    static Table16 table() { return Table16(counted_from(0)); }
};
struct Q5_0 : Of32<5, OneScale> {
    static Table32 table() { return {counted_from(-16), counted_from(0)}; }
};
struct Q5_1 : Of32<5, ScaleAndShift> {
    static Table32 table() { return {counted_from(0), counted_from(16)}; }
};

struct Q8_0 : Of32<8, OneScale> {
    static NoTable table() { return {}; }
};

struct Iq4Nl : Of32<4, OneScale> {
    static Table16 table() { return iq4_table(); }
};

// Half the scale, 2 ** (e - 128), for doubled values; also of e = 0 and 1, whose powers are denormal.
struct HalfOfExponent {
    VecF of;
    explicit HalfOfExponent(const uint8_t *p) {
        const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        const __m512i denormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
        of = (VecF)_mm512_mask_mov_epi32(normal, _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), denormal);
    }
    VecF scale(int) const { return of; }
};
struct Mxfp4 : Of32<4, HalfOfExponent> {
    static constexpr int kHeaderBytes = 16;
    static Table16 table() { return fp4_table(); }
};

// The scales and minima of eight groups, six bits each, times factors of the block.
struct SixBits {
    VecF d, least;
    __m512i scales[2], shifts[2]; // of four groups: a byte each

    explicit SixBits(const uint8_t *p) : d(halves_at(p)), least(-halves_at(p + 32)) {
        const __m512i s[3] = {line_at(p + 64), line_at(p + 128), line_at(p + 192)};
        const __m512i six = _mm512_set1_epi8(0x3f), four = _mm512_set1_epi8(0x0f), two = _mm512_set1_epi8(0x30);
        const auto upper = [&](__m512i low, __m512i of) {
            return _mm512_or_si512(_mm512_and_si512(low, four), _mm512_and_si512(_mm512_srli_epi32(of, 2), two));
        };
        scales[0] = _mm512_and_si512(s[0], six);
        shifts[0] = _mm512_and_si512(s[1], six);
        scales[1] = upper(s[2], s[0]);
        shifts[1] = upper(_mm512_srli_epi32(s[2], 4), s[1]);
    }
    INFINI_ALWAYS_INLINE VecF scale(int g) const { return number(scales[g / 4], g % 4) * d; }
    INFINI_ALWAYS_INLINE VecF shift(int g) const { return number(shifts[g / 4], g % 4) * least; }

private:
    INFINI_ALWAYS_INLINE static VecF number(__m512i bytes, int i) {
        return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, 8 * i), _mm512_set1_epi32(0x3f)));
    }
};

template <int kBitsOf> struct Of256 {
    static constexpr int kElements = 256, kGroup = 32, kBits = kBitsOf, kHeaderBytes = 256;
    static constexpr bool kShifts = true;
    using Header = SixBits;
};
struct Q4_K : Of256<4> {
    static Table16 table() { return Table16(counted_from(0)); }
};
struct Q5_K : Of256<5> {
    static Table32 table() { return {counted_from(0), counted_from(16)}; }
};

struct Q6_K {
    static constexpr int kElements = 256, kGroup = 16, kBits = 6, kHeaderBytes = 288;
    static constexpr bool kShifts = false;
    struct Header {
        const uint8_t *bytes;
        VecF d;
        explicit Header(const uint8_t *p) : bytes(p + 32), d(halves_at(p)) {}
        INFINI_ALWAYS_INLINE VecF scale(int g) const {
            const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes + 16 * g));
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)) * d;
        }
    };
    static Table64 table() { return {counted_from(-32), counted_from(-16), counted_from(0), counted_from(16)}; }
};

#elif defined(INFINI_INTEGER_PANELS)

struct OneScale {
    const uint8_t *p;
    explicit OneScale(const uint8_t *bytes) : p(bytes) {}
    VecF scale(int, int part) const { return halves_at(p, part); }
};
struct ScaleAndShift : OneScale {
    using OneScale::OneScale;
    VecF shift(int, int part) const { return halves_at(p + 32, part); }
};

template <int kBitsOf, int kOffsetOf, typename HeaderOf> struct Of32 {
    static constexpr int kElements = 32, kGroup = 32, kBits = kBitsOf, kOffset = kOffsetOf;
    static constexpr bool kShifts = std::is_same_v<HeaderOf, ScaleAndShift>;
    static constexpr int kHeaderBytes = kShifts ? 64 : 32;
    using Header = HeaderOf;
    static VecS value(VecS code) { return code; }
};

using Q4_0 = Of32<4, 8, OneScale>;
using Q4_1 = Of32<4, 0, ScaleAndShift>;
using Q5_0 = Of32<5, 16, OneScale>;
using Q5_1 = Of32<5, 0, ScaleAndShift>;
using Q8_0 = Of32<8, 0, OneScale>;

struct Iq4Nl : Of32<4, 127, OneScale> {
    INFINI_ALWAYS_INLINE static VecS value(VecS code) { return iq4_value(code); }
};

// Half the scale, 2 ** (e - 128), for doubled values; also of e = 0 and 1, whose powers are denormal.
struct HalfOfExponent {
    const uint8_t *p;
    explicit HalfOfExponent(const uint8_t *bytes) : p(bytes) {}
    VecF scale(int, int part) const {
        const VecU e = bytes_at(p, part);
        return (VecI)e < 2 ? (VecF)(0x00200000u << e) : (VecF)((e - 1) << 23); // one blend where there are no masks
    }
};
struct Mxfp4 : Of32<4, 12, HalfOfExponent> {
    static constexpr int kHeaderBytes = 16;
    INFINI_ALWAYS_INLINE static VecS value(VecS code) { return fp4_value(code); }
};

// The scales and minima of eight groups, six bits each, times factors of the block.
struct SixBits {
    VecF scales[8][kParts], shifts[8][kParts];

    explicit SixBits(const uint8_t *p) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            const VecF d = halves_at(p, part), least = -halves_at(p + 32, part);
            const VecU s[3] = {(VecU)part_at(p + 64, part), (VecU)part_at(p + 128, part), (VecU)part_at(p + 192, part)};
            const auto upper = [&](VecU low, VecU of) { return (low & 0x0f0f0f0fu) | (of >> 2 & 0x30303030u); };
            const VecU of_scales[2] = {s[0], upper(s[2], s[0])}, of_shifts[2] = {s[1], upper(s[2] >> 4, s[1])};
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                scales[g][part] = number(of_scales[g / 4], g % 4) * d;
                shifts[g][part] = number(of_shifts[g / 4], g % 4) * least;
            }
        }
    }
    VecF scale(int g, int part) const { return scales[g][part]; }
    VecF shift(int g, int part) const { return shifts[g][part]; }

private:
    INFINI_ALWAYS_INLINE static VecF number(VecU bytes, int i) { return floats_of(bytes >> (8 * i) & 0x3fu); }
};

template <int kBitsOf> struct Of256 {
    static constexpr int kElements = 256, kGroup = 32, kBits = kBitsOf, kHeaderBytes = 256, kOffset = 0;
    static constexpr bool kShifts = true;
    using Header = SixBits;
    static VecS value(VecS code) { return code; }
};
using Q4_K = Of256<4>;
using Q5_K = Of256<5>;

struct Q6_K {
    static constexpr int kElements = 256, kGroup = 16, kBits = 6, kHeaderBytes = 288, kOffset = 32;
    static constexpr bool kShifts = false;
    struct Header {
        const uint8_t *p;
        VecF d[kParts];
        explicit Header(const uint8_t *bytes) : p(bytes) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                d[part] = halves_at(bytes, part);
            }
        }
        VecF scale(int g, int part) const {
            return load(reinterpret_cast<const int8_t *>(p + 32 + kPanel * g) + part * kLanes) * d[part];
        }
    };
    static VecS value(VecS code) { return code; }
};

#endif

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_block_panels::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_PANEL_KIND(q4_0, Q4_0)
INFINI_DEFINE_PANEL_KIND(q4_1, Q4_1)
INFINI_DEFINE_PANEL_KIND(q5_0, Q5_0)
INFINI_DEFINE_PANEL_KIND(q5_1, Q5_1)
INFINI_DEFINE_PANEL_KIND(q8_0, Q8_0)
INFINI_DEFINE_PANEL_KIND(q4_k, Q4_K)
INFINI_DEFINE_PANEL_KIND(q5_k, Q5_K)
INFINI_DEFINE_PANEL_KIND(q6_k, Q6_K)
INFINI_DEFINE_PANEL_KIND(iq4_nl, Iq4Nl)
INFINI_DEFINE_PANEL_KIND(mxfp4, Mxfp4)

} // namespace infini::linear_block_panels::INFINI_LEVEL
