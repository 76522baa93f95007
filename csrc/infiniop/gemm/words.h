// The operands of gemm as the tiles multiply them: 32-bit words, one float each, or two adjacent elements of k where
// the machine multiplies bfloat16 in pairs. Packing turns either layout of a matrix into panels of such words.
#pragma once

#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// a, or b transposed: element (k, j) lies at data[k * k_stride + j * j_stride]; j counts rows of a or columns of b.
template <typename T> struct Operand {
    const T *data;
    int64_t k_stride, j_stride;
    bool along_k; // elements that are adjacent in memory follow each other in k, otherwise in j
};

inline VecF broadcast(const float *word) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(*word); // splat() would add 0, and a word may be two bfloat16
#elif defined(__AVX2__)
    return _mm256_broadcast_ss(word);
#else
    return VecF{*word, *word, *word, *word};
#endif
}

// Words made of elements of T.
template <typename T> struct Words {
    static constexpr int kElements = 1; // of k in a word
    // kLanes words of one j: n elements are there, what lies beyond counts as 0.
    static VecF along_k(const T *p, Full) { return load(p); }
    static VecF along_k(const T *p, int n) { return load(p, n); }
    // The same word of `lanes` adjacent j.
    template <typename Lanes> static VecF along_j(const T *p, int64_t, int64_t, Lanes lanes) {
        return load_at(p, 0, lanes);
    }
    static VecF multiply_add(VecF a, VecF b, VecF sum) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
template <> struct Words<bf16> {
    static constexpr int kElements = 2;
    static VecF along_k(const bf16 *p, Full) { return (VecF)_mm512_loadu_si512(p); }
    static VecF along_k(const bf16 *p, int n) {
        return (VecF)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
    }
    static __m512i half(const bf16 *p, Full) {
        return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static __m512i half(const bf16 *p, int n) { return _mm512_castsi256_si512((__m256i)load_halves(p, n)); }
    template <typename Lanes> static VecF along_j(const bf16 *p, int64_t k_stride, int64_t left, Lanes lanes) {
        const __m512i order =
            (__m512i)(VecU)(VecI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + 0x200000);
        return (VecF)_mm512_permutex2var_epi16(half(p, lanes), order,
                                               left > 1 ? half(p + k_stride, lanes) : _mm512_setzero_si512());
    }
    static VecF multiply_add(VecF a, VecF b, VecF sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// ---- transposing kLanes x kLanes words ----

// Lanes of a and b in turns of kRun, from the lower (or, at kRun, the upper) part of each block of 2 * kRun * kStep.
template <int kBlock, int... kLane>
INFINI_ALWAYS_INLINE void swap_blocks(VecF &a, VecF &b, std::integer_sequence<int, kLane...>) {
    const VecF low = __builtin_shufflevector(a, b, (kLane & kBlock ? kLane - kBlock + kLanes : kLane)...);
    const VecF high = __builtin_shufflevector(a, b, (kLane & kBlock ? kLane + kLanes : kLane + kBlock)...);
    a = low;
    b = high;
}

// Within each four lanes: a0 b0 a1 b1 and a2 b2 a3 b3.
template <int... kLane>
INFINI_ALWAYS_INLINE void interleave_words(VecF &a, VecF &b, std::integer_sequence<int, kLane...>) {
    const VecF low = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 4 / 2 + kLane % 2 * kLanes)...);
    const VecF high = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 4 / 2 + 2 + kLane % 2 * kLanes)...);
    a = low;
    b = high;
}

// Within each four lanes: a0 a1 b0 b1 and a2 a3 b2 b3.
template <int... kLane>
INFINI_ALWAYS_INLINE void interleave_pairs(VecF &a, VecF &b, std::integer_sequence<int, kLane...>) {
    const VecF low = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 2 + kLane % 4 / 2 * kLanes)...);
    const VecF high = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 2 + 2 + kLane % 4 / 2 * kLanes)...);
    a = low;
    b = high;
}

// Lane i of vector j becomes lane j of vector i.
INFINI_ALWAYS_INLINE void transpose(VecF (&v)[kLanes]) {
    constexpr std::make_integer_sequence<int, kLanes> all{};
#if defined(__AVX512F__)
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) {
        swap_blocks<8>(v[i], v[i + 8], all);
    }
#endif
#if defined(__AVX2__)
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        if ((i & 4) == 0) {
            swap_blocks<4>(v[i], v[i + 4], all);
        }
    }
#endif
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 4) { // four by four within each four lanes
        interleave_words(v[i], v[i + 1], all);
        interleave_words(v[i + 2], v[i + 3], all);
        interleave_pairs(v[i], v[i + 2], all);
        interleave_pairs(v[i + 1], v[i + 3], all);
        const VecF second = v[i + 2]; // now in the order 0, 2, 1, 3
        v[i + 2] = v[i + 1];
        v[i + 1] = second;
    }
}

// ---- packing ----

// Words of kLanes (or, at the edge, `columns`) rows that are contiguous along k, transposed: vector i has word i of
// each.
template <typename T, typename Lanes>
INFINI_ALWAYS_INLINE void load_transposed(const T *p, int64_t j_stride, int columns, Lanes elements,
                                          VecF (&v)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        v[i] = i < columns ? Words<T>::along_k(p + i * j_stride, elements) : VecF{};
    }
    transpose(v);
}

template <typename T>
void pack_along_k(const T *p, int64_t j_stride, int columns, int64_t k, int64_t width, int lanes, float *out) {
    constexpr int kStep = kLanes * Words<T>::kElements;
    VecF v[kLanes];
    int64_t i = 0;
    if (columns == kLanes) {
        for (; i + kStep <= k; i += kStep) {
            load_transposed(p + i, j_stride, kLanes, Full{}, v);
#pragma GCC unroll 16
            for (int w = 0; w < kLanes; ++w) {
                store(out, v[w]);
                out += width;
            }
        }
    }
    for (; i < k; i += kStep) {
        const int64_t left = k - i < kStep ? k - i : kStep;
        load_transposed(p + i, j_stride, columns, static_cast<int>(left), v);
        for (int64_t w = 0; w < ceil_div(left, Words<T>::kElements); ++w) {
            store(out, v[w], lanes);
            out += width;
        }
    }
}

// Packs k elements of `columns` j: word w of column j goes to out[w * width + j]. Where width > columns, the rest is 0.
template <typename T>
__attribute__((noinline)) void pack(const Operand<T> &x, const T *p, int64_t columns, int64_t k, int64_t width,
                                    float *out) {
    using W = Words<T>;
    if (x.along_k) {
        for (int64_t j = 0; j < width; j += kLanes) {
            const int64_t there = columns - j < kLanes ? columns - j : kLanes;
            pack_along_k(p + j * x.j_stride, x.j_stride, static_cast<int>(there), k, width,
                         static_cast<int>(width - j < kLanes ? width - j : kLanes), out + j);
        }
        return;
    }
    for (int64_t i = 0; i < k; i += W::kElements, p += W::kElements * x.k_stride, out += width) {
        int64_t j = 0;
        for (; j + kLanes <= columns; j += kLanes) {
            store(out + j, W::along_j(p + j, x.k_stride, k - i, Full{}));
        }
        for (; j < width; j += kLanes) {
            const int there = static_cast<int>(j < columns ? columns - j : 0);
            store(out + j, W::along_j(p + j, x.k_stride, k - i, there),
                  static_cast<int>(width - j < kLanes ? width - j : kLanes));
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
