// Few rows of bfloat16 (decode) with K and V of int8, in integer products where the machine has VNNI: rows of q and of
// probabilities are 24-bit fixed-point numbers, each in three signed bytes, the digits, which are rows of their own.
// For 64 elements of K and of V and four rows that is 33 vector instructions; by floats it would be 46.
#pragma once

#include "kv_prefetcher.h"
#include "packing.h"

namespace infini::INFINI_LEVEL {
namespace {

// Whether rows of T with K and V of E are multiplied this way.
template <typename T, typename E> constexpr bool kByteDigits = false;

constexpr int64_t kDigits = 3;

// Converts the products of a row's digits to those of its numbers. unit: the unit of the numbers, NaN if the row has
// infinity or NaN. offsets: for each digit, the most significant one first, the share of the products that comes from
// adding 128 to K or V.
struct DigitScale {
    float unit;
    float offsets[kDigits];

    VecF value(VecF first, VecF second, VecF third) const {
        first = first - splat(offsets[0]), second = second - splat(offsets[1]), third = third - splat(offsets[2]);
        return fma(fma(first, splat(256.0f), second), splat(256.0f), third);
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)

template <> constexpr bool kByteDigits<bf16, int8_t> = true;

// Four bytes: digits of one place of adjacent elements.
struct ByteQuad {
    uint32_t bits;
};
template <> struct PackedForDots<bf16, int8_t> {
    using Type = ByteQuad;
};
template <> constexpr int64_t kElements<ByteQuad> = 4;

// Adds products of unsigned bytes by signed ones. With the intrinsic, GCC 12 copies the sum at every step.
template <typename V> inline void add_products(V &sum, V bytes, V digits) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(digits));
}

// int8 plus 128, because one side of the products is unsigned.
inline __m512i plus_128(__m512i bytes) {
    return _mm512_xor_si512(bytes, _mm512_set1_epi8(INT8_MIN));
}

inline VecF load_packed(const ByteQuad *, const int8_t *p, int64_t n) {
    return (VecF)plus_128(n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, p));
}

inline VecF multiply_add(VecF left, VecF right, VecF sum, const ByteQuad *) {
    add_products(sum, right, left);
    return sum;
}

// Sums of products of bytes, which fit into 32 bits.
inline VecI summands(VecF products, const ByteQuad *) {
    return (VecI)products;
}

// A fixed-point format, from the largest magnitude of its values: 2^22 to 2^23 units, a little less, so that three
// signed digits hold it.
class FixedPoint {
public:
    // largest: the bits of each lane's largest magnitude; as integers, NaN > infinity > all other values.
    explicit FixedPoint(VecI largest) {
        const int32_t bits = _mm512_reduce_max_epi32((__m512i)largest);
        finite_ = bits < 0x7f800000;
        shift_ = splat(static_cast<float>(127 + 22 - ((bits + 0x20000) >> 23)));
    }

    float unit() const {
        return finite_ ? _mm512_cvtss_f32(_mm512_scalef_ps(splat(1.0f), -shift_)) : float_of(0x7fc00000);
    }

    // Stores the digits of kLanes values, those of a place `pitch` bytes after those of the place before.
    void store_digits(VecF x, uint8_t *to, int64_t pitch) const {
        // The bytes of the number plus 0x808080 are its digits plus 128.
        __m512i number = _mm512_cvtps_epi32(_mm512_scalef_ps(x, shift_));
        number = _mm512_xor_si512(_mm512_add_epi32(number, _mm512_set1_epi32(0x808080)), _mm512_set1_epi32(0x808080));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 16)));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + pitch), _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 8)));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 2 * pitch), _mm512_cvtepi32_epi8(number));
    }

private:
    bool finite_;
    VecF shift_;
};

inline VecI larger_magnitude(VecI largest, VecF x) {
    const VecI bits = (VecI)x & 0x7fffffff;
    return bits > largest ? bits : largest;
}

// The scale of the numbers with these digits: `bytes` (a multiple of 64) of each place, the places `pitch` apart.
inline DigitScale scale_of(const FixedPoint &format, const uint8_t *digits, int64_t bytes, int64_t pitch) {
    DigitScale scale{format.unit(), {}};
    for (int64_t place = 0; place < kDigits; ++place) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t i = 0; i < bytes; i += 64) {
            add_products(sum, _mm512_set1_epi8(INT8_MIN), _mm512_loadu_si512(digits + place * pitch + i));
        }
        scale.offsets[place] = static_cast<float>(_mm512_reduce_add_epi32(sum));
    }
    return scale;
}

// Packs a row of q, of at most 1024 elements, as three rows, `pitch` columns apart. Elements of at least 2^-15 of the
// largest are exact; the others are rounded to a unit, 2^-22 of the largest or less.
inline DigitScale pack_digits(ByteQuad *packed, int64_t pitch, const bf16 *row, int64_t n) {
    VecI largest{};
    for_each_vector(n, [&](int64_t i, auto lanes) { largest = larger_magnitude(largest, load_at(row, i, lanes)); });
    const FixedPoint format(largest);
    auto *const digits = reinterpret_cast<uint8_t *>(packed);
    const int64_t bytes = packed_columns<ByteQuad>(n) * 4;
    for (int64_t i = 0; i < bytes; i += kLanes) {
        const int64_t rest = n - i;
        format.store_digits(rest >= kLanes ? load(row + i) : load(row + i, static_cast<int>(rest > 0 ? rest : 0)),
                            digits + i, pitch * 4);
    }
    return scale_of(format, digits, bytes, pitch * 4);
}

// Packs a row's probabilities up to `width`, multiplied with the scales of the keys' values, in place: three times
// kKeyBlock bytes. Those beyond the keys and masked ones are 0, whatever their scales.
inline DigitScale pack_probabilities(float *row, const float *scales, int64_t width) {
    VecI largest{};
    for (int64_t i = 0; i < width; i += kLanes) {
        const VecF p = load(row + i);
        const VecF scaled = select(p > VecF{}, p * load(scales + i), VecF{});
        largest = larger_magnitude(largest, scaled);
        store(row + i, scaled);
    }
    const FixedPoint format(largest);
    uint8_t digits[kDigits * kKeyBlock] = {};
    for (int64_t i = 0; i < width; i += kLanes) {
        format.store_digits(load(row + i), digits + i, kKeyBlock);
    }
    std::memcpy(row, digits, sizeof digits);
    return scale_of(format, digits, kKeyBlock, kKeyBlock);
}

// out += probabilities V for kRows rows, packed as above, and the kTileColumns columns from `column` on, for the keys
// from `first` to `keys`.
template <int kRows> // not inlined: within a larger function its sums do not stay in registers
__attribute__((noinline)) void multiply_digits(const float *probabilities, const DigitScale *scales,
                                               const int8_t *const *v, int64_t column, int64_t first, int64_t keys,
                                               float *out, int64_t out_stride, KvPrefetcher<int8_t> &ahead) {
    static_assert(kTileColumns == 64);
    __m512i sums[kRows * kDigits][4];
#pragma GCC unroll 6
    for (auto &row : sums) {
#pragma GCC unroll 4
        for (__m512i &sum : row) {
            sum = _mm512_setzero_si512();
        }
    }
    for (int64_t key = first / 4 * 4; key < keys; key += 4) {
        static_assert(KvPrefetcher<int8_t>::kStreams == 4); // as many keys have a cache line each
        ahead.fetch();
        __m512i rows[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            rows[i] = plus_128(_mm512_loadu_si512(v[key + i] + column));
        }
        // In each 16 columns: those from 0, 4, 8 and 12 on, of all four keys in turn.
        const __m512i low[] = {_mm512_unpacklo_epi8(rows[0], rows[1]), _mm512_unpacklo_epi8(rows[2], rows[3])};
        const __m512i high[] = {_mm512_unpackhi_epi8(rows[0], rows[1]), _mm512_unpackhi_epi8(rows[2], rows[3])};
        const __m512i right[] = {_mm512_unpacklo_epi16(low[0], low[1]), _mm512_unpackhi_epi16(low[0], low[1]),
                                 _mm512_unpacklo_epi16(high[0], high[1]), _mm512_unpackhi_epi16(high[0], high[1])};
#pragma GCC unroll 6
        for (int r = 0; r < kRows * static_cast<int>(kDigits); ++r) {
            int32_t quad;
            std::memcpy(&quad,
                        reinterpret_cast<const char *>(probabilities + r / kDigits * kKeyBlock) +
                            r % kDigits * kKeyBlock + key,
                        sizeof quad);
            const __m512i left = _mm512_set1_epi32(quad);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                add_products(sums[r][i], right[i], left);
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
        alignas(64) float columns[4][4][4]; // 16 columns, 4 of these, 1 of these
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const auto digit = [&](int place) { return _mm512_cvtepi32_ps(sums[r * kDigits + place][i]); };
            const VecF value = scales[r].value(digit(0), digit(1), digit(2));
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                std::memcpy(columns[k][i], reinterpret_cast<const char *>(&value) + 16 * k, 16);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            float *const to = out + r * out_stride + i * kLanes;
            store(to, fma(load(&columns[i][0][0]), splat(scales[r].unit), load(to)));
        }
    }
}

// The same for one row or two.
inline void multiply_digits(int64_t rows, const float *probabilities, const DigitScale *scales, const int8_t *const *v,
                            int64_t column, int64_t first, int64_t keys, float *out, int64_t out_stride,
                            KvPrefetcher<int8_t> &ahead) {
    (rows == 1 ? multiply_digits<1> : multiply_digits<2>)(probabilities, scales, v, column, first, keys, out,
                                                          out_stride, ahead);
}

#endif

} // namespace
} // namespace infini::INFINI_LEVEL
