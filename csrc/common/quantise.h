// A row as int8 with a scale: what the cached keys and values and the x of quantised products become.
// Included only by *_cpu.cpp files, like vec.h.
#pragma once

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

inline void store_bytes(int8_t *p, VecI v, Full) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int lane = 0; lane < kLanes; ++lane) {
        p[lane] = static_cast<int8_t>(v[lane]);
    }
#endif
}

inline void store_bytes(int8_t *p, VecI v, int n) {
    for (int lane = 0; lane < n; ++lane) {
        p[lane] = static_cast<int8_t>(v[lane]);
    }
}

// x[i] = q[i] * scale nearly, with the returned scale = max |x| / 127: q[i] is x[i] / scale rounded to nearest even. A
// row with infinity or NaN in it has the scale NaN and q of zeros, a row of zeros the scale 0.
template <typename T> float quantise_row(const T *x, int64_t n, int8_t *q) {
    VecI magnitudes{}; // as integers, NaN lies above infinity, and this above all finite values
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
    constexpr float kRounds = 0x1.8p23f; // added to it, a value is rounded to an integer, to nearest even
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecF value = min(splat(127), max(splat(-127), load_at(x, i, lanes) / divisor));
        store_bytes(q + i, (VecI)(value + splat(kRounds)) - static_cast<int32_t>(bits_of(kRounds)), lanes);
    });
    return scale;
}

} // namespace
} // namespace infini::INFINI_LEVEL
