// How decoders make floats of a block, and the two kernels that every kind gets of its decoder: decode and dot. Included
// only by *_cpu.cpp files. A kind is a struct with kElements, kBytes and
//     template <typename Sink> static void decode(const uint8_t *block, const Sink &sink)
// which calls sink(i, values) for each vector of kLanes elements, i ascending: products are summed in that order.
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

template <typename K> void decode(const linear_blocks::DecodeArgs &args) {
    const uint8_t *block = args.blocks;
    float *to = args.to;
    for (int64_t i = 0; i < args.count; ++i, block += K::kBytes, to += K::kElements) {
        K::decode(block, [&](int at, VecF values) __attribute__((always_inline)) { store(to + at, values); });
    }
}

// Adds the products of a decoded row with kM rows of x to its sums, step by step; W is what the row is rounded to.
template <typename W, int kM> struct RowSums {
    using S = Steps<W>;
    const typename S::X *x;
    int64_t x_stride;
    VecF (&sums)[kM];
    VecF first{}; // of a step that takes two vectors

    INFINI_ALWAYS_INLINE void operator()(int at, VecF values) {
        if constexpr (S::kStep == kLanes) {
            add(at, values);
        } else if (at % S::kStep == 0) {
            first = values;
        } else {
            add(at - kLanes, S::round(first, values));
        }
    }

private:
    template <typename Step> INFINI_ALWAYS_INLINE void add(int at, Step values) {
#pragma GCC unroll 2
        for (int m = 0; m < kM; ++m) {
            sums[m] = S::multiply_add(values, S::load_x(x + m * x_stride + at), sums[m]);
        }
    }
};

// Adds the products of kRows rows with kM rows of x to the sums, vector by vector as multiply_tile.
template <typename K, typename W, int kRows, int kM> void dot_rows(const linear_blocks::DotArgs &args) {
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
    const auto *x = static_cast<const typename Steps<W>::X *>(args.x);
    for (int64_t i = 0; i < args.count; ++i, block += K::kBytes, x += K::kElements) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const uint8_t *const of_row = block + r * args.stride;
#pragma GCC unroll 4
            for (int line = 0; line < K::kBytes; line += 64) {
                prefetch_weight(of_row + args.ahead + line, args.far);
            }
            RowSums<W, kM> row{x, args.x_stride, sums[r]};
            K::decode(of_row, [&](int at, VecF values) __attribute__((always_inline)) { row(at, values); });
        }
    }
    each_sum([](const VecF &sum, float *at) { store(at, sum); });
}

// The same for args.rows rows, 1 or kDotRows, and args.m rows of x, 1 or kDotX.
template <typename K, typename W> void dot(const linear_blocks::DotArgs &args) {
    using linear_blocks::kDotRows;
    using linear_blocks::kDotX;
    if (args.rows == kDotRows) {
        args.m == 1 ? dot_rows<K, W, kDotRows, 1>(args) : dot_rows<K, W, kDotRows, kDotX>(args);
    } else {
        args.m == 1 ? dot_rows<K, W, 1, 1>(args) : dot_rows<K, W, 1, kDotX>(args);
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
