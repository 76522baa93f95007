// Few rows of bfloat16 (decode) with K and V of int8, in exact integer products where the machine has VNNI: rows of q
// and of probabilities become integers of 16 bits. Widening K and V to floats instead takes up to 1.4 times as long,
// which the cores then wait for and not for memory.
#pragma once

#include "ahead.h"
#include "packing.h"

namespace infini::INFINI_LEVEL {
namespace {

// Whether rows of T with K and V of E are multiplied so.
template <typename T, typename E> constexpr bool kInWords = false;

template <typename D> class ProbabilityWords;

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

template <> constexpr bool kInWords<bf16, int8_t> = true;

// Two of them.
struct Words {
    uint32_t bits;
};
template <> struct PackedForDots<bf16, int8_t> {
    using Type = Words;
};
template <> constexpr int64_t kElements<Words> = 2;

// GCC 12 copies the sum at every step where it is given the intrinsic.
template <typename V> inline void add_products(V &sum, V a, V b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

inline __m512i words_of(const int8_t *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

inline VecF load_packed(const Words *, const int8_t *p, int64_t n) {
    return (VecF)(n >= 32 ? words_of(p) : _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((1u << n) - 1, p)));
}

inline VecF multiply_add(VecF left, VecF right, VecF sum, const Words *) {
    add_products(sum, left, right);
    return sum;
}

// Sums of words' products, which 32 bits hold.
inline VecI summands(VecF products, const Words *) {
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

// Words are numbers in a unit: the power of 2 of which values with this exponent are 2^14 to 2^15; or, where so many
// products with bytes are added up that 32 bits would not hold them, half as many.
class Unit {
public:
    explicit Unit(int32_t exponent, int64_t products = 1)
        : shift_(splat(static_cast<float>(127 + (products <= 512 ? 14 : 13) - exponent))) {}
    VecF in_units(VecF x) const { return _mm512_scalef_ps(x, shift_); }
    float value() const { return _mm512_cvtss_f32(_mm512_scalef_ps(splat(1.0f), -shift_)); }

private:
    VecF shift_;
};

inline void store_words(void *to, __m512i low, __m512i high) {
    const __m256i halves[] = {_mm512_cvtsepi32_epi16(low), _mm512_cvtsepi32_epi16(high)};
    std::memcpy(to, halves, sizeof halves);
}

// A row of q, of at most 1024 elements. Those of at least 1/64 of the largest keep all of their 8 bits; the others are
// rounded to a unit, 2^-6 of the rounding that the largest has seen as bfloat16. Returns the unit, NaN if there is
// infinity or NaN in the row.
inline float pack_row(Words *packed, const bf16 *row, int64_t n) {
    const int32_t exponent = largest_exponent(row, n);
    const Unit unit(exponent, n);
    for (int64_t i = 0; i < n; i += 2 * kLanes, packed += kLanes) {
        VecF halves[2];
        for (int64_t k = 0; k < 2; ++k) {
            const int64_t rest = n - i - k * kLanes;
            const bf16 *const from = row + i + k * kLanes;
            halves[k] = rest >= kLanes ? load(from) : load(from, static_cast<int>(rest > 0 ? rest : 0));
        }
        store_words(packed, _mm512_cvtps_epi32(unit.in_units(halves[0])), _mm512_cvtps_epi32(unit.in_units(halves[1])));
    }
    return exponent < 255 ? unit.value() : float_of(0x7fc00000);
}

// From the probabilities of rows to words D: multiplied with the scales of the keys' values, in a unit that all rows of
// the block have, 2^-15 to 2^-14 of the largest of these scales. Probabilities are relative to a row's largest, which
// is 1, and so is the error.
template <> class ProbabilityWords<Words> {
public:
    ProbabilityWords(const float *scales, int64_t keys)
        : scales_(scales), exponent_(largest_exponent(scales, keys)), unit_(exponent_) {
        if (exponent_ == 255) { // a key has NaN for a scale: the others are judged without it
            float most = 0;
            for (int64_t i = 0; i < keys; ++i) {
                most = scales[i] > most ? scales[i] : most;
            }
            unit_ = Unit(largest_exponent(&most, 1));
        }
    }

    // A row's probabilities up to `width`, in place; those behind the keys and hidden ones are 0. Returns what the sums
    // are to be multiplied with.
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
                halves[k] = _mm512_maskz_cvtps_epi32(seen, unit_.in_units(p * scale));
            }
            store_words(reinterpret_cast<char *>(row) + 2 * i, halves[0], halves[1]);
        }
        return all_finite ? unit_.value() : float_of(0x7fc00000);
    }

private:
    const float *scales_;
    int32_t exponent_;
    Unit unit_;
};

// out += factor * probabilities V for kRows rows and the kTileColumns columns from `column` on, for the keys from
// `first` to `keys`. Rows of probabilities are `stride` words of 32 bits apart; those of the pairs' other keys are 0.
template <int kRows> // not inlined: within a larger function its sums do not stay in registers
__attribute__((noinline)) void multiply_words(const float *probabilities, int64_t stride, const float *factors,
                                              const int8_t *const *v, int64_t column, int64_t first, int64_t keys,
                                              float *out, int64_t out_stride, Ahead<int8_t> &ahead) {
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
        if (key % Ahead<int8_t>::kStreams == 0) { // a line of so many keys
            ahead.fetch();
        }
        __m512i right[4]; // columns 0-3, 8-11, 16-19, 24-27 of both keys in turn; 4-7, 12-15, ...; those from 32 on
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
            const __m512i a = words_of(v[key] + column + 16 * i), b = words_of(v[key + 1] + column + 16 * i);
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
inline void multiply_words(int64_t rows, const float *probabilities, int64_t stride, const float *factors,
                           const int8_t *const *v, int64_t column, int64_t first, int64_t keys, float *out,
                           int64_t out_stride, Ahead<int8_t> &ahead) {
    const auto of_rows = [&](auto function) {
        function(probabilities, stride, factors, v, column, first, keys, out, out_stride, ahead);
    };
    switch (rows) {
    case 1:
        return of_rows(multiply_words<1>);
    case 2:
        return of_rows(multiply_words<2>);
    case 3:
        return of_rows(multiply_words<3>);
    case 4:
        return of_rows(multiply_words<4>);
    case 5:
        return of_rows(multiply_words<5>);
    default:
        return of_rows(multiply_words<kTileRows>);
    }
}

#endif

} // namespace
} // namespace infini::INFINI_LEVEL
