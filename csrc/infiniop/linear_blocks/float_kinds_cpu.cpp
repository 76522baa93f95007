// The CPU decoders of FP8 and NF4: the code's value, which float holds, times the block's scale, rounded once.
#include "float_kinds.h"

#include "codes.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_blocks::kNf4;

struct Fp8 {
    static constexpr int kElements = 128, kBytes = 132;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const uint8_t *const codes = p + 4;
        // A NaN among a block's codes makes NaN of all results that the block has a part in: as its scale does.
        const float scale = has_nan(codes) ? __builtin_nanf("") : float_at(p);
#pragma GCC unroll 8
        for (int i = 0; i < kElements; i += kAtOnce) {
            VecF values[kAtOnce / kLanes];
            widened(codes + i, values);
#pragma GCC unroll 4
            for (int v = 0; v < kAtOnce / kLanes; ++v) {
                sink(i + v * kLanes, values[v] * splat(scale));
            }
        }
    }

private:
#if defined(__AVX512BW__)
    static constexpr int kAtOnce = 32;
#else
    static constexpr int kAtOnce = 16;
#endif

    // Whether a code is 0x7f or 0xff.
    INFINI_ALWAYS_INLINE static bool has_nan(const uint8_t *codes) {
#if defined(__AVX512BW__)
        const __m512i sign = _mm512_set1_epi8(-128), nan = _mm512_set1_epi8(-1);
        const __m512i first = _mm512_or_si512(_mm512_loadu_si512(codes), sign);
        const __m512i second = _mm512_or_si512(_mm512_loadu_si512(codes + 64), sign);
        return (_mm512_cmpeq_epi8_mask(first, nan) | _mm512_cmpeq_epi8_mask(second, nan)) != 0;
#else
        Bytes found = {};
#pragma GCC unroll 8
        for (int i = 0; i < kElements; i += 16) {
            const Bytes magnitude = load_bytes(codes + i) | 0x80;
            found |= (Bytes)(magnitude == 0xff);
        }
        uint64_t halves[2];
        std::memcpy(halves, &found, sizeof halves);
        return (halves[0] | halves[1]) != 0;
#endif
    }

    // E4M3's values, of NaN any: exponent and mantissa are moved to the place of float16's (of float's where there is no
    // conversion), and a power of two makes up for the bias, exactly, denormals included.
    INFINI_ALWAYS_INLINE static void widened(const uint8_t *codes, VecF (&to)[kAtOnce / kLanes]) {
#if defined(__AVX512BW__)
        const __m512i extended = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes)));
        const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(extended, 7), _mm512_set1_epi16(int16_t(0xbf80)));
        to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * splat(256);
        to[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * splat(256);
#elif defined(__AVX2__)
        typedef int16_t Signed __attribute__((vector_size(16)));
        const __m128i zero = _mm_setzero_si128();
        const auto bytes = (__m128i)load_bytes(codes);
        __m128i halves[2] = {_mm_unpacklo_epi8(zero, bytes), _mm_unpackhi_epi8(zero, bytes)};
#pragma GCC unroll 2
        for (__m128i &half : halves) {
            half = (__m128i)((Signed)half >> 1 & static_cast<int16_t>(0xbf80)); // the sign stays at its place
        }
        to[0] = _mm256_cvtph_ps(halves[0]) * splat(256);
        to[1] = _mm256_cvtph_ps(halves[1]) * splat(256);
#else
        for (int v = 0; v < kVectors; ++v) {
            VecU code;
            for (int i = 0; i < kLanes; ++i) {
                code[i] = codes[v * kLanes + i];
            }
            to[v] = (VecF)((code & 0x7fu) << 20 | code >> 7 << 31) * splat(0x1p120f);
        }
#endif
    }
};

inline VecF nf4_values(VecU codes) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(kNf4));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kNf4), (__m256i)codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kNf4 + 8), (__m256i)codes);
    return _mm256_blendv_ps(low, high, (__m256)(codes << 28)); // by bit 3
#else
    VecF values;
    for (int i = 0; i < kLanes; ++i) {
        values[i] = kNf4[codes[i]];
    }
    return values;
#endif
}

struct Nf4 {
    static constexpr int kElements = 64, kBytes = 36;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const VecF scale = splat(float_at(p));
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            const Bytes pairs = load_bytes(p + 4 + 16 * part); // the first of a pair is in the upper half
            const Bytes first = pairs >> 4, second = pairs & 15;
            uint8_t codes[32];
            const Bytes both[2] = {
                __builtin_shufflevector(first, second, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                __builtin_shufflevector(first, second, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
            std::memcpy(codes, both, sizeof codes);
#pragma GCC unroll 8
            for (int i = 0; i < 32; i += kLanes) {
                sink(32 * part + i, nf4_values(load_codes(codes + i)) * scale);
            }
        }
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const __m512i table = table_of(_mm512_loadu_ps(kNf4) * splat(float_at(p)));
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            // The first of a pair is in the upper half of its byte.
            const auto pairs = (__m512i)load_codes(p + 4 + 16 * part);
            const __m512i words = _mm512_or_si512(_mm512_srli_epi32(pairs, 4), _mm512_slli_epi32(pairs, 16));
            sink(32 * part, look_up(table, words));
        }
    }
#endif
};

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_blocks::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_BLOCK_KIND(fp8, Fp8)
INFINI_DEFINE_BLOCK_KIND(nf4, Nf4)

} // namespace infini::linear_blocks::INFINI_LEVEL
