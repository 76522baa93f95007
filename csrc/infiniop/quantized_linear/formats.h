// How quantized weights become operands of a product. Each format defines the registers of a step along k, and x packed
// in the same order, which is arbitrary within a step.
#pragma once

#include "quantized_linear.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// x of type T is multiplied as float, or as pairs of bfloat16 if the machine can; the integers are exact in both. The
// formats below are compiled for these two types, not for every T.
template <typename T> struct FactorOf {
    using X = float;
};

template <typename X> struct Factors {
    using Register = VecF;
    static VecF load_x(const float *x) { return load(x); }
    static VecF multiply_add(VecF q, VecF x, VecF sum) { return fma(q, x, sum); }
};

#if defined(__AVX512BF16__)
// The instruction treats denormal inputs and sums as zero.
template <> struct FactorOf<bf16> {
    using X = bf16;
};

template <> struct Factors<bf16> {
    using Register = __m512bh;
    static __m512bh load_x(const bf16 *x) { return (__m512bh)_mm512_load_si512(x); }
    static VecF multiply_add(__m512bh q, __m512bh x, VecF sum) { return _mm512_dpbf16_ps(sum, q, x); }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> struct FactorOf<bf16> {
    using X = bf16;
};

template <> struct Factors<bf16> {
    using Register = bfloat16x8_t;
    static bfloat16x8_t load_x(const bf16 *x) { return vld1q_bf16(reinterpret_cast<const bfloat16_t *>(x)); }
    static VecF multiply_add(bfloat16x8_t q, bfloat16x8_t x, VecF sum) {
        return (VecF)vbfdotq_f32((float32x4_t)sum, q, x);
    }
};
#endif

// ---- int8: a step is one register: floats in the order of k, or pairs of elements from its two halves ----

inline VecF load_int8(const uint8_t *p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#elif defined(__aarch64__)
    return load(reinterpret_cast<const int8_t *>(p));
#else
    VecI q;
    for (int i = 0; i < kLanes; ++i) {
        q[i] = static_cast<int8_t>(p[i]);
    }
    return __builtin_convertvector(q, VecF);
#endif
}

inline void load_int8(const uint8_t *p, VecF &q) {
    q = load_int8(p);
}

#if defined(__AVX512BF16__)
// The lower 16 bits of these floats are 0.
inline void load_int8(const uint8_t *p, __m512bh &q) {
    q = (__m512bh)((VecU)load_int8(p) >> 16 | (VecU)load_int8(p + kLanes));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline void load_int8(const uint8_t *p, bfloat16x8_t &q) {
    q = vreinterpretq_bf16_u32((uint32x4_t)((VecU)load_int8(p) >> 16 | (VecU)load_int8(p + kLanes)));
}
#endif

template <typename X_> struct Int8 {
    using X = X_;
    using Weights = typename Factors<X>::Register;
    static constexpr int kStep = kLanes * 4 / sizeof(X);
    static constexpr int64_t kLongest = int64_t{1} << 40;     // elements of k per block, at most
    static constexpr int kTileRows = kManyRegisters ? 12 : 4; // rows of x
    static constexpr int kRows = 2;                           // weight rows in registers at once
    static constexpr bool kScaleRows = true;                  // one scale per weight row, applied to the sum
    static constexpr int64_t bytes(int64_t k) { return k; }
    static constexpr int64_t run_bytes(int) { return 128; } // by number of rows of x

    struct Pattern { // empty: a row's scale is applied to its sum
        explicit Pattern(const quantized_linear::Args &) {}
    };
    struct Scales {
        void fill(const quantized_linear::Args &, const Pattern &, int64_t, int64_t, int64_t) {}
    };

    static Weights load_step(const uint8_t *p, const Pattern &, const Scales &, int64_t) {
        Weights q;
        load_int8(p, q);
        return q;
    }
    static Weights load_step(const uint8_t *p, const Pattern &pattern, const Scales &scales, int64_t k, int n) {
        uint8_t part[kStep] = {};
        std::memcpy(part, p, static_cast<size_t>(n));
        return load_step(part, pattern, scales, k);
    }
    // sums[r][m] += weights[r] @ row m of x
    template <int kR, int kM>
    INFINI_ALWAYS_INLINE static void add(const Weights (&weights)[kR], const X *x, VecF (&sums)[kR][kM]) {
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
            const auto row = Factors<X>::load_x(x + m * kStep);
#pragma GCC unroll 4
            for (int r = 0; r < kR; ++r) {
                sums[r][m] = Factors<X>::multiply_add(weights[r], row, sums[r][m]);
            }
        }
    }

    // Packs the first n elements of a step, padded with zeros.
    template <typename T> static void pack_step(const T *x, int n, X *packed) {
        if constexpr (kStep == kLanes) {
            store(packed, load(x, n));
        } else {
            const VecF low = load(x, n < kLanes ? n : kLanes),
                       high = n > kLanes ? load(x + kLanes, n - kLanes) : VecF{};
            store(reinterpret_cast<float *>(packed), (VecF)((VecU)low >> 16 | (VecU)high));
        }
    }
};

// ---- int4: a step is eight registers of floats or four of pairs; lane i holds elements 8i to 8i + 7 ----

constexpr int kNibbles = 8;

#if defined(__AVX512F__)
alignas(64) constexpr float kInt4Floats[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
#endif

// Register j gets nibble j of each lane.
inline void load_int4(VecU nibbles, VecF (&q)[kNibbles]) {
#pragma GCC unroll 8
    for (int j = 0; j < kNibbles; ++j) {
#if defined(__AVX512F__)
        q[j] = _mm512_permutexvar_ps((__m512i)(nibbles >> (4 * j)), _mm512_load_ps(kInt4Floats));
#else
        q[j] = __builtin_convertvector((VecI)(nibbles >> (4 * j) & 15u), VecF) - splat(8.0f);
#endif
    }
}

#if defined(__AVX512BF16__)
// -8 to 7 in bfloat16, twice, because the fifth bit of the index is not cleared.
alignas(64) constexpr uint16_t kInt4Halves[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
    0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
    0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
};

// Register j gets the pair of nibbles j and j + 4 of each lane.
inline void load_int4(VecU nibbles, __m512bh (&q)[kNibbles / 2]) {
#pragma GCC unroll 4
    for (int j = 0; j < kNibbles / 2; ++j) {
        q[j] = (__m512bh)_mm512_permutexvar_epi16((__m512i)(nibbles >> (4 * j)), _mm512_load_si512(kInt4Halves));
    }
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// The lower and the upper bytes of -8 to 7 in bfloat16.
alignas(16) constexpr uint8_t kInt4Low[16] = {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80,
                                              0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0};
alignas(16) constexpr uint8_t kInt4High[16] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                               0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};

// Register j gets the pair of nibbles j and j + 4 of each lane.
inline void load_int4(VecU nibbles, bfloat16x8_t (&q)[kNibbles / 2]) {
    const uint8x16_t low = vld1q_u8(kInt4Low), high = vld1q_u8(kInt4High);
#pragma GCC unroll 4
    for (int j = 0; j < kNibbles / 2; ++j) {
        const VecU index = nibbles >> (4 * j) & 0x000f000fu; // an index byte beyond the table gives 0
        const uint8x16_t lower = vqtbl1q_u8(low, (uint8x16_t)(index | 0xff00ff00u));
        const uint8x16_t upper = vqtbl1q_u8(high, (uint8x16_t)(index << 8 | 0x00ff00ffu));
        q[j] = vreinterpretq_bf16_u8(vorrq_u8(lower, upper));
    }
}
#endif

// Rows are short and read once, so the hardware prefetcher would not detect the sequence.
template <typename S> inline void prefetch_rows(const S *row, int64_t size, int64_t stride) {
    constexpr int64_t kAheadRows = 4, kLine = 64 / sizeof(S);
    for (int64_t i = 0; i < size; i += kLine) {
        __builtin_prefetch(row + kAheadRows * stride + i);
    }
}

template <typename X_> struct Int4 {
    using X = X_;
    static constexpr int kStep = kNibbles * kLanes, kRegisters = kNibbles * sizeof(X) / 4,
                         kInRegister = kStep / kRegisters;
    static constexpr int64_t kLongest = 8192;
    static constexpr int kTileRows = !kManyRegisters ? 4 : sizeof(X) == 2 ? 8 : 12, kRows = sizeof(X) == 2 ? 2 : 1;
    static constexpr bool kScaleRows = false;
    static constexpr int64_t bytes(int64_t k) { return k / 2; }
    static constexpr int64_t run_bytes(int rows) { return rows == 1 ? 256 : 128; }

    struct Weights {
        typename Factors<X>::Register q[kRegisters];
        VecF scale;
    };

    // The group of each lane within a step, which spans at most four groups.
    struct Pattern {
        int shift = 0; // a group has 1 << shift lanes
        VecI group_of_lane{};

        explicit Pattern(const quantized_linear::Args &a) {
            const int64_t groups = a.scales.size(1), group = groups > 0 ? a.x.size(-1) / groups : 128;
            shift = group == 32 ? 5 : group == 64 ? 6 : 7;
            for (int lane = 0; lane < kLanes; ++lane) {
                group_of_lane[lane] = lane * kNibbles >> shift;
            }
        }
        // Expands the groups' scales to the lanes; reads four scales.
        VecF of_lanes(const float *scales) const {
#if defined(__AVX512F__)
            return _mm512_permutexvar_ps((__m512i)group_of_lane, _mm512_broadcast_f32x4(_mm_loadu_ps(scales)));
#elif defined(__AVX2__)
            return _mm256_permutevar8x32_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128 *>(scales)),
                                            (__m256i)group_of_lane);
#else
            return splat(*scales); // a step lies within one group
#endif
        }
    };

    // The scales of one weight row for a block of k.
    struct Scales {
        float values[kLongest / 32 + kLanes];

        void fill(const quantized_linear::Args &a, const Pattern &pattern, int64_t row, int64_t first_k, int64_t k) {
            with_float_type(a.scales.dtype, [&](auto type) {
                const auto *from =
                    a.scales.as<const decltype(type)>() + row * a.scales.stride(0) + (first_k >> pattern.shift);
                prefetch_rows(from, k >> pattern.shift, a.scales.stride(0));
                for_each_vector(k >> pattern.shift,
                                [&](int64_t i, auto lanes) { store_at(values, i, load_at(from, i, lanes), lanes); });
            });
        }
    };

    static Weights load_step(const uint8_t *p, const Pattern &pattern, const Scales &scales, int64_t k) {
        VecU nibbles;
        std::memcpy(&nibbles, p, sizeof nibbles);
        Weights weights;
        load_int4(nibbles, weights.q);
        weights.scale = pattern.of_lanes(scales.values + (k >> pattern.shift));
        return weights;
    }
    static Weights load_step(const uint8_t *p, const Pattern &pattern, const Scales &scales, int64_t k, int n) {
        uint8_t part[kStep / 2] = {};
        std::memcpy(part, p, static_cast<size_t>(n) / 2);
        Weights weights = load_step(part, pattern, scales, k);
        weights.scale = first_lanes(weights.scale, n / kNibbles, 0.0f); // there is no scale beyond n
        return weights;
    }
    // sums[r][m] += weights[r] @ row m of x; several sums are interleaved, because each is a chain of additions.
    template <int kR, int kM>
    INFINI_ALWAYS_INLINE static void add(const Weights (&weights)[kR], const X *x, VecF (&sums)[kR][kM]) {
        add_from<0>(weights, x, sums);
    }

    template <int kFirst, int kR, int kM>
    INFINI_ALWAYS_INLINE static void add_from(const Weights (&weights)[kR], const X *x, VecF (&sums)[kR][kM]) {
        constexpr int kLeft = kM - kFirst, kTurns = kR > 1 && kLeft > 2 ? 2 : kLeft; // rows of x
        VecF step[kR][kTurns];
#pragma GCC unroll 8
        for (int j = 0; j < kRegisters; ++j) {
#pragma GCC unroll 16
            for (int m = 0; m < kTurns; ++m) {
                const auto row = Factors<X>::load_x(x + (kFirst + m) * kStep + j * kInRegister);
#pragma GCC unroll 2
                for (int r = 0; r < kR; ++r) {
                    step[r][m] = Factors<X>::multiply_add(weights[r].q[j], row, j == 0 ? VecF{} : step[r][m]);
                }
            }
        }
#pragma GCC unroll 16
        for (int m = 0; m < kTurns; ++m) {
#pragma GCC unroll 2
            for (int r = 0; r < kR; ++r) {
                sums[r][kFirst + m] = fma(weights[r].scale, step[r][m], sums[r][kFirst + m]);
            }
        }
        if constexpr (kTurns < kLeft) {
            add_from<kFirst + kTurns>(weights, x, sums);
        }
    }

    // Packs the first n elements of a step, padded with zeros.
    template <typename T> static void pack_step(const T *x, int n, X *packed) {
        float part[kStep] = {};
        for_each_vector(n, [&](int64_t i, auto lanes) { store(part + i, load_at(x, i, lanes)); });
        for (int j = 0; j < kNibbles; ++j) {
            for (int lane = 0; lane < kLanes; ++lane) {
                if constexpr (kRegisters == kNibbles) {
                    packed[j * kLanes + lane] = part[lane * kNibbles + j];
                } else {
                    const uint32_t bits = bits_of(part[lane * kNibbles + j]) >> 16;
                    packed[j % kRegisters * kInRegister + 2 * lane + j / kRegisters] = {static_cast<uint16_t>(bits)};
                }
            }
        }
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
