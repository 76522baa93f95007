// The packed formats of q, K and V: floats, or pairs of bf16 where the machine multiplies those. q is packed row by
// row, K with the keys along the lanes, V with the columns along the lanes.
#pragma once

#include "kv_prefetcher.h"
#include "block_sizes.h"

namespace infini::INFINI_LEVEL {
namespace {

struct Pair {
    uint32_t bits;
};

template <typename T> struct Packed {
    using Type = float;
};

// The packed type of q for dot products with rows of E that are read in place.
template <typename T, typename E> struct PackedForDots {
    using Type = typename Packed<T>::Type;
};

#if defined(__AVX512BF16__)

template <> struct Packed<bf16> {
    using Type = Pair;
};

inline __m512bh load(const Pair *p) {
    __m512i v = _mm512_loadu_si512(p);
    return (__m512bh)v;
}

// One vector of packed columns from the n elements at p (2 * kLanes or more: all of them).
inline VecF load_packed(const Pair *, const bf16 *p, int64_t n) {
    return (VecF)_mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1, p);
}

// 8-bit integers are exact in bf16.
inline VecF load_packed(const Pair *, const int8_t *p, int64_t n) {
    const __m256i bytes =
        n >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)) : _mm256_maskz_loadu_epi8((1u << n) - 1, p);
    const __m512i first = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes));
    const __m512i second = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1));
    return (VecF)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(second), _mm512_cvtepi32_ps(first));
}

inline VecF multiply_add(VecF left, VecF right, VecF sum, const Pair *) {
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
}

inline VecF multiply_add(Pair left, __m512bh right, VecF sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(left.bits)), right);
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

template <> struct Packed<bf16> {
    using Type = Pair;
};

inline bfloat16x8_t load(const Pair *p) {
    return vreinterpretq_bf16_u32(vld1q_u32(reinterpret_cast<const uint32_t *>(p)));
}

inline VecF load_packed(const Pair *, const bf16 *p, int64_t n) {
    VecF pairs{};
    std::memcpy(&pairs, p, sizeof(bf16) * static_cast<size_t>(n < 2 * kLanes ? n > 0 ? n : 0 : 2 * kLanes));
    return pairs;
}

inline VecF load_packed(const Pair *, const int8_t *p, int64_t n) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, p, static_cast<size_t>(n < 2 * kLanes ? n > 0 ? n : 0 : 2 * kLanes));
    const int16x8_t words = vmovl_s8(vcreate_s8(bytes));
    const float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
    const float32x4_t high = vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)));
    return (VecF)vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)); // the upper halves
}

inline VecF multiply_add(VecF left, VecF right, VecF sum, const Pair *) {
    return dot_bf16_pairs(left, right, sum);
}

inline VecF multiply_add(Pair left, bfloat16x8_t right, VecF sum) {
    return (VecF)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u32(vdupq_n_u32(left.bits)), right);
}

#endif

// The lanes of multiply_add's result as floats.
template <typename P> inline VecF summands(VecF products, const P *) {
    return products;
}

inline VecF multiply_add(VecF left, VecF right, VecF sum, const float *) {
    return fma(left, right, sum);
}

inline VecF multiply_add(float left, VecF right, VecF sum) {
    return fma(splat(left), right, sum);
}

// How many elements of a row one packed column holds.
template <typename P> constexpr int64_t kElements = 1;
template <> constexpr int64_t kElements<Pair> = 2;

// The lanes of a and b interleaved: a0 b0 a1 b1 ..., the first and the second half of them.
inline VecF zip_low(VecF a, VecF b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

inline VecF zip_high(VecF a, VecF b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Transposes x, a matrix of kLanes rows: each round interleaves the first half of the rows with the second.
inline void transpose(VecF (&x)[kLanes]) {
#pragma GCC unroll 4
    for (int size = 1; size < kLanes; size *= 2) {
        VecF y[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes / 2; ++i) {
            y[2 * i] = zip_low(x[i], x[i + kLanes / 2]);
            y[2 * i + 1] = zip_high(x[i], x[i + kLanes / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            x[i] = y[i];
        }
    }
}

template <typename T> inline VecF load_packed(const float *, const T *p, int64_t n) {
    return n >= kLanes ? load(p) : load(p, static_cast<int>(n));
}

// Packed columns of a row of n elements, in whole vectors, padded with zeros.
template <typename P> constexpr int64_t packed_columns(int64_t n) {
    return round_up(ceil_div(n, kElements<P>), kLanes);
}

template <typename P, typename T> void pack_row(P *packed, const T *row, int64_t n) {
    constexpr int64_t step = kLanes * kElements<P>;
    for (; n > 0; n -= step, row += step, packed += kLanes) {
        const VecF v = load_packed(packed, row, n);
        std::memcpy(packed, &v, sizeof v);
    }
}

// Keys along the lanes: panels of [packed columns][kTileColumns keys]. Keys after the last are zeros.
template <typename P, typename T>
void pack_keys(P *packed, const T *const *k, int64_t keys, int64_t n, KvPrefetcher<T> &ahead) {
    constexpr int64_t step = kLanes * kElements<P>;
    for (int64_t key = 0; key < keys; key += kLanes) {
        P *panel = packed + key / kTileColumns * kTileColumns * packed_columns<P>(n) + key % kTileColumns;
        for (int64_t c = 0; c < n; c += step) {
            for (int64_t i = 0; i < kLanes && c * static_cast<int64_t>(sizeof(T)) % kLineBytes == 0;
                 i += KvPrefetcher<T>::kStreams) {
                ahead.fetch();
            }
            VecF x[kLanes];
            if (keys - key >= kLanes && n - c >= step) {
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i) {
                    x[i] = load_packed(packed, k[key + i] + c, step);
                }
            } else {
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; ++i) {
                    x[i] = key + i < keys ? load_packed(packed, k[key + i] + c, n - c) : VecF{};
                }
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                std::memcpy(panel, &x[i], sizeof x[i]);
                panel += kTileColumns;
            }
        }
    }
}

// Columns along the lanes, as floats: panels of [keys][kTileColumns columns]. Columns after the last are zeros.
template <typename T> void pack_values(float *packed, const T *const *v, int64_t keys, int64_t n) {
    for (int64_t column = 0; column < n; column += kTileColumns) {
        for (int64_t key = 0; key < keys; ++key) {
            for (int64_t c = column; c < column + kTileColumns; c += kLanes) {
                const int64_t rest = n - c;
                store(packed,
                      rest >= kLanes ? load(v[key] + c) : load(v[key] + c, static_cast<int>(rest > 0 ? rest : 0)));
                packed += kLanes;
            }
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
