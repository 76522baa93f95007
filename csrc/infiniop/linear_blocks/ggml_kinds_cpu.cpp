// The CPU decoders of GGML's kinds. A value is exact in float but for the rounding of q * scale + shift, as a whole.
#include "ggml_kinds.h"

#include "codes.h"

namespace infini::INFINI_LEVEL {
namespace {

// Passes on 32 elements of 4-bit codes, lower nibbles first, with fifth bits where there are some.
struct Nibbles {
    Bytes low, high;

    Nibbles(const uint8_t *nibbles, uint8_t offset) {
        const Bytes q = load_bytes(nibbles);
        low = (q & 15) - offset;
        high = (q >> 4) - offset;
    }
    Nibbles(const uint8_t *nibbles, const uint8_t *fifth, uint8_t offset) {
        uint32_t bits;
        std::memcpy(&bits, fifth, sizeof bits);
        const Bytes q = load_bytes(nibbles);
        low = ((q & 15) | fifth_bits(bits)) - offset;
        high = ((q >> 4) | fifth_bits(bits >> 16)) - offset;
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
    // Bit i of `bits` as bit 4 of byte i.
    static Bytes fifth_bits(uint32_t bits) {
        constexpr Bytes mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        Bytes spread = {};
        spread += static_cast<uint8_t>(bits);
        Bytes upper = {};
        upper += static_cast<uint8_t>(bits >> 8);
        spread = __builtin_shufflevector(spread, upper, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
        return (Bytes)((spread & mask) == mask) & 16;
    }
};

struct Q4_0 {
    static constexpr int kElements = 32, kBytes = 18;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 2, 8).pass(half_at(p), sink);
    }
};

struct Q4_1 {
    static constexpr int kElements = 32, kBytes = 20;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 4, 0).pass(half_at(p), half_at(p + 2), sink);
    }
};

struct Q5_0 {
    static constexpr int kElements = 32, kBytes = 22;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 6, p + 2, 16).pass(half_at(p), sink);
    }
};

struct Q5_1 {
    static constexpr int kElements = 32, kBytes = 24;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        Nibbles(p + 8, p + 4, 0).pass(half_at(p), half_at(p + 2), sink);
    }
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

// The scale and the minimum of sub-block j of Q4_K and Q5_K, six bits each.
struct SixBits {
    float scale, minimum;

    INFINI_ALWAYS_INLINE SixBits(const uint8_t *s, int j) {
        if (j < 4) {
            scale = static_cast<float>(s[j] & 63);
            minimum = static_cast<float>(s[j + 4] & 63);
        } else {
            scale = static_cast<float>((s[j + 4] & 15) | (s[j - 4] >> 6 << 4));
            minimum = static_cast<float>((s[j + 4] >> 4) | (s[j] >> 6 << 4));
        }
    }
};

struct Q4_K {
    static constexpr int kElements = 256, kBytes = 144;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const float d = half_at(p), least = -half_at(p + 2);
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
            const SixBits first(p + 4, j), second(p + 4, j + 1);
            const uint8_t *const from = p + 16 + 16 * j;
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const Bytes q = load_bytes(from + 16 * half);
                shifted(q & 15, d * first.scale, least * first.minimum, 32 * j + 16 * half, sink);
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const Bytes q = load_bytes(from + 16 * half);
                shifted(q >> 4, d * second.scale, least * second.minimum, 32 * (j + 1) + 16 * half, sink);
            }
        }
    }
};

struct Q5_K {
    static constexpr int kElements = 256, kBytes = 176;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const float d = half_at(p), least = -half_at(p + 2);
        const Bytes bits[2] = {load_bytes(p + 16), load_bytes(p + 32)};
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const SixBits part(p + 4, j);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const Bytes q = load_bytes(p + 48 + 32 * (j / 2) + 16 * half);
                const Bytes bit = (Bytes)((bits[half] & static_cast<uint8_t>(1 << j)) != 0) & 16;
                shifted((j % 2 == 0 ? q & 15 : q >> 4) | bit, d * part.scale, least * part.minimum, 32 * j + 16 * half,
                        sink);
            }
        }
    }
};

struct Q6_K {
    static constexpr int kElements = 256, kBytes = 210;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const float d = half_at(p + 208);
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            const uint8_t *const low = p + 64 * part, *const high = p + 128 + 32 * part;
            const auto *const scales = reinterpret_cast<const int8_t *>(p + 192 + 8 * part);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const Bytes nibble = load_bytes(low + 32 * (j % 2) + 16 * half);
                    const Bytes bits = load_bytes(high + 16 * half) >> static_cast<uint8_t>(2 * j) & 3;
                    const Bytes q = ((j < 2 ? nibble & 15 : nibble >> 4) | bits << 4) - 32;
                    scaled(q, d * static_cast<float>(scales[2 * j + half]), 128 * part + 32 * j + 16 * half, sink);
                }
            }
        }
    }
};

// 4-bit indices into a table of integers.
template <typename Sink>
INFINI_ALWAYS_INLINE void levels(const uint8_t *p, Bytes table, float scale, const Sink &sink) {
    const Bytes q = load_bytes(p);
    scaled(look_up(table, q & 15), scale, 0, sink);
    scaled(look_up(table, q >> 4), scale, 16, sink);
}

constexpr Bytes bytes_of(const int (&values)[16]) {
    Bytes bytes = {};
    for (int i = 0; i < 16; ++i) {
        bytes[i] = static_cast<uint8_t>(values[i]);
    }
    return bytes;
}

struct Iq4Nl {
    static constexpr int kElements = 32, kBytes = 18;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const Bytes table = bytes_of({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
        levels(p + 2, table, half_at(p), sink);
    }
};

struct Mxfp4 {
    static constexpr int kElements = 32, kBytes = 17;
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const Bytes doubled = bytes_of({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});
        // 2 ** (e - 128), half of the scale
        const float half = float_of(*p < 2 ? 0x00200000u << *p : static_cast<uint32_t>(*p - 1) << 23);
        levels(p + 1, doubled, half, sink);
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
