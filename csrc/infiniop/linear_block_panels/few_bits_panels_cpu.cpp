// How GGML's kinds of few bits in panels are multiplied: their headers and their codes' values.
#include "few_bits_panels.h"

#include "panel_kernels.h"

namespace infini::INFINI_LEVEL {
namespace {

#if defined(INFINI_BF16_PANELS)

template <int kBitsOf, int kGroupOf, int kHeaderBytesOf, bool kShiftsOf> struct Of256 {
    static constexpr int kElements = 256, kGroup = kGroupOf, kBits = kBitsOf, kHeaderBytes = kHeaderBytesOf;
    static constexpr bool kShifts = kShiftsOf;
};

// The codes 0 to kCodes - 1, and `first`, again and again: their lookup ignores other bits of a word.
template <int kCodes> inline Table16 repeated_codes(float first) {
    VecF codes{};
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        codes[i] = static_cast<float>(i % kCodes);
    }
    return Table16(codes + splat(first));
}

// Scales and minima of 16 groups, four bits each, times factors of the block.
struct Q2_K : Of256<2, 16, 320, true> {
    struct Header {
        const uint8_t *both;
        VecF d, least;
        explicit Header(const uint8_t *p) : both(p + 64), d(halves_at(p)), least(-halves_at(p + 32)) {}
        INFINI_ALWAYS_INLINE VecF scale(int g) const {
            return _mm512_cvtepi32_ps(_mm512_and_si512(at(g), _mm512_set1_epi32(15))) * d;
        }
        INFINI_ALWAYS_INLINE VecF shift(int g) const { return _mm512_cvtepi32_ps(_mm512_srli_epi32(at(g), 4)) * least; }

    private:
        INFINI_ALWAYS_INLINE __m512i at(int g) const {
            return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(both + kPanel * g)));
        }
    };
    static Table16 table() { return repeated_codes<4>(0); }
};

// Scales of 16 groups: four bits of each in eight bytes, the lower halves first, and two more in four bytes.
struct Q3_K : Of256<3, 16, 224, false> {
    struct Header {
        VecF d;
        __m512i scales[4]; // of four groups: a byte each, 32 too large
        explicit Header(const uint8_t *p) : d(halves_at(p)) {
            const __m512i s[2] = {line_at(p + 32), line_at(p + 96)}, upper = line_at(p + 160);
            const __m512i four = _mm512_set1_epi8(0x0f), two = _mm512_set1_epi8(0x30);
            const auto six = [&](__m512i low, __m512i high) {
                return _mm512_or_si512(_mm512_and_si512(low, four), _mm512_and_si512(high, two));
            };
            scales[0] = six(s[0], _mm512_slli_epi32(upper, 4));
            scales[1] = six(s[1], _mm512_slli_epi32(upper, 2));
            scales[2] = six(_mm512_srli_epi32(s[0], 4), upper);
            scales[3] = six(_mm512_srli_epi32(s[1], 4), _mm512_srli_epi32(upper, 2));
        }
        INFINI_ALWAYS_INLINE VecF scale(int g) const {
            const __m512i byte = _mm512_srli_epi32(scales[g / 4], 8 * (g % 4));
            const VecF q = _mm512_cvtepi32_ps(_mm512_and_si512(byte, _mm512_set1_epi32(0x3f)));
            return (q - splat(32)) * d;
        }
    };
    static Table16 table() { return repeated_codes<8>(-4); }
};

// Scales of eight groups: four bits of each in four bytes, two more in two.
struct Iq4Xs : Of256<4, 32, 128, false> {
    struct Header {
        VecF d;
        __m512i low, upper;
        explicit Header(const uint8_t *p)
            : d(halves_at(p)), low(line_at(p + 64)),
              upper(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 32)))) {}
        INFINI_ALWAYS_INLINE VecF scale(int g) const {
            const __m512i four = _mm512_and_si512(_mm512_srli_epi32(low, 4 * g), _mm512_set1_epi32(15));
            const __m512i two = _mm512_and_si512(_mm512_srli_epi32(upper, 2 * g), _mm512_set1_epi32(3));
            const VecF q = _mm512_cvtepi32_ps(_mm512_or_si512(four, _mm512_slli_epi32(two, 4)));
            return (q - splat(32)) * d;
        }
    };
    static Table16 table() { return iq4_table(); }
};

#elif defined(INFINI_INTEGER_PANELS)

template <int kBitsOf, int kGroupOf, int kHeaderBytesOf, int kOffsetOf, bool kShiftsOf> struct Of256 {
    static constexpr int kElements = 256, kGroup = kGroupOf, kBits = kBitsOf, kHeaderBytes = kHeaderBytesOf;
    static constexpr int kOffset = kOffsetOf;
    static constexpr bool kShifts = kShiftsOf;
    static VecS value(VecS code) { return code; }
};

// Scales and minima of 16 groups, four bits each, times factors of the block.
struct Q2_K : Of256<2, 16, 320, 0, true> {
    struct Header {
        const uint8_t *both;
        VecF d[kParts], least[kParts];
        explicit Header(const uint8_t *p) : both(p + 64) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                d[part] = halves_at(p, part);
                least[part] = -halves_at(p + 32, part);
            }
        }
        VecF scale(int g, int part) const { return floats_of(bytes_at(both + kPanel * g, part) & 15) * d[part]; }
        VecF shift(int g, int part) const { return floats_of(bytes_at(both + kPanel * g, part) >> 4) * least[part]; }
    };
};

// Scales of 16 groups: four bits of each in eight bytes, the lower halves first, and two more in four bytes.
struct Q3_K : Of256<3, 16, 224, 4, false> {
    struct Header {
        VecF scales[16][kParts];
        explicit Header(const uint8_t *p) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                const auto line = [&](int i) { return (VecU)part_at(p + 32 + 64 * i, part); };
                const VecU s[2] = {line(0), line(1)}, upper = line(2);
                const auto six = [](VecU low, VecU high) { return (low & 0x0f0f0f0fu) | (high & 0x30303030u); };
                const VecU of[4] = {six(s[0], upper << 4), six(s[1], upper << 2), six(s[0] >> 4, upper),
                                    six(s[1] >> 4, upper >> 2)};
                const VecF d = halves_at(p, part);
#pragma GCC unroll 16
                for (int g = 0; g < 16; ++g) {
                    scales[g][part] = (floats_of(of[g / 4] >> (8 * (g % 4)) & 0x3fu) - splat(32)) * d;
                }
            }
        }
        VecF scale(int g, int part) const { return scales[g][part]; }
    };
};

// Scales of eight groups: four bits of each in four bytes, two more in two.
struct Iq4Xs : Of256<4, 32, 128, 127, false> {
    struct Header {
        VecF scales[8][kParts];
        explicit Header(const uint8_t *p) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                uint16_t halves[kLanes];
                std::memcpy(halves, p + 32 + static_cast<int>(sizeof halves) * part, sizeof halves);
                VecU upper;
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i) {
                    upper[i] = halves[i];
                }
                const VecU low = (VecU)part_at(p + 64, part);
                const VecF d = halves_at(p, part);
#pragma GCC unroll 8
                for (int g = 0; g < 8; ++g) {
                    const VecU six = (low >> (4 * g) & 15u) | (upper >> (2 * g) & 3u) << 4;
                    scales[g][part] = (floats_of(six) - splat(32)) * d;
                }
            }
        }
        VecF scale(int g, int part) const { return scales[g][part]; }
    };
    INFINI_ALWAYS_INLINE static VecS value(VecS code) { return iq4_value(code); }
};

#endif

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_block_panels::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_PANEL_KIND(q2_k, Q2_K)
INFINI_DEFINE_PANEL_KIND(q3_k, Q3_K)
INFINI_DEFINE_PANEL_KIND(iq4_xs, Iq4Xs)

} // namespace infini::linear_block_panels::INFINI_LEVEL
