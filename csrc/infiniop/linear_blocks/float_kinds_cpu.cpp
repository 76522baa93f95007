// The CPU decoders of FP8 and NF4: the code's value, which float holds, times the block's scale, rounded once.
#include "float_kinds.h"

#include "codes.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_blocks::kNf4;

// E4M3's values: exponent and mantissa are moved to float's place, and 2^120 moves the bias, exactly, denormals
// included. 0x7f and 0xff are NaN.
inline VecF fp8_values(VecU codes) {
    const VecU magnitude = codes & 0x7fu;
    const VecF value = (VecF)(magnitude << 20) * splat(0x1p120f);
    const VecU nan = (VecU)(magnitude == 0x7fu) & 0x7fc00000u;
    return (VecF)((VecU)value | nan | codes >> 7 << 31);
}

struct Fp8 {
    static constexpr int kElements = 128, kBytes = 132;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const VecF scale = splat(float_at(p));
#pragma GCC unroll 4
        for (int i = 0; i < kElements; i += kLanes) {
            sink(i, fp8_values(load_codes(p + 4 + i)) * scale);
        }
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
};

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_blocks::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_BLOCK_KIND(fp8, Fp8)
INFINI_DEFINE_BLOCK_KIND(nf4, Nf4)

} // namespace infini::linear_blocks::INFINI_LEVEL
