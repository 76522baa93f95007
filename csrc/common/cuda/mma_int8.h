// The tensor cores by warp for integers: c [16, 8] += a [16, 32] b [32, 8], int8 with exact sums in int32. All lanes of
// a warp call it together; which lane has what of c is as in mma.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace infini::cuda {

// Lane l: a[0], a[2] row l / 4, a[1], a[3] row l / 4 + 8, elements 4 (l % 4) and the next three of columns 0 to 15
// (a[0], a[1]) and 16 to 31; b0, b1 the same rows of column l / 4 of b.
#ifdef INFINI_EMULATION

inline void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    float mine[16]{};
    std::memcpy(mine, words, sizeof words);
    const auto all = emulation::gather(mine);
    const int lane = emulation::lane();
    const auto byte = [&](int of, int word, int i) {
        int8_t value;
        std::memcpy(&value, reinterpret_cast<const char *>(all[of]) + 4 * word + i, 1);
        return static_cast<int32_t>(value);
    };
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4, column = 2 * (lane % 4) + e % 2;
        for (int k = 0; k < 32; ++k) {
            c[e] += byte(4 * row + k % 16 / 4, e / 2 + k / 16 * 2, k % 4) *
                    byte(4 * column + k % 16 / 4, 4 + k / 16, k % 4);
        }
    }
}

#else

__device__ __forceinline__ void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

} // namespace infini::cuda
