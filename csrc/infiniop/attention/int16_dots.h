// Few rows of bfloat16 (decode) with K and V of int8, in exact integer products where the machine has VNNI: rows of q
// and of probabilities are converted to 16-bit fixed point. Widening K and V to floats takes up to 1.4 times as long,
// and is then bound by arithmetic, not by memory.
#pragma once

#include "kv_prefetcher.h"
#include "packing.h"

namespace infini::INFINI_LEVEL {
namespace {

// Whether rows of T with K and V of E are multiplied this way.
template <typename T, typename E> constexpr bool kInt16Dots = false;

template <typename D> class PackedProbabilities;

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

template <> constexpr bool kInt16Dots<bf16, int8_t> = true;

// Two 16-bit integers.
struct Int16Pair {
    uint32_t bits;
};
template <> struct PackedForDots<bf16, int8_t> {
    using Type = Int16Pair;
};
template <> constexpr int64_t kElements<Int16Pair> = 2;

// With the intrinsic GCC 12 would copy the sum at every step.
template <typename V> inline void add_products(V &sum, V a, V b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

inline __m512i widen_int16(const int8_t *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

inline VecF load_packed(const Int16Pair *, const int8_t *p, int64_t n) {
    return (VecF)(n >= 32 ? widen_int16(p) : _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((1u << n) - 1, p)));
}

inline VecF multiply_add(VecF left, VecF right, VecF sum, const Int16Pair *) {
    add_products(sum, left, right);
    return sum;
}

// Sums of int16 products, which fit into 32 bits.
inline VecI summands(VecF products, const Int16Pair *) {
    return (VecI)products;
}

// The exponent, biased, of the largest magnitude of n values; 255: there is infinity or NaN among them.
template <typename T> int32_t largest_exponent(const T *x, int64_t n) {
    VecI magnitudes{}; // as integers, NaN lies above infinity, and this above all finite values
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecI bits = (VecI)load_at(x, i, lanes) & 0x7fffffff;
        magnitudes = bits > magnitudes ? bits : magnitudes;
    });
    return _mm512_reduce_max_epi32((__m512i)magnitudes) >> 23;
}

// The fixed-point format of 16-bit integers: its unit is the power of 2 in which values with this exponent are 2^14 to
// 2^15; twice that where the sum of so many products with bytes would overflow 32 bits.
class FixedPoint {
public:
    explicit FixedPoint(int32_t exponent, int64_t products = 1)
        : shift_(splat(static_cast<float>(127 + (products <= 512 ? 14 : 13) - exponent))) {}
    VecF to_fixed_point(VecF x) const { return _mm512_scalef_ps(x, shift_); }
    float value() const { return _mm512_cvtss_f32(_mm512_scalef_ps(splat(1.0f), -shift_)); }

private:
    VecF shift_;
};

inline void store_int16(void *to, __m512i low, __m512i high) {
    const __m256i halves[] = {_mm512_cvtsepi32_epi16(low), _mm512_cvtsepi32_epi16(high)};
    std::memcpy(to, halves, sizeof halves);
}

// Packs a row of q, of at most 1024 elements. Those of at least 1/64 of the largest keep all of their 8 bits; the
// others are rounded to a unit, 2^-6 of the largest's bfloat16 spacing. Returns the unit, NaN if there is infinity or
// NaN in the row.
inline float pack_row(Int16Pair *packed, const bf16 *row, int64_t n) {
    const int32_t exponent = largest_exponent(row, n);
    const FixedPoint unit(exponent, n);
    for (int64_t i = 0; i < n; i += 2 * kLanes, packed += kLanes) {
        VecF halves[2];
        for (int64_t k = 0; k < 2; ++k) {
            const int64_t rest = n - i - k * kLanes;
            const bf16 *const from = row + i + k * kLanes;
            halves[k] = rest >= kLanes ? load(from) : load(from, static_cast<int>(rest > 0 ? rest : 0));
        }
        store_int16(packed, _mm512_cvtps_epi32(unit.to_fixed_point(halves[0])),
                    _mm512_cvtps_epi32(unit.to_fixed_point(halves[1])));
    }
    return exponent < 255 ? unit.value() : float_of(0x7fc00000);
}

// Packs the probabilities of rows to D: multiplied with the scales of the keys' values, in a unit shared by all rows of
// the block, 2^-15 to 2^-14 of the largest of these scales. Probabilities are relative to a row's largest, which is 1,
// and so is the error.
template <> class PackedProbabilities<Int16Pair> {
public:
    PackedProbabilities(const float *scales, int64_t keys)
        : scales_(scales), exponent_(largest_exponent(scales, keys)), unit_(exponent_) {
        if (exponent_ == 255) { // a scale is infinity or NaN: the unit follows from the others
            float most = 0;
            for (int64_t i = 0; i < keys; ++i) {
                most = scales[i] > most ? scales[i] : most;
            }
            unit_ = FixedPoint(largest_exponent(&most, 1));
        }
    }

    // Packs a row's probabilities up to `width`, in place; those beyond the keys and masked ones are 0. Returns the
    // factor of the sums.
    float pack(float *row, int64_t width) const {
        bool all_finite = true;
        for (int64_t i = 0; i < width; i += 2 * kLanes) {
            __m512i halves[2];
            for (int64_t k = 0; k < 2; ++k) {
                halves[k] = _mm512_setzero_si512();
                if (i + k * kLanes >= width) {
                    continue;
                }
                const VecF p = load(row + i + k * kLanes), scale = load(scales_ + i + k * kLanes);
                const __mmask16 seen = _mm512_cmp_ps_mask(p, VecF{}, _CMP_GT_OQ);
                all_finite =
                    all_finite && (exponent_ < 255 || !_mm512_mask_cmp_ps_mask(seen, scale, scale, _CMP_UNORD_Q));
                halves[k] = _mm512_maskz_cvtps_epi32(seen, unit_.to_fixed_point(p * scale));
            }
            store_int16(reinterpret_cast<char *>(row) + 2 * i, halves[0], halves[1]);
        }
        return all_finite ? unit_.value() : float_of(0x7fc00000);
    }

private:
    const float *scales_;
    int32_t exponent_;
    FixedPoint unit_;
};

// out += factor * probabilities V for kRows rows and the kTileColumns columns from `column` on, for the keys from
// `first` to `keys`. Rows of probabilities are `stride` words of 32 bits apart; those of the pairs' other keys are 0.
template <int kRows> // not inlined: within a larger function its sums do not stay in registers
__attribute__((noinline)) void multiply_int16(const float *probabilities, int64_t stride, const float *factors,
                                              const int8_t *const *v, int64_t column, int64_t first, int64_t keys,
                                              float *out, int64_t out_stride, KvPrefetcher<int8_t> &ahead) {
    static_assert(kTileVectors == 4);
    __m512i sums[kRows][4];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            sums[r][i] = _mm512_setzero_si512();
        }
    }
    for (int64_t key = first / 2 * 2; key < keys; key += 2) {
        if (key % KvPrefetcher<int8_t>::kStreams == 0) { // as many keys have a cache line each
            ahead.fetch();
        }
        __m512i right[4]; // columns 0-3, 8-11, 16-19, 24-27 of both keys in turn; 4-7, 12-15, ...; those from 32 on
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const __m512i a = widen_int16(v[key] + column + 16 * i), b = widen_int16(v[key + 1] + column + 16 * i);
            right[i] = _mm512_unpacklo_epi16(a, b);
            right[i + 1] = _mm512_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            int32_t pair;
            std::memcpy(&pair, probabilities + r * stride + key / 2, sizeof pair);
            const __m512i left = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                add_products(sums[r][i], right[i], left);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const VecF a = _mm512_cvtepi32_ps(sums[r][i]), b = _mm512_cvtepi32_ps(sums[r][i + 1]);
            const VecF low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const VecF high =
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
            float *const to = out + r * out_stride + i * kLanes;
            store(to, fma(low, splat(factors[r]), load(to)));
            store(to + kLanes, fma(high, splat(factors[r]), load(to + kLanes)));
        }
    }
}

// The same for any number of rows, at most kTileRows.
inline void multiply_int16(int64_t rows, const float *probabilities, int64_t stride, const float *factors,
                           const int8_t *const *v, int64_t column, int64_t first, int64_t keys, float *out,
                           int64_t out_stride, KvPrefetcher<int8_t> &ahead) {
    const auto of_rows = [&](auto function) {
        function(probabilities, stride, factors, v, column, first, keys, out, out_stride, ahead);
    };
    switch (rows) {
    case 1:
        return of_rows(multiply_int16<1>);
    case 2:
        return of_rows(multiply_int16<2>);
    case 3:
        return of_rows(multiply_int16<3>);
    case 4:
        return of_rows(multiply_int16<4>);
    case 5:
        return of_rows(multiply_int16<5>);
    default:
        return of_rows(multiply_int16<kTileRows>);
    }
}

#endif

} // namespace
} // namespace infini::INFINI_LEVEL
