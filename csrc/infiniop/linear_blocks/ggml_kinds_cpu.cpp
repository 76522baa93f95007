// The CPU decoders of GGML's kinds. A value is exact in float but for the rounding of q * scale + shift, as a whole.
#include "ggml_kinds.h"

#include "codes.h"

namespace infini::INFINI_LEVEL {
namespace {

typedef uint32_t Quarters __attribute__((vector_size(16)));

inline uint32_t bits_at(const uint8_t *p) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
}

// Passes on 32 elements of 4-bit codes, lower nibbles first, with fifth bits where there are some.
struct Nibbles {
    Bytes low, high;

    Nibbles(const uint8_t *nibbles, uint8_t offset) {
        const Bytes q = load_bytes(nibbles);
        low = (q & 15) - offset;
        high = shifted_right<4>(q, 15) - offset;
    }
    Nibbles(const uint8_t *nibbles, const uint8_t *fifth, uint8_t offset) {
        const uint32_t bits = bits_at(fifth);
        const Bytes q = load_bytes(nibbles), all = (Bytes)(Quarters{bits, bits, bits, bits});
        low = ((q & 15) | as_bit_4(__builtin_shufflevector(all, all, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1))) -
              offset;
        high = (shifted_right<4>(q, 15) |
                as_bit_4(__builtin_shufflevector(all, all, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3))) -
               offset;
    }
    template <typename Sink> INFINI_ALWAYS_INLINE void pass(float scale, const Sink &sink) const {
        scaled(low, scale, 0, sink);
        scaled(high, scale, 16, sink);
    }
    template <typename Sink> INFINI_ALWAYS_INLINE void pass(float scale, float shift, const Sink &sink) const {
        shifted(low, scale, shift, 0, sink);
        shifted(high, scale, shift, 16, sink);
    }

private:
    // Bit i % 8 of byte i as its bit 4.
    static Bytes as_bit_4(Bytes bytes) {
        constexpr Bytes mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        return (Bytes)((bytes & mask) == mask) & 16;
    }
};

struct Q4_0 {
    static constexpr int kElements = 32, kBytes = 18;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 2, 8).pass(half_at(p), sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        sink(0, look_up(table_of((counted() - splat(8)) * splat(half_at(p))), nibble_words(p + 2)));
    }
#endif
};

struct Q4_1 {
    static constexpr int kElements = 32, kBytes = 20;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 4, 0).pass(half_at(p), half_at(p + 2), sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const VecF scale = splat(half_at(p)), least = splat(half_at(p + 2));
        sink(0, look_up(table_of(fma(counted(), scale, least)), nibble_words(p + 4)));
    }
#endif
};

struct Q5_0 {
    static constexpr int kElements = 32, kBytes = 22;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 6, p + 2, 16).pass(half_at(p), sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const VecF scale = splat(half_at(p));
        const __m512i table = table_of((counted() - splat(16)) * scale, counted() * scale);
        sink(0, look_up(table, with_fifth_bits(nibble_words(p + 6), bits_at(p + 2))));
    }
#endif
};

struct Q5_1 {
    static constexpr int kElements = 32, kBytes = 24;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 8, p + 4, 0).pass(half_at(p), half_at(p + 2), sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const VecF scale = splat(half_at(p)), least = splat(half_at(p + 2));
        const __m512i table = table_of(fma(counted(), scale, least), fma(counted() + splat(16), scale, least));
        sink(0, look_up(table, with_fifth_bits(nibble_words(p + 8), bits_at(p + 4))));
    }
#endif
};

struct Q8_0 {
    static constexpr int kElements = 32, kBytes = 34;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const VecF scale = splat(half_at(p));
        const auto *const q = reinterpret_cast<const int8_t *>(p + 2);
#pragma GCC unroll 8
        for (int i = 0; i < kElements; i += kLanes) {
            sink(i, load(q + i) * scale);
        }
    }
};

// The scales and the negative minima of the eight sub-blocks of Q4_K and Q5_K: six bits each, times a factor of the block.
struct SixBits {
    alignas(64) float scales[16]; // then the negative minima

    INFINI_ALWAYS_INLINE explicit SixBits(const uint8_t *block) {
        uint32_t s[3];
        std::memcpy(s, block + 4, sizeof s);
        const Quarters six = {s[0] & 0x3f3f3f3f, (s[2] & 0x0f0f0f0f) | (s[0] >> 2 & 0x30303030), // scales
                              s[1] & 0x3f3f3f3f, (s[2] >> 4 & 0x0f0f0f0f) | (s[1] >> 2 & 0x30303030)};
        const VecF d = splat(half_at(block)), least = splat(-half_at(block + 2));
        VecF all[kVectors];
        widen((Bytes)six, all);
#if defined(__AVX512F__)
        store(scales, all[0] * _mm512_mask_blend_ps(0xff00, d, least));
#else
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            store(scales + v * kLanes, all[v] * (v < kVectors / 2 ? d : least));
        }
#endif
    }
    INFINI_ALWAYS_INLINE float scale(int j) const { return scales[j]; }
    INFINI_ALWAYS_INLINE float shift(int j) const { return scales[8 + j]; }

#if defined(__AVX512BF16__)
    // The values of the 16 codes from `first` on, in sub-block j.
    INFINI_ALWAYS_INLINE VecF values(int j, float first = 0) const {
        return fma(counted() + splat(first), splat(scale(j)), splat(shift(j)));
    }
#endif
};

// Elements are passed on in their order, in which products are summed.
struct Q4_K {
    static constexpr int kElements = 256, kBytes = 144;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const SixBits parts(p);
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
            const Bytes q[2] = {load_bytes(p + 16 + 16 * j), load_bytes(p + 32 + 16 * j)};
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                shifted(q[half] & 15, parts.scale(j), parts.shift(j), 32 * j + 16 * half, sink);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                shifted(shifted_right<4>(q[half], 15), parts.scale(j + 1), parts.shift(j + 1), 32 * (j + 1) + 16 * half,
                        sink);
            }
        }
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const SixBits parts(p);
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
            // Two tables in one: bit 4 of an index is that of the sub-block.
            const __m512i table = table_of(parts.values(j), parts.values(j + 1)), q = load_words(p + 16 + 16 * j);
            sink(32 * j, look_up(table, _mm512_and_si512(q, _mm512_set1_epi16(15))));
            sink(32 * j + 32, look_up(table, _mm512_or_si512(_mm512_srli_epi16(q, 4), _mm512_set1_epi16(16))));
        }
    }
#endif
};

struct Q5_K {
    static constexpr int kElements = 256, kBytes = 176;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const SixBits parts(p);
        part<0>(p, parts, sink);
        part<1>(p, parts, sink);
        part<2>(p, parts, sink);
        part<3>(p, parts, sink);
        part<4>(p, parts, sink);
        part<5>(p, parts, sink);
        part<6>(p, parts, sink);
        part<7>(p, parts, sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const SixBits parts(p);
        const __m256i fifth = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 16));
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512i pairs = load_words(p + 48 + 32 * (j / 2)), q = j % 2 ? _mm512_srli_epi16(pairs, 4) : pairs;
            const __mmask32 bits = _mm256_test_epi8_mask(fifth, _mm256_set1_epi8(static_cast<char>(1 << j)));
            sink(32 * j, look_up(table_of(parts.values(j), parts.values(j, 16)), with_fifth_bits(q, bits)));
        }
    }
#endif

private:
    // Sub-block kJ; its fifth bits are bit kJ of 32 bytes.
    template <int kJ, typename Sink>
    INFINI_ALWAYS_INLINE static void part(const uint8_t *p, const SixBits &parts, const Sink &sink) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const Bytes pairs = load_bytes(p + 48 + 32 * (kJ / 2) + 16 * half), fifth = load_bytes(p + 16 + 16 * half);
            const Bytes q = shifted_right<kJ % 2 * 4>(pairs, 15);
            Bytes bit;
            if constexpr (kJ < 4) {
                bit = shifted_left<4 - kJ>(fifth, 16);
            } else {
                bit = shifted_right<kJ - 4>(fifth, 16);
            }
            shifted(q | bit, parts.scale(kJ), parts.shift(kJ), 32 * kJ + 16 * half, sink);
        }
    }
};

struct Q6_K {
    static constexpr int kElements = 256, kBytes = 210;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        float scales[16];
        multiples(load_bytes(p + 192), half_at(p + 208), scales);
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            const uint8_t *const low = p + 64 * part;
            const Bytes nibbles[4] = {load_bytes(low), load_bytes(low + 16), load_bytes(low + 32),
                                      load_bytes(low + 48)};
            const Bytes upper[2] = {load_bytes(p + 128 + 32 * part), load_bytes(p + 144 + 32 * part)};
            const auto pass = [&](int i, Bytes q) __attribute__((always_inline)) {
                scaled(q - 32, scales[8 * part + i], 128 * part + 16 * i, sink);
            };
            pass(0, (nibbles[0] & 15) | shifted_left<4>(upper[0], 0x30));
            pass(1, (nibbles[1] & 15) | shifted_left<4>(upper[1], 0x30));
            pass(2, (nibbles[2] & 15) | shifted_left<2>(upper[0], 0x30));
            pass(3, (nibbles[3] & 15) | shifted_left<2>(upper[1], 0x30));
            pass(4, shifted_right<4>(nibbles[0], 15) | (upper[0] & 0x30));
            pass(5, shifted_right<4>(nibbles[1], 15) | (upper[1] & 0x30));
            pass(6, shifted_right<4>(nibbles[2], 15) | shifted_right<2>(upper[0], 0x30));
            pass(7, shifted_right<4>(nibbles[3], 15) | shifted_right<2>(upper[1], 0x30));
        }
    }
};

// 4-bit indices into a table of integers.
template <typename Sink>
INFINI_ALWAYS_INLINE void levels(const uint8_t *p, Bytes table, float scale, const Sink &sink) {
    const Bytes q = load_bytes(p);
    scaled(look_up(table, q & 15), scale, 0, sink);
    scaled(look_up(table, shifted_right<4>(q, 15)), scale, 16, sink);
}

#if defined(__AVX512BF16__)
template <typename Sink>
INFINI_ALWAYS_INLINE void level_pairs(const uint8_t *p, Bytes table, float scale, const Sink &sink) {
    VecF values[1];
    widen(table, values);
    sink(0, look_up(table_of(values[0] * splat(scale)), nibble_words(p)));
}
#endif

struct Iq4Nl {
    static constexpr int kElements = 32, kBytes = 18;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        levels(p + 2, iq4_levels(), half_at(p), sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        level_pairs(p + 2, iq4_levels(), half_at(p), sink);
    }
#endif
};

struct Mxfp4 {
    static constexpr int kElements = 32, kBytes = 17;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        levels(p + 1, fp4_levels(), half_of_scale(*p), sink);
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        level_pairs(p + 1, fp4_levels(), half_of_scale(*p), sink);
    }
#endif

private:
    // 2 ** (e - 128)
    static float half_of_scale(uint8_t e) {
        return float_of(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_blocks::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_BLOCK_KIND(q4_0, Q4_0)
INFINI_DEFINE_BLOCK_KIND(q4_1, Q4_1)
INFINI_DEFINE_BLOCK_KIND(q5_0, Q5_0)
INFINI_DEFINE_BLOCK_KIND(q5_1, Q5_1)
INFINI_DEFINE_BLOCK_KIND(q8_0, Q8_0)
INFINI_DEFINE_BLOCK_KIND(q4_k, Q4_K)
INFINI_DEFINE_BLOCK_KIND(q5_k, Q5_K)
INFINI_DEFINE_BLOCK_KIND(q6_k, Q6_K)
INFINI_DEFINE_BLOCK_KIND(iq4_nl, Iq4Nl)
INFINI_DEFINE_BLOCK_KIND(mxfp4, Mxfp4)

} // namespace infini::linear_blocks::INFINI_LEVEL
