// Philox4x32-10, the counter-based random generator of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3,
// 2011: ten rounds turn a key and a counter into four words, so any draw of a stream can be computed without the draws
// before it. Shared by the CPU kernels of all instruction sets and by other devices.
#pragma once

#include <cstdint>

#include "tensor_view.h"

namespace infini::random_sample {

// The first of the four words for the counter (low and high word of `counter`, 0, 0).
INFINI_ALWAYS_INLINE uint32_t philox(uint64_t key, uint64_t counter) {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    auto c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0;
}

// A random multiple of 2^-24 in [0, 1), exact in float.
INFINI_ALWAYS_INLINE float uniform(uint64_t key, uint64_t counter) {
    return static_cast<float>(philox(key, counter) >> 8) * 0x1p-24f;
}

} // namespace infini::random_sample
