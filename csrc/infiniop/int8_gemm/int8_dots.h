// Dot products of 8-bit integers: loads, multiplication and transposition; the formats of integer weights, and how the
// scales of their groups are loaded.
#pragma once

#include <type_traits>

#include "dense_rows.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Whether weights are multiplied as signed bytes. x86 can only multiply unsigned by signed bytes.
#if defined(__aarch64__)
constexpr bool kSignedBytes = true;
#else
constexpr bool kSignedBytes = false;
#endif

#if defined(__aarch64__)
// sum + the products of signed bytes, four per lane; wraps around.
inline VecI dot(VecI sum, VecU weights, VecI x) {
    const int8x16_t a = (int8x16_t)weights, b = (int8x16_t)x;
#if defined(__ARM_FEATURE_DOTPROD)
    return (VecI)vdotq_s32((int32x4_t)sum, a, b);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(a, b));
    return (VecI)vaddq_s32((int32x4_t)sum, vpaddq_s32(low, high));
#endif
}
#else
// sum + the products of unsigned and signed bytes, four per lane; wraps around.
inline VecI dot(VecI sum, VecU unsigned_bytes, VecI signed_bytes) {
#if defined(__AVX512VNNI__)
    return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
#elif defined(__AVXVNNI__)
    return (VecI)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
#elif defined(__AVX2__)
    const VecU even = unsigned_bytes & 0x00ff00ffu, odd = unsigned_bytes >> 8 & 0x00ff00ffu;
#if defined(__AVX512F__)
    const __m512i s = (__m512i)signed_bytes;
    const VecU evens = (VecU)_mm512_madd_epi16((__m512i)even, _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
    const VecU odds = (VecU)_mm512_madd_epi16((__m512i)odd, _mm512_srai_epi16(s, 8));
#else
    const __m256i s = (__m256i)signed_bytes;
    const VecU evens = (VecU)_mm256_madd_epi16((__m256i)even, _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const VecU odds = (VecU)_mm256_madd_epi16((__m256i)odd, _mm256_srai_epi16(s, 8));
#endif
    return (VecI)((VecU)sum + evens + odds);
#else
    VecU total = (VecU)sum;
    for (int byte = 0; byte < 4; ++byte) {
        const VecI factor = (VecI)((VecU)signed_bytes << (24 - 8 * byte)) >> 24;
        total += (unsigned_bytes >> (8 * byte) & 0xffu) * (VecU)factor;
    }
    return (VecI)total;
#endif
}
#endif

// The same for unsigned bytes up to 127: the sum of two products fits in 16 bits.
inline VecI dot_of_small(VecI sum, VecU nibbles, VecI signed_bytes) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
    return dot(sum, nibbles, signed_bytes);
#elif defined(__AVX512F__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)nibbles, (__m512i)signed_bytes);
    return sum + (VecI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)nibbles, (__m256i)signed_bytes);
    return sum + (VecI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define INFINI_SCALED_PAIRS
// sum + scales times the products of signed bytes, four per lane; x must not be -128. `scales` has a lane's scale in
// both of its 16-bit halves: the instruction that adds pairs of 16-bit sums multiplies by them too. Those sums fit, for
// at most 128 * 127 is added twice.
inline VecI scaled_dot(VecI sum, VecU weights, VecI x, VecI scales) {
    const __m256i magnitudes = _mm256_abs_epi8((__m256i)weights);
    const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8((__m256i)x, (__m256i)weights));
    return sum + (VecI)_mm256_madd_epi16(pairs, (__m256i)scales);
}
#endif

constexpr int64_t kVectorBytes = 4 * kLanes; // four bytes per lane

inline VecU load_bytes(const void *p) {
    VecU bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return bytes;
}

// Loads the first n bytes; the others are 0.
inline VecU load_bytes(const void *p, int64_t n) {
#if defined(__AVX512F__)
    return (VecU)_mm512_maskz_loadu_epi8(n < 64 ? (uint64_t{1} << n) - 1 : ~uint64_t{0}, p);
#else
    VecU bytes{};
    std::memcpy(&bytes, p, static_cast<size_t>(n < kVectorBytes ? n : kVectorBytes));
    return bytes;
#endif
}

inline VecI splat_word(const void *p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return VecI{} + word;
}

// rows[i][j] becomes rows[j][i].
inline void transpose(VecU (&rows)[kLanes]) {
#if defined(__AVX512F__)
    // GCC 12 implements swap_quarters by permutations, each of which needs an index register.
    __m512i pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) { // quarter q of fours[4r + i] is column 4q + i of rows 4r to 4r + 3
        const __m512i low = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x44);
        const __m512i high = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xee);
        const __m512i low_rest = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0x44);
        const __m512i high_rest = _mm512_shuffle_i32x4(fours[8 + i], fours[12 + i], 0xee);
        rows[i] = (VecU)_mm512_shuffle_i32x4(low, low_rest, 0x88);
        rows[4 + i] = (VecU)_mm512_shuffle_i32x4(low, low_rest, 0xdd);
        rows[8 + i] = (VecU)_mm512_shuffle_i32x4(high, high_rest, 0x88);
        rows[12 + i] = (VecU)_mm512_shuffle_i32x4(high, high_rest, 0xdd);
    }
#else
    swap_quarters<kLanes / 2>(rows, std::make_integer_sequence<int, kLanes>{});
#endif
}

// ---- formats ----

// Rows of x per tile with 16 registers. With VNNI, products need no registers besides their sums.
#if defined(__AVXVNNI__)
constexpr int kFewRegistersRows = 6;
#else
constexpr int kFewRegistersRows = 4;
#endif

struct ByteWeights {
    // Rows of x per register tile.
    static constexpr int kTileRows = kManyRegisters ? 12 : kFewRegistersRows;
    static constexpr int kPieces = 1; // vectors of bytes that one vector of stored weights expands to
    static constexpr int kOffset = kSignedBytes ? 0 : 128; // added to make the weights unsigned
    static constexpr bool kGrouped = false;                // one scale per row, which the epilogue applies
    static void split(VecU stored, VecU (&bytes)[kPieces]) { bytes[0] = kSignedBytes ? stored : stored ^ 0x80808080u; }
    static VecI add_products(VecI sum, VecU bytes, VecI x) { return dot(sum, bytes, x); }
};

// Two elements per byte. Vectors of bytes hold the even elements of each word first.
struct NibbleWeights {
    // The integer sums stay in registers, the float sums in L1, which would not hold those of 12 rows.
    static constexpr int kTileRows = kManyRegisters ? 8 : kFewRegistersRows;
    static constexpr int kPieces = 2;
    static constexpr int kOffset = 8;
    static constexpr bool kGrouped = true; // one scale per group of a row
    static void split(VecU stored, VecU (&bytes)[kPieces]) {
        bytes[0] = stored & 0x0f0f0f0fu;
        bytes[1] = stored >> 4 & 0x0f0f0f0fu;
    }
    static VecI add_products(VecI sum, VecU bytes, VecI x) { return dot_of_small(sum, bytes, x); }
};

// The scales of ByteWeights: none. NibbleWeights' scales provide has_zeros(), and scales(row, apart, group, lanes, to)
// and zeros(...), which load kLanes groups of each of some weight rows, `apart` rows apart.
struct NoScales {};

// Weight rows [first, first + count).
struct WeightRows {
    const uint8_t *data;
    int64_t stride, first, count;
};

// Row i of the range, clamped to the last row.
inline int64_t row_at(const WeightRows &weights, int64_t i) {
    return i < weights.count ? i : weights.count - 1;
}

// scales[g * rows + i] = the scale of group g of weight row i, where `rows` = kVectors * kLanes; then the zeros, if
// any.
template <int kVectors, typename Scales>
void pack_scales(const WeightRows &weights, int64_t groups, const Scales &scales, float *to) {
    const auto pack_values = [&](const auto &load_row, float *values) {
        for_each_vector(groups, [&](int64_t g, auto lanes) {
            for (int v = 0; v < kVectors; ++v) {
                VecU rows[kLanes];
                for (int i = 0; i < kLanes; ++i) {
                    rows[i] = (VecU)load_row(weights.first + row_at(weights, v * kLanes + i), g, lanes);
                }
                transpose(rows);
                for (int i = 0; i < lanes; ++i) {
                    store(values + ((g + i) * kVectors + v) * kLanes, (VecF)rows[i]);
                }
            }
        });
    };
    pack_values(
        [&](int64_t row, int64_t g, auto lanes) {
            VecF values[1];
            scales.scales(row, 0, g, lanes, values);
            return values[0];
        },
        to);
    if (scales.has_zeros()) {
        pack_values(
            [&](int64_t row, int64_t g, auto lanes) {
                VecF values[1];
                scales.zeros(row, 0, g, lanes, values);
                return values[0];
            },
            to + groups * kVectors * kLanes);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
