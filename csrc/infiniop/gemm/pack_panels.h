// Packs an operand of gemm into panels of 32-bit words: one float each, or two adjacent elements of k if the machine
// multiplies bfloat16 in pairs. Takes either layout of a matrix.
#pragma once

#include "tensor_view.h"
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
    bool along_k; // whether k is the contiguous dimension, else j
};

// How elements of T are packed into words: a word holds adjacent elements of k. A half type that is converted to float
// is transposed as raw words of two elements.
template <typename T> struct PackedK {
    static constexpr int kElements = 1;          // of k per word
    static constexpr int kParts = 4 / sizeof(T); // words per raw word
    static constexpr int kLineVectors = 1;       // vectors of j loaded together
    // Loads one word of each of `lanes` adjacent j.
    template <typename Lanes> static VecF along_j(const T *p, int64_t, int64_t, Lanes lanes) {
        return load_at(p, 0, lanes);
    }
    template <int kPart> static VecF part(VecF raw) {
        if constexpr (sizeof(T) == sizeof(float)) {
            return raw;
        } else {
            const VecU halves = kPart == 0 ? (VecU)raw : (VecU)raw >> 16;
#if defined(__AVX512F__)
            return widen_half(T{}, (VecH)_mm512_cvtepi32_epi16((__m512i)halves));
#else
            return widen_half(T{}, __builtin_convertvector(halves, VecH));
#endif
        }
    }
    static VecF widen_half(bf16, VecH h) { return widen_bf16(h); }
    static VecF widen_half(f16, VecH h) { return widen_f16(h); }
    static VecF multiply_add(VecF a, VecF b, VecF sum) { return fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
template <> struct PackedK<bf16> {
    static constexpr int kElements = 2, kParts = 1, kLineVectors = 2;
    static __m512i half(const bf16 *p, Full) {
        return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static __m512i half(const bf16 *p, int n) { return _mm512_castsi256_si512((__m256i)load_halves(p, n)); }
    template <typename Lanes> static VecF along_j(const bf16 *p, int64_t k_stride, int64_t left, Lanes lanes) {
        const VecI order = VecI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + 0x200000;
        const __m512i next = left > 1 ? half(p + k_stride, lanes) : _mm512_setzero_si512();
        return (VecF)_mm512_permutex2var_epi16(half(p, lanes), (__m512i)order, next);
    }
    // Loads two vectors from whole cache lines: half as many loads.
    static void line_along_j(const bf16 *p, int64_t k_stride, int64_t left, VecF *words) {
        const VecI low = VecI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + 0x200000;
        const __m512i line = _mm512_loadu_si512(p);
        const __m512i next = left > 1 ? _mm512_loadu_si512(p + k_stride) : _mm512_setzero_si512();
        words[0] = (VecF)_mm512_permutex2var_epi16(line, (__m512i)low, next);
        words[1] = (VecF)_mm512_permutex2var_epi16(line, (__m512i)(low + 0x100010), next);
    }
    template <int kPart> static VecF part(VecF raw) { return raw; }
    static VecF multiply_add(VecF a, VecF b, VecF sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> struct PackedK<bf16> {
    static constexpr int kElements = 2, kParts = 1, kLineVectors = 2;
    static VecH half(const bf16 *p, Full) {
        VecH h;
        std::memcpy(&h, p, sizeof h);
        return h;
    }
    static VecH half(const bf16 *p, int n) { return load_halves(p, n); }
    template <typename Lanes> static VecF along_j(const bf16 *p, int64_t k_stride, int64_t left, Lanes lanes) {
        const VecH next = left > 1 ? half(p + k_stride, lanes) : VecH{};
        return (VecF)((VecU)vmovl_u16((uint16x4_t)half(p, lanes)) | (VecU)vmovl_u16((uint16x4_t)next) << 16);
    }
    // Loads two vectors from whole 128-bit loads.
    static void line_along_j(const bf16 *p, int64_t k_stride, int64_t left, VecF *words) {
        const auto load_line = [](const bf16 *from) { return vld1q_u16(reinterpret_cast<const uint16_t *>(from)); };
        const uint16x8_t line = load_line(p), next = left > 1 ? load_line(p + k_stride) : vdupq_n_u16(0);
        words[0] = (VecF)vzip1q_u16(line, next);
        words[1] = (VecF)vzip2q_u16(line, next);
    }
    template <int kPart> static VecF part(VecF raw) { return raw; }
    static VecF multiply_add(VecF a, VecF b, VecF sum) { return dot_bf16_pairs(a, b, sum); }
};
#endif

// Loads kLanes raw words of one j, adjacent along k; or only n elements, with zeros beyond.
template <typename T> inline VecF load_raw(const T *p, Full) {
    VecF v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <typename T> inline VecF load_raw(const T *p, int n) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 2) {
        return (VecF)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
    } else {
        return load(p, n);
    }
#else
    VecF v = {};
    std::memcpy(&v, p, sizeof(T) * static_cast<size_t>(n));
    return v;
#endif
}

// ---- transposing kLanes x kLanes words ----

// In blocks of four lanes: concatenates the lower halves of a and b, and the upper halves.
template <int... kLane> INFINI_ALWAYS_INLINE void join_halves(VecF &a, VecF &b, std::integer_sequence<int, kLane...>) {
    const VecF low = __builtin_shufflevector(a, b, (kLane % (kLanes / 2) + kLane / (kLanes / 2) * kLanes)...);
    const VecF high =
        __builtin_shufflevector(a, b, (kLane % (kLanes / 2) + kLanes / 2 + kLane / (kLanes / 2) * kLanes)...);
    a = low;
    b = high;
}

// In blocks of four lanes: concatenates the even blocks of a and b, and the odd blocks.
template <int... kLane> INFINI_ALWAYS_INLINE void part_blocks(VecF &a, VecF &b, std::integer_sequence<int, kLane...>) {
    const VecF even = __builtin_shufflevector(a, b, (kLane / 4 * 8 + kLane % 4)...);
    const VecF odd = __builtin_shufflevector(a, b, (kLane / 4 * 8 + 4 + kLane % 4)...);
    a = even;
    b = odd;
}

// Within every four lanes: gives a0 b0 a1 b1 and a2 b2 a3 b3.
template <int... kLane>
INFINI_ALWAYS_INLINE void interleave_words(VecF &a, VecF &b, std::integer_sequence<int, kLane...>) {
    const VecF low = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 4 / 2 + kLane % 2 * kLanes)...);
    const VecF high = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 4 / 2 + 2 + kLane % 2 * kLanes)...);
    a = low;
    b = high;
}

// Within every four lanes: gives a0 a1 b0 b1 and a2 a3 b2 b3.
template <int... kLane>
INFINI_ALWAYS_INLINE void interleave_pairs(VecF &a, VecF &b, std::integer_sequence<int, kLane...>) {
    const VecF low = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 2 + kLane % 4 / 2 * kLanes)...);
    const VecF high = __builtin_shufflevector(a, b, (kLane / 4 * 4 + kLane % 2 + 2 + kLane % 4 / 2 * kLanes)...);
    a = low;
    b = high;
}

// Transposes: lane i of vector j becomes lane j of vector i.
INFINI_ALWAYS_INLINE void transpose(VecF (&v)[kLanes]) {
    constexpr std::make_integer_sequence<int, kLanes> all{};
    // First the blocks of four lanes: block j of vector i + 4 * r becomes block r of vector i + 4 * j.
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        if constexpr (kLanes == 16) {
            join_halves(v[i], v[i + 4], all);
            join_halves(v[i + 8], v[i + 12], all);
            part_blocks(v[i], v[i + 8], all);
            part_blocks(v[i + 4], v[i + 12], all);
            const VecF third = v[i + 4]; // now in the order 0, 2, 1, 3
            v[i + 4] = v[i + 8];
            v[i + 8] = third;
        } else if constexpr (kLanes == 8) {
            join_halves(v[i], v[i + 4], all);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 4) { // then 4 x 4 transposes within every four lanes
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

// Hides a stride's value, so that the compiler does not keep all its multiples in registers and spill them.
INFINI_ALWAYS_INLINE void hide_from_optimizer(int64_t &stride) {
    asm("" : "+r"(stride));
}

// Loads kLanes elements of k per raw word from kLanes rows (at the edge: `columns` rows) that are contiguous along k,
// and transposes them: vector i gets raw word i of each row.
template <typename T, typename Lanes>
INFINI_ALWAYS_INLINE void load_transposed(const T *p, int64_t j_stride, int columns, Lanes elements,
                                          VecF (&v)[kLanes]) {
    hide_from_optimizer(j_stride);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i, p += j_stride) {
        v[i] = i < columns ? load_raw(p, elements) : VecF{};
    }
    transpose(v);
}

// Calls body(word) for `words` words, or for all words of kLanes raw words.
template <typename T, typename Body>
INFINI_ALWAYS_INLINE void for_each_word(const VecF (&raw)[kLanes], Full, const Body &body) {
    using W = PackedK<T>;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        body(W::template part<0>(raw[i]));
        if constexpr (W::kParts == 2) {
            body(W::template part<1>(raw[i]));
        }
    }
}

template <typename T, typename Body>
INFINI_ALWAYS_INLINE void for_each_word(const VecF (&raw)[kLanes], int64_t words, const Body &body) {
    using W = PackedK<T>;
    for (int i = 0; i * W::kParts < words; ++i) {
        body(W::template part<0>(raw[i]));
        if (W::kParts == 2 && i * W::kParts + 1 < words) {
            body(W::template part<1>(raw[i]));
        }
    }
}

template <typename T>
void pack_along_k(const T *p, int64_t j_stride, int columns, int64_t k, int64_t width, int lanes, float *out) {
    constexpr int64_t kStep = kLanes * 4 / sizeof(T);
    VecF v[kLanes];
    int64_t i = 0;
    if (columns == kLanes) {
        for (; i + kStep <= k; i += kStep) {
            load_transposed(p + i, j_stride, kLanes, Full{}, v);
            for_each_word<T>(v, Full{}, [&](VecF word) {
                store(out, word);
                out += width;
            });
        }
    }
    for (; i < k; i += kStep) {
        const int64_t left = k - i < kStep ? k - i : kStep;
        load_transposed(p + i, j_stride, columns, static_cast<int>(left), v);
        for_each_word<T>(v, ceil_div(left, PackedK<T>::kElements), [&](VecF word) {
            store(out, word, lanes);
            out += width;
        });
    }
}

// The distance in words of k at which rows are prefetched: the hardware prefetcher does not follow from row to row.
constexpr int64_t kPrefetchWords = 12;

// Packs k elements of `columns` j into panels of `each` j, with `width` words per word of k: word w of column j goes to
// word (w, j % each) of panel j / each. Words without a column are unspecified.
template <typename T>
__attribute__((noinline)) void pack(const Operand<T> &x, const T *p, int64_t columns, int64_t k, int64_t each,
                                    int64_t width, float *out) {
    using W = PackedK<T>;
    const int64_t panel = ceil_div(k, W::kElements) * width;
    const auto fits = [](int64_t n) { return static_cast<int>(n < 0 ? 0 : n < kLanes ? n : kLanes); };
    if (x.along_k) {
        for (int64_t first = 0; first < columns; first += each, out += panel) {
            const int64_t there = columns - first < each ? columns - first : each;
            for (int64_t j = 0; j < width; j += kLanes) {
                pack_along_k(p + (first + j) * x.j_stride, x.j_stride, fits(there - j), k, width, fits(width - j),
                             out + j);
            }
        }
        return;
    }
    // Packs all panels at once, because memory is faster in longer runs.
    const bool vectors = width % kLanes == 0;
    for (int64_t i = 0; i < k; i += W::kElements, p += W::kElements * x.k_stride, out += width) {
        float *to = out;
        for (int64_t first = 0; first < columns; first += each, to += panel) {
            for (int64_t j = 0; j < width; j += kLanes) {
                const int64_t left = columns - first - j;
                if (vectors && left >= kLanes) {
                    for (int e = 0; e < W::kElements; ++e) {
                        __builtin_prefetch(p + first + j + (kPrefetchWords * W::kElements + e) * x.k_stride);
                    }
                    store(to + j, W::along_j(p + first + j, x.k_stride, k - i, Full{}));
                } else {
                    store(to + j, W::along_j(p + first + j, x.k_stride, k - i, fits(left)), fits(width - j));
                }
            }
        }
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
