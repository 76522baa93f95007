// How decoders make floats of a block, and the two kernels that every kind gets of its decoder: decode and dot. Included
// only by *_cpu.cpp files. A kind is a struct with kElements, kBytes and
//     template <typename Sink> static void decode(const uint8_t *block, const Sink &sink)
// which calls sink(i, values) for each vector of kLanes elements, i ascending: products are summed in that order. It may
// have decode_pairs, too, with the same elements as bfloat16 (see decode_steps).
#pragma once

#include "kinds.h"
#include "linear/steps.h"
#include "vec.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Words __attribute__((vector_size(16)));

inline Bytes load_bytes(const uint8_t *p) {
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return bytes;
}

inline float half_at(const uint8_t *p) {
    f16 value;
    std::memcpy(&value, p, sizeof value);
    return widen(value);
}

inline float float_at(const uint8_t *p) {
    float value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

constexpr int kVectors = 16 / kLanes; // of 16 elements

// The integers from -128 to 127 as floats.
inline void widen(Bytes q, VecF (&to)[kVectors]) {
#if defined(__AVX512F__)
    to[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)q));
#elif defined(__AVX2__)
    to[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)q));
    to[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)q, (__m128i)q)));
#else
    int8_t bytes[16];
    std::memcpy(bytes, &q, sizeof bytes);
    for (int i = 0; i < kVectors; ++i) {
        to[i] = load(bytes + i * kLanes);
    }
#endif
}

// bytes >> kBy and bytes << kBy for bytes, of which only the bits of `mask` are kept: one shift of 16-bit integers.
template <int kBy> inline Bytes shifted_right(Bytes bytes, uint8_t mask) {
    return (Bytes)((Words)bytes >> kBy) & mask;
}
template <int kBy> inline Bytes shifted_left(Bytes bytes, uint8_t mask) {
    return (Bytes)((Words)bytes << kBy) & mask;
}

// The integers times a factor, for scales of the parts of a block, which are read from memory one by one.
inline void multiples(Bytes q, float factor, float *to) {
    VecF values[kVectors];
    widen(q, values);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        store(to + v * kLanes, values[v] * splat(factor));
    }
}

// Passes on the elements i to i + 15: q * scale.
template <typename Sink> INFINI_ALWAYS_INLINE void scaled(Bytes q, float scale, int i, const Sink &sink) {
    VecF values[kVectors];
    widen(q, values);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        sink(i + v * kLanes, values[v] * splat(scale));
    }
}

// The same with q * scale + shift.
template <typename Sink> INFINI_ALWAYS_INLINE void shifted(Bytes q, float scale, float shift, int i, const Sink &sink) {
    VecF values[kVectors];
    widen(q, values);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        sink(i + v * kLanes, fma(values[v], splat(scale), splat(shift)));
    }
}

// table[index[i]], of indices from 0 to 15
inline Bytes look_up(Bytes table, Bytes index) {
#if defined(__SSSE3__)
    return (Bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#elif defined(__aarch64__)
    return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
    Bytes found;
    for (int i = 0; i < 16; ++i) {
        found[i] = table[index[i]];
    }
    return found;
#endif
}

constexpr Bytes bytes_of(const int (&values)[16]) {
    Bytes bytes = {};
    for (int i = 0; i < 16; ++i) {
        bytes[i] = static_cast<uint8_t>(values[i]);
    }
    return bytes;
}

inline Bytes iq4_levels() {
    return bytes_of(linear_blocks::kIq4Levels);
}

inline Bytes fp4_levels() {
    return bytes_of(linear_blocks::kFp4Levels);
}

// kLanes bytes as 32-bit integers
inline VecU load_codes(const uint8_t *p) {
#if defined(__AVX512F__)
    return (VecU)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__AVX2__)
    return (VecU)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
#else
    VecU codes;
    for (int i = 0; i < kLanes; ++i) {
        codes[i] = p[i];
    }
    return codes;
#endif
}

// ---- elements as bfloat16, in pairs: 32 of them are looked up at once in a table of the values of their codes ----

#if defined(__AVX512BF16__)
inline VecF counted() { // 0 to 15
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Tables of 16 values, where bit 4 of an index does not matter, and of 32.
inline __m512i table_of(VecF values) {
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(values));
}
inline __m512i table_of(VecF first, VecF last) {
    return (__m512i)_mm512_cvtne2ps_pbh(last, first);
}

inline __m512bh look_up(__m512i table, __m512i words) {
    return (__m512bh)_mm512_permutexvar_epi16(words, table);
}

inline __m512i load_words(const uint8_t *bytes) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes)));
}

// Indices of 32 elements, the lower nibbles first; their bits above bit 3 are not cleared.
inline __m512i nibble_words(const uint8_t *bytes) {
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(words), _mm256_srli_epi16(words, 4), 1);
}

// Indices of 5 bits, of nibbles and the elements' fifth bits.
inline __m512i with_fifth_bits(__m512i words, __mmask32 fifth) {
    const __m512i nibbles = _mm512_and_si512(words, _mm512_set1_epi16(15));
    return _mm512_mask_add_epi16(nibbles, fifth, nibbles, _mm512_set1_epi16(16));
}
#endif

// Calls sink(i, elements) for each step of Steps<W>, with the elements as multiply_add takes them. A kind may have a
// decode_pairs that does so for bfloat16, rounding as Steps does; otherwise its floats are rounded.
template <typename K, typename W, typename Sink>
INFINI_ALWAYS_INLINE auto decode_pairs(const uint8_t *block, const Sink &sink, int)
    -> decltype(K::decode_pairs(block, sink)) {
    return K::decode_pairs(block, sink);
}
template <typename K, typename W, typename Sink>
INFINI_ALWAYS_INLINE void decode_pairs(const uint8_t *block, const Sink &sink, long) {
    VecF first{};
    K::decode(block, [&](int at, VecF values) __attribute__((always_inline)) {
        if (at % (2 * kLanes) == 0) {
            first = values;
        } else {
            sink(at - kLanes, Steps<W>::round(first, values));
        }
    });
}
template <typename K, typename W, typename Sink>
INFINI_ALWAYS_INLINE void decode_steps(const uint8_t *block, const Sink &sink) {
    if constexpr (kInPairs<W>) {
        decode_pairs<K, W>(block, sink, 0);
    } else {
        K::decode(block, sink);
    }
}

template <typename K, typename W> void decode(const uint8_t *block, int64_t count, W *to) {
    for (int64_t i = 0; i < count; ++i, block += K::kBytes, to += K::kElements) {
        decode_steps<K, W>(block, [&](int at, auto elements) __attribute__((always_inline)) {
            std::memcpy(to + at, &elements, sizeof elements);
        });
    }
}

template <typename K> void decode(const linear_blocks::DecodeArgs &args) {
    if constexpr (kInPairs<bf16>) {
        if (args.in_pairs) {
            return decode<K>(args.blocks, args.count, static_cast<bf16 *>(args.to));
        }
    }
    decode<K>(args.blocks, args.count, static_cast<float *>(args.to));
}

// Adds the products of kRows rows with kM rows of x to the sums, vector by vector as multiply_tile.
template <typename K, typename W, int kRows, int kM> void dot_rows(const linear_blocks::DotArgs &args) {
    using S = Steps<W>;
    VecF sums[kRows][kM];
    const auto each_sum = [&](const auto &body) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int m = 0; m < kM; ++m) {
                body(sums[r][m], args.sums + (m * args.sums_stride + r) * kLanes);
            }
        }
    };
    each_sum([](VecF &sum, const float *at) { sum = load(at); });
    const uint8_t *block = args.blocks;
    const auto *x = static_cast<const typename S::X *>(args.x);
    for (int64_t i = 0; i < args.count; ++i, block += K::kBytes, x += K::kElements) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const uint8_t *const of_row = block + r * args.stride;
#pragma GCC unroll 4
            for (int line = 0; line < K::kBytes; line += 64) {
                prefetch_weight(of_row + args.ahead + line, args.far);
            }
            VecF(&row)[kM] = sums[r];
            decode_steps<K, W>(of_row, [&](int at, auto elements) __attribute__((always_inline)) {
#pragma GCC unroll 2
                for (int m = 0; m < kM; ++m) {
                    row[m] = S::multiply_add(elements, S::load_x(x + m * args.x_stride + at), row[m]);
                }
            });
        }
    }
    each_sum([](const VecF &sum, float *at) { store(at, sum); });
}

// The same for args.rows rows, 1 or kDotRows, and args.m rows of x, 1 or kDotX. Below AVX2 rows are multiplied one by
// one: with the code of several, ggml_kinds_cpu.cpp took three times as long to compile there.
template <typename K, typename W> void dot(const linear_blocks::DotArgs &args) {
    using linear_blocks::kDotRows;
    using linear_blocks::kDotX;
    const auto multiply = [](auto rows, const linear_blocks::DotArgs &part) {
        part.m == 1 ? dot_rows<K, W, rows, 1>(part) : dot_rows<K, W, rows, kDotX>(part);
    };
    if constexpr (kManyRegisters || kLanes >= 8) {
        if (args.rows == kDotRows) {
            return multiply(std::integral_constant<int, kDotRows>{}, args);
        }
    }
    for (int r = 0; r < args.rows; ++r) {
        linear_blocks::DotArgs row = args;
        row.blocks += r * args.stride;
        row.sums += r * kLanes;
        multiply(std::integral_constant<int, 1>{}, row);
    }
}

template <typename K> void dot(const linear_blocks::DotArgs &args) {
    if constexpr (kInPairs<bf16>) {
        if (args.in_pairs) {
            return dot<K, bf16>(args);
        }
    }
    dot<K, float>(args);
}

} // namespace
} // namespace infini::INFINI_LEVEL

// Defines decode_NAME and dot_NAME, at the level, of a kind's struct.
#define INFINI_DEFINE_BLOCK_KIND(name, kind)                                                                           \
    void decode_##name(const DecodeArgs &args) {                                                                       \
        decode<kind>(args);                                                                                            \
    }                                                                                                                  \
    void dot_##name(const DotArgs &args) {                                                                             \
        dot<kind>(args);                                                                                               \
    }
