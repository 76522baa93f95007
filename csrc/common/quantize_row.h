// Quantizes a row to int8 with a scale: for weights, cached keys and values, and the x of quantized products.
// Included only by *_cpu.cpp files, like vec.h.
#pragma once

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Rounds each lane to the nearest integer, ties to even. Lanes must be far below 2^22.
inline VecI nearest(VecF value) {
    constexpr float kRounds = 0x1.8p23f; // floats of this size have no fraction, so the addition rounds
    return (VecI)(value + splat(kRounds)) - static_cast<int32_t>(bits_of(kRounds));
}

// Stores the lower byte of the first n lanes, of values that a byte holds.
inline void store_bytes(int8_t *p, VecI value, int n) {
#if defined(__AVX512F__)
    _mm512_mask_cvtepi32_storeu_epi8(p, static_cast<__mmask16>((1u << n) - 1), (__m512i)value);
#elif defined(__AVX2__)
    // GCC 12 emits some 30 instructions for the conversion below. No value needs the saturation.
    const auto all = (__m256i)value;
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const __m128i bytes = _mm_packs_epi16(words, words);
    std::memcpy(p, &bytes, static_cast<size_t>(n));
#elif defined(__aarch64__)
    const int16x4_t words = vmovn_s32((int32x4_t)value);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    std::memcpy(p, &bytes, static_cast<size_t>(n));
#else
    typedef int8_t VecB __attribute__((vector_size(kLanes)));
    const VecB bytes = __builtin_convertvector(value, VecB);
    std::memcpy(p, &bytes, static_cast<size_t>(n));
#endif
}

// x[i] is approximately q[i] * scale. Returns scale = max |x| / 127; q[i] is x[i] / scale rounded to nearest even. A
// row that holds infinity or NaN has scale NaN and q = 0; a row of zeros has scale 0.
template <typename T> float quantize_row(const T *x, int64_t n, int8_t *q) {
    VecI magnitudes{}; // compared as integers: NaN lies above infinity, infinity above all finite values
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecI bits = (VecI)load_at(x, i, lanes) & 0x7fffffff;
        magnitudes = bits > magnitudes ? bits : magnitudes;
    });
    int32_t most = 0;
    for (int i = 0; i < kLanes; ++i) {
        most = magnitudes[i] > most ? magnitudes[i] : most;
    }
    if (most >= 0x7f800000) {
        std::memset(q, 0, static_cast<size_t>(n));
        return float_of(0x7fc00000);
    }
    const float scale = float_of(static_cast<uint32_t>(most)) / 127;
    const VecF divisor = splat(scale > 0 ? scale : 1);
    for_each_vector(n, [&](int64_t i, auto lanes) {
        // If the scale is denormal, and so imprecise, the quotient can exceed 127.
        const VecF value = min(splat(127), max(splat(-127), load_at(x, i, lanes) / divisor));
        store_bytes(q + i, nearest(value), lanes);
    });
    return scale;
}

} // namespace
} // namespace infini::INFINI_LEVEL
