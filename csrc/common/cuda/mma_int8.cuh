// mma.sync for int8, with exact sums in int32: c [16, 8] += a [16, 32] b [32, 8], and c = a [16, 16] b [16, 8]. All
// lanes of a warp call them together; c is distributed over the lanes as in mma.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace infini::cuda {

// Lane l holds row l / 4 (a[0], a[2]) and row l / 4 + 8 (a[1], a[3]) of a, elements 4 (l % 4) and the next three of
// columns 0 to 15 (a[0], a[1]) and 16 to 31 (a[2], a[3]); b0 and b1 are the same rows of column l / 4 of b.
#ifdef INFINI_EMULATION

inline void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    float mine[16]{};
    std::memcpy(mine, words, sizeof words);
    const auto all = emulation::gather(mine);
    const int lane = emulation::lane();
    // Rows lane / 4 and + 8 of a, columns 2 (lane % 4) and + 1 of b: 4 bytes at a time.
    int8_t rows[2][32], columns[2][32];
    for (int i = 0; i < 2; ++i) {
        for (int k = 0; k < 32; k += 4) {
            const int of = k % 16 / 4, later = k / 16;
            std::memcpy(rows[i] + k, &all[lane / 4 * 4 + of][i + 2 * later], 4);
            std::memcpy(columns[i] + k, &all[(2 * (lane % 4) + i) * 4 + of][4 + later], 4);
        }
    }
    for (int e = 0; e < 4; ++e) {
        for (int k = 0; k < 32; ++k) {
            c[e] += rows[e / 2][k] * columns[e % 2][k];
        }
    }
}

// Multiplies the first 16 columns of a only, laid out as a[0], a[1] and b0.
inline void multiply(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    std::memset(c, 0, sizeof c);
    mma(c, {a0, a1, 0, 0}, b, 0);
}

#else

__device__ __forceinline__ void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};\n"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

#endif

} // namespace infini::cuda
