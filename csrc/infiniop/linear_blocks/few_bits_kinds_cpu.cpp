// The CPU decoders of GGML's kinds of few bits. A value is exact in float but for the rounding of q * scale + shift, as
// a whole. Scales are of 16 elements (IQ4_XS: 32): a table for a lookup of bfloat16 has the values of two of them.
#include "few_bits_kinds.h"

#include "codes.h"

namespace infini::INFINI_LEVEL {
namespace {

typedef uint32_t Quarters __attribute__((vector_size(16)));

#if defined(__AVX512BF16__)
// The codes 0 to kCodes - 1 of a first sub-block, then those of a second, and so on.
template <int kCodes> inline VecF repeated_codes() {
    VecF codes;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        codes[i] = static_cast<float>(i % kCodes);
    }
    return codes;
}

// Indices of 32 elements, of which the last 16 have those of the second sub-block, `second` larger.
inline __m512i of_two(__m512i words, int16_t second) {
    return _mm512_mask_or_epi32(words, 0xff00, words, _mm512_set1_epi16(second));
}
#endif

struct Q2_K {
    static constexpr int kElements = 256, kBytes = 84;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const Parts parts(p);
        half<0>(p, parts, sink);
        half<1>(p, parts, sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const Parts parts(p);
        const VecF codes = repeated_codes<4>();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512i words = _mm512_srli_epi16(load_words(p + 16 + 32 * (j / 4)), 2 * (j % 4));
            const auto both = [&](const float *of) __attribute__((always_inline)) {
                return (VecF)_mm512_mask_blend_ps(0xf0f0, splat(of[2 * j]), splat(of[2 * j + 1]));
            };
            const __m512i table = table_of(fma(codes, both(parts.scales), both(parts.shifts)));
            sink(32 * j, look_up(table, of_two(_mm512_and_si512(words, _mm512_set1_epi16(3)), 4)));
        }
    }
#endif

private:
    struct Parts {
        alignas(64) float scales[16], shifts[16];

        INFINI_ALWAYS_INLINE explicit Parts(const uint8_t *block) {
            const Bytes both = load_bytes(block);
            multiples(both & 15, half_at(block + 80), scales);
            multiples(shifted_right<4>(both, 15), -half_at(block + 82), shifts);
        }
    };
    template <int kHalf, typename Sink>
    INFINI_ALWAYS_INLINE static void half(const uint8_t *p, const Parts &parts, const Sink &sink) {
        const Bytes q[2] = {load_bytes(p + 16 + 32 * kHalf), load_bytes(p + 32 + 32 * kHalf)};
        const auto pass = [&](int i, Bytes codes) __attribute__((always_inline)) {
            const int j = 8 * kHalf + i;
            shifted(codes, parts.scales[j], parts.shifts[j], 16 * j, sink);
        };
        pass(0, q[0] & 3);
        pass(1, q[1] & 3);
        pass(2, shifted_right<2>(q[0], 3));
        pass(3, shifted_right<2>(q[1], 3));
        pass(4, shifted_right<4>(q[0], 3));
        pass(5, shifted_right<4>(q[1], 3));
        pass(6, shifted_right<6>(q[0], 3));
        pass(7, shifted_right<6>(q[1], 3));
    }
};

struct Q3_K {
    static constexpr int kElements = 256, kBytes = 110;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        float scales[16];
        set_scales(p, scales);
        part<0>(p, scales, sink);
        part<1>(p, scales, sink);
        part<2>(p, scales, sink);
        part<3>(p, scales, sink);
        part<4>(p, scales, sink);
        part<5>(p, scales, sink);
        part<6>(p, scales, sink);
        part<7>(p, scales, sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        float scales[16];
        set_scales(p, scales);
        const VecF codes = repeated_codes<8>() - splat(4);
        const __m256i third = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512i words = _mm512_and_si512(_mm512_srli_epi16(load_words(p + 32 + 32 * (j / 4)), 2 * (j % 4)),
                                                   _mm512_set1_epi16(3));
            const __mmask32 bits = _mm256_test_epi8_mask(third, _mm256_set1_epi8(static_cast<char>(1 << j)));
            const __m512i index = _mm512_mask_add_epi16(words, bits, words, _mm512_set1_epi16(4));
            const VecF both = _mm512_mask_blend_ps(0xff00, splat(scales[2 * j]), splat(scales[2 * j + 1]));
            sink(32 * j, look_up(table_of(codes * both), of_two(index, 8)));
        }
    }
#endif

private:
    // Four bits of each in eight bytes, the lower halves first, and two more in four bytes.
    static void set_scales(const uint8_t *p, float *scales) {
        uint32_t s[3];
        std::memcpy(s, p + 96, sizeof s);
        constexpr uint32_t kFour = 0x0f0f0f0f, kTwo = 0x30303030;
        const Quarters six = {(s[0] & kFour) | (s[2] << 4 & kTwo), (s[1] & kFour) | (s[2] << 2 & kTwo),
                              (s[0] >> 4 & kFour) | (s[2] & kTwo), (s[1] >> 4 & kFour) | (s[2] >> 2 & kTwo)};
        multiples((Bytes)six - 32, half_at(p + 108), scales);
    }
    // 32 elements; their third bits are bit kJ of 32 bytes.
    template <int kJ, typename Sink>
    INFINI_ALWAYS_INLINE static void part(const uint8_t *p, const float *scales, const Sink &sink) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const Bytes third = load_bytes(p + 16 * half), q = load_bytes(p + 32 + 32 * (kJ / 4) + 16 * half);
            Bytes bit;
            if constexpr (kJ < 2) {
                bit = shifted_left<2 - kJ>(third, 4);
            } else {
                bit = shifted_right<kJ - 2>(third, 4);
            }
            scaled((shifted_right<kJ % 4 * 2>(q, 3) | bit) - 4, scales[2 * kJ + half], 32 * kJ + 16 * half, sink);
        }
    }
};

struct Iq4Xs {
    static constexpr int kElements = 256, kBytes = 136;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const Bytes table = iq4_levels();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const Bytes q = load_bytes(p + 8 + 16 * j);
            const float scale = scale_of(p, j);
            scaled(look_up(table, q & 15), scale, 32 * j, sink);
            scaled(look_up(table, shifted_right<4>(q, 15)), scale, 32 * j + 16, sink);
        }
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        VecF levels[1];
        widen(iq4_levels(), levels);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512i table = table_of(levels[0] * splat(scale_of(p, j)));
            sink(32 * j, look_up(table, nibble_words(p + 8 + 16 * j)));
        }
    }
#endif

private:
    INFINI_ALWAYS_INLINE static float scale_of(const uint8_t *p, int j) {
        const int low = p[4 + j / 2] >> j % 2 * 4 & 15, upper = p[2 + j / 4] >> j % 4 * 2 & 3;
        return half_at(p) * static_cast<float>((low | upper << 4) - 32);
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_blocks::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_BLOCK_KIND(q2_k, Q2_K)
INFINI_DEFINE_BLOCK_KIND(q3_k, Q3_K)
INFINI_DEFINE_BLOCK_KIND(iq4_xs, Iq4Xs)

} // namespace infini::linear_blocks::INFINI_LEVEL
