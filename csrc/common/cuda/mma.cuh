// Tensor core instructions of a warp: mma.sync, c [16, 8] += a [16, 16] b [16, 8] for half types with float
// accumulators, and ldmatrix, 8x8 matrices from shared memory as its operands. All lanes of a warp call them together.
// Lane l holds rows l / 4 (c[0], c[1]) and l / 4 + 8 (c[2], c[3]) of c, in columns 2 (l % 4) and 2 (l % 4) + 1.
#pragma once

#include "scalar_types.cuh"

namespace infini::cuda {

#ifdef INFINI_EMULATION

namespace emulated {

template <typename T> inline float half_of(uint32_t pair, int i) {
    T value;
    value.bits = static_cast<uint16_t>(pair >> 16 * i);
    return widen(value);
}

// Lane l gets two elements of each of four 8x8 matrices: row l / 4, columns 2 (l % 4) and the next; or the transpose's.
inline void load_matrices(uint32_t (&out)[4], const void *row, bool transposed) {
    emulation::check_aligned(row, 16, "ldmatrix");
    float mine[16]{};
    std::memcpy(mine, &row, sizeof row);
    const auto all = emulation::gather(mine);
    const int lane = emulation::lane();
    for (int i = 0; i < 4; ++i) {
        uint16_t pair[2];
        for (int j = 0; j < 2; ++j) {
            const int along = 2 * (lane % 4) + j, across = lane / 4;
            const uint16_t *from;
            std::memcpy(&from, all[8 * i + (transposed ? along : across)], sizeof from);
            pair[j] = from[transposed ? across : along];
        }
        std::memcpy(&out[i], pair, sizeof pair);
    }
}

} // namespace emulated

inline void load_matrices(uint32_t (&out)[4], const void *row) {
    emulated::load_matrices(out, row, false);
}
inline void load_matrices_transposed(uint32_t (&out)[4], const void *row) {
    emulated::load_matrices(out, row, true);
}

inline uint32_t transpose_matrix(uint32_t pair) {
    float mine[16]{};
    std::memcpy(mine, &pair, sizeof pair);
    const auto all = emulation::gather(mine);
    const int lane = emulation::lane();
    uint32_t out = 0;
    for (int i = 0; i < 2; ++i) { // row 2 (l % 4) + i, column l / 4
        uint32_t from;
        std::memcpy(&from, all[(2 * (lane % 4) + i) * 4 + lane / 8], sizeof from);
        out |= (from >> lane / 4 % 2 * 16 & 0xffff) << 16 * i;
    }
    return out;
}

template <typename T> inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    float mine[16]{};
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) {
            mine[2 * j + i] = emulated::half_of<T>(a[j], i);
        }
        mine[8 + i] = emulated::half_of<T>(b0, i);
        mine[10 + i] = emulated::half_of<T>(b1, i);
    }
    const auto all = emulation::gather(mine);
    const int lane = emulation::lane();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4, column = 2 * (lane % 4) + e % 2;
        c[e] = emulation::add_products(c[e], 16, [&](int64_t k) {
            const auto register_a = e / 2 + k / 8 * 2, pair = k % 8 / 2;
            return static_cast<double>(all[4 * row + pair][2 * register_a + k % 2]) *
                   static_cast<double>(all[4 * column + pair][8 + k / 8 * 2 + k % 2]);
        });
    }
}

#else

// Lane l passes the address of row l % 8 of matrix l / 8 (16 bytes, aligned). It gets from each of the four matrices
// row l / 4, columns 2 (l % 4) and the next; transposed: column l / 4, rows 2 (l % 4) and the next.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&out)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

// Transposes an 8x8 matrix that is distributed over the lanes as load_matrices does it.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(out) : "r"(pair));
    return out;
}

// a: four 8x8 matrices as load_matrices gives them: rows 0 to 7 and 8 to 15 of columns 0 to 7, then of columns 8 to 15.
// b0, b1: rows 0 to 7 and 8 to 15 of b, from load_matrices_transposed, or from load_matrices of b transposed.
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    static_assert(sizeof(T) == 2);
    if constexpr (std::is_same_v<T, bf16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};\n"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};\n"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

#endif

} // namespace infini::cuda
