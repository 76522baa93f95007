// Pairs of half-precision numbers in one register (bf16x2, f16x2), and the conversion of small integers to them.
#pragma once

#include "scalar_types.cuh"

#ifdef INFINI_EMULATION
#include <cmath>
#endif

namespace infini::cuda {

// and_or, and_xor: (a & b) | c and (a & b) ^ c as one LOP3, which the compiler does not emit for two constants.
// pack_half2: x (low) and y rounded to nearest even. sub_half2, fma_half2: a - b and a * b + c elementwise, rounded
// once.
#ifdef INFINI_EMULATION

inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    return (a & b) | c;
}
inline uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
    return (a & b) ^ c;
}

template <typename T> inline uint32_t pack_half2(float x, float y) {
    return narrow<T>(x).bits | static_cast<uint32_t>(narrow<T>(y).bits) << 16;
}

template <typename T> inline uint32_t sub_half2(uint32_t a, uint32_t b) {
    uint32_t out = 0;
    for (int i = 0; i < 2; ++i) {
        const T left{static_cast<uint16_t>(a >> 16 * i)}, right{static_cast<uint16_t>(b >> 16 * i)};
        out |= static_cast<uint32_t>(narrow<T>(widen(left) - widen(right)).bits) << 16 * i;
    }
    return out;
}

template <typename T> inline uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out = 0;
    for (int i = 0; i < 2; ++i) {
        const T left{static_cast<uint16_t>(a >> 16 * i)}, right{static_cast<uint16_t>(b >> 16 * i)},
            summand{static_cast<uint16_t>(c >> 16 * i)};
        out |= static_cast<uint32_t>(narrow<T>(std::fma(widen(left), widen(right), widen(summand))).bits) << 16 * i;
    }
    return out;
}

#else

__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;\n" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

template <typename T> __device__ __forceinline__ uint32_t pack_half2(float x, float y) {
    uint32_t out;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(out) : "f"(y), "f"(x));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(out) : "f"(y), "f"(x));
    }
    return out;
}
template <typename T> __device__ __forceinline__ uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    if constexpr (std::is_same_v<T, bf16>) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    }
    return out;
}
template <typename T> __device__ __forceinline__ uint32_t sub_half2(uint32_t a, uint32_t b) {
    if constexpr (std::is_same_v<T, bf16>) {
        return fma_half2<bf16>(b, 0xbf80bf80u, a); // b * -1 + a
    } else {
        uint32_t out;
        asm("sub.rn.f16x2 %0, %1, %2;\n" : "=r"(out) : "r"(a), "r"(b));
        return out;
    }
}

#endif

// Bytes kFirst and kFirst + 1 of `bytes`, int8, converted exactly.
template <typename T, int kFirst> __device__ __forceinline__ uint32_t int8x2_to_half2(uint32_t bytes) {
    constexpr uint32_t kSelect = 0x4040 + kFirst * 0x0101 + 0x0100; // each byte below one of the constant's
    if constexpr (std::is_same_v<T, bf16>) {
        // 0x4300 is 128, and 7 bits count up from there: 128 + the lower 7 bits, less 128 or, for negative ones, 256.
        const uint32_t pair = __byte_perm(bytes, 0x43434343u, kSelect);
        return sub_half2<bf16>(pair & 0xff7fff7fu, pair & 0xff80ff80u);
    } else {
        // 0x6400 is 1024, and 10 bits count up from there: 1024 + (byte + 128), less 1152.
        return sub_half2<f16>(__byte_perm(bytes ^ 0x80808080u, 0x64646464u, kSelect), 0x64806480u);
    }
}

// (bits & kMask) ^ constant in one instruction: the compiler emits two where both are constants.
template <uint32_t kMask> __device__ __forceinline__ uint32_t masked_xor(uint32_t bits, uint32_t constant) {
#ifdef INFINI_EMULATION
    return (bits & kMask) ^ constant;
#else
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;\n" : "=r"(out) : "r"(bits), "n"(kMask), "r"(constant));
    return out;
#endif
}

// Converts bytes 0 and 2 of `bytes`, int8, to `even` and 1 and 3 to `odd`, exactly: 7 operations for bf16, 5 for f16.
template <typename T> __device__ __forceinline__ void int8x4_to_half2(uint32_t &even, uint32_t &odd, uint32_t bytes) {
    const auto widen = [](uint32_t low_bytes) { // by the constants of int8x2_to_half2
        if constexpr (std::is_same_v<T, bf16>) {
            return sub_half2<bf16>(masked_xor<0x007f007fu>(low_bytes, 0x43004300u),
                                   masked_xor<0x00800080u>(low_bytes, 0x43004300u));
        } else {
            return sub_half2<f16>(masked_xor<0x00ff00ffu>(low_bytes, 0x64806480u), 0x64806480u);
        }
    };
    even = widen(bytes);
    odd = widen(bytes >> 8);
}

// out[i] = nibbles i and i + 4 of eight, 0 to 15, less 8, exactly. A nibble is placed into the mantissa of a power of
// two, which is then subtracted together with 8: 1024 for f16 (64 where the nibble stays four bits higher), 128 for
// bf16, where the mantissa has room in its lowest bits only.
template <typename T> __device__ __forceinline__ void int4x8_to_half2(uint32_t (&out)[4], uint32_t nibbles) {
    if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = fma_half2<bf16>(and_or(nibbles >> 4 * i, 0x000f000fu, 0x43004300u), 0x3f803f80u, 0xc308c308u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t two = nibbles >> 4 * i;
            out[i] = fma_half2<f16>(and_or(two, 0x000f000fu, 0x64006400u), 0x3c003c00u, 0xe408e408u);
            out[i + 1] = fma_half2<f16>(and_or(two, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u); // - 72
        }
    }
}

} // namespace infini::cuda
