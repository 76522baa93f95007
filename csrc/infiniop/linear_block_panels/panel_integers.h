// The two kernels that every kind of panel gets of its description on AVX2: dot and decode. Codes are integers of 16
// bits, and x is one too, with a scale for each group of columns, a power of two: so elements of a bfloat16 x are exact
// but for those below 2^-7 of their group's largest, off by at most 2^-15 of it. Sums of a group are exact in int32
// in any order, and are multiplied by the scales in float, group by group: a row of x has the same bits in either kernel.
// A kind is a struct with kElements of a block, kGroup, kBits, kHeaderBytes, kShifts, kOffset, which is subtracted from
// its codes; a Header, made of its bytes, with scale(group, half) and, if it shifts, shift(group, half), of eight rows;
// and value(), of 16 codes. Included only by *_cpu.cpp files.
#pragma once

#include "panel_kinds.h"
#include "vec.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define INFINI_INTEGER_PANELS
#endif

namespace infini::INFINI_LEVEL {
namespace {

#if defined(INFINI_INTEGER_PANELS)

using linear_block_panels::kPanel;
using linear_block_panels::Numbers;

inline __m256i half_line_at(const uint8_t *p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}

inline VecF halves_at(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

// Codes<bits>::pass(lines, sink) calls sink(i, first, second) for the words of a run of columns: of rows 0 to 7, and of
// rows 8 to 15, two codes each.
template <int kBits> struct Codes;

template <> struct Codes<4> {
    static constexpr int kRunWords = 4, kRunBytes = 64;
    template <typename Sink> INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Sink &sink) {
        const __m256i nibble = _mm256_set1_epi16(15);
        __m256i a = half_line_at(lines), b = half_line_at(lines + 32);
        sink(0, _mm256_and_si256(a, nibble), _mm256_and_si256(b, nibble));
        sink(1, _mm256_and_si256(_mm256_srli_epi16(a, 4), nibble), _mm256_and_si256(_mm256_srli_epi16(b, 4), nibble));
        sink(2, _mm256_and_si256(_mm256_srli_epi16(a, 8), nibble), _mm256_and_si256(_mm256_srli_epi16(b, 8), nibble));
        sink(3, _mm256_srli_epi16(a, 12), _mm256_srli_epi16(b, 12));
    }
};

// `shift` places to the right, or to the left if it is negative.
template <int kShift> INFINI_ALWAYS_INLINE __m256i moved(__m256i x) {
    if constexpr (kShift < 0) {
        return _mm256_slli_epi16(x, -kShift);
    } else {
        return _mm256_srli_epi16(x, kShift);
    }
}

// The lower four bits of codes as of 4 bits, then a line with kUpper more bits of each.
template <int kUpper> struct CodesWithUpper {
    static constexpr int kLines = 4 / kUpper, kRunWords = 4 * kLines, kRunBytes = 64 * (kLines + 1);

    template <int kWord> INFINI_ALWAYS_INLINE static __m256i code(const uint8_t *lines, __m256i upper) {
        const __m256i mask = _mm256_set1_epi16(((1 << kUpper) - 1) << 4), line = half_line_at(lines + kWord / 4 * 64);
        const __m256i low = _mm256_and_si256(moved<kWord % 4 * 4>(line), _mm256_set1_epi16(15));
        return _mm256_or_si256(low, _mm256_and_si256(moved<kWord * kUpper - 4>(upper), mask));
    }
    template <int... kWord, typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Sink &sink,
                                          std::integer_sequence<int, kWord...>) {
        const __m256i a = half_line_at(lines + 64 * kLines), b = half_line_at(lines + 64 * kLines + 32);
        (sink(kWord, code<kWord>(lines, a), code<kWord>(lines + 32, b)), ...);
    }
    template <typename Sink> INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Sink &sink) {
        pass(lines, sink, std::make_integer_sequence<int, kRunWords>{});
    }
};
template <> struct Codes<5> : CodesWithUpper<1> {};
template <> struct Codes<6> : CodesWithUpper<2> {};

// Signed bytes.
template <> struct Codes<8> {
    static constexpr int kRunWords = 2, kRunBytes = 64;
    template <typename Sink> INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Sink &sink) {
        const auto column = [&](int i) __attribute__((always_inline)) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i *>(lines + 16 * i));
        };
#pragma GCC unroll 2
        for (int word = 0; word < 2; ++word) {
            const __m128i a = column(2 * word), b = column(2 * word + 1);
            sink(word, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)));
        }
    }
};

// How far ahead a panel is prefetched where it is multiplied as it is decoded. One row of x on a Zen 3 core, 2048 ->
// 5632 from memory, against none: 1024 bytes ahead 1.1 to 1.3 times as fast, 3072 and 6144 1.3 to 1.45, 10240 1.2 to 1.7
// but four rows slower (by hand, in turns).
constexpr int kAheadOfDots = 6144;

// For each group of some blocks, from the begin of a unit, calls word(i, first, second) for its words, then
// end(header, group). kAhead: bytes to the lines that are prefetched; 0: none.
template <typename K, int kAhead, typename Word, typename End>
INFINI_ALWAYS_INLINE void each_block(const uint8_t *panel, int64_t blocks, const Word &word, const End &end) {
    using C = Codes<K::kBits>;
    constexpr int kUnitBlocks = linear_block_panels::unit_blocks(K::kHeaderBytes);
    const uint8_t *lines = panel;
    for (int64_t first = 0; first < blocks; first += kUnitBlocks) {
        const int64_t count = blocks - first < kUnitBlocks ? blocks - first : kUnitBlocks;
        const uint8_t *header_bytes = lines;
#pragma GCC unroll 5
        for (int byte = 0; kAhead > 0 && byte < kUnitBlocks * K::kHeaderBytes; byte += 64) {
            __builtin_prefetch(lines + kAhead + byte);
        }
        lines += count * K::kHeaderBytes;
        for (int64_t block = 0; block < count; ++block, header_bytes += K::kHeaderBytes) {
            const typename K::Header header(header_bytes);
#pragma GCC unroll 1
            for (int g = 0; g < K::kElements / K::kGroup; ++g) {
#pragma GCC unroll 4
                for (int i = 0; i < K::kGroup / 2; i += C::kRunWords, lines += C::kRunBytes) {
#pragma GCC unroll 5
                    for (int byte = 0; kAhead > 0 && byte < C::kRunBytes; byte += 64) {
                        __builtin_prefetch(lines + kAhead + byte);
                    }
                    C::pass(lines, [&](int j, __m256i a, __m256i b)
                                       __attribute__((always_inline)) { word(i + j, K::value(a), K::value(b)); });
                }
                end(header, g);
            }
        }
    }
}

// Adds the products of codes and two elements of x in each lane.
INFINI_ALWAYS_INLINE void add_products(VecI &sum, __m256i codes, uint32_t x) {
    sum += (VecI)_mm256_madd_epi16(codes, _mm256_set1_epi32(static_cast<int>(x)));
    keep_in_register(sum); // GCC would add all products of a group at its end, and spill them until then
}

// total + sum * scale * that of x, and where there are shifts + shift * the sum of x.
template <bool kShifts> INFINI_ALWAYS_INLINE VecF add_group(VecF total, VecI sum, VecF scale, VecF shift, Numbers x) {
    total = fma(__builtin_convertvector(sum, VecF) * scale, splat(x.scale), total);
    return kShifts ? fma(splat(x.sum), shift, total) : total;
}

template <typename K, int kM> __attribute__((noinline)) void dot_panel(const linear_block_panels::DotArgs &a) {
    const uint32_t *x = a.x;
    const Numbers *numbers = a.numbers;
    VecI sums[kM][2] = {};
    std::memset(a.y, 0, kM * kPanel * sizeof(float));
    each_block<K, kAheadOfDots>(
        a.panel, a.blocks,
        [&](int word, __m256i first, __m256i second) __attribute__((always_inline)) {
            keep_in_register(first);
            keep_in_register(second);
#pragma GCC unroll 4
            for (int m = 0; m < kM; ++m) {
                add_products(sums[m][0], first, x[word * kM + m]);
                add_products(sums[m][1], second, x[word * kM + m]);
            }
        },
        [&](const typename K::Header &header, int g) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const VecF scale = header.scale(g, half);
                VecF shift{};
                if constexpr (K::kShifts) {
                    shift = header.shift(g, half);
                }
#pragma GCC unroll 4
                for (int m = 0; m < kM; ++m) {
                    float *const y = a.y + m * kPanel + half * kLanes;
                    const VecI sum = sums[m][half] - K::kOffset * numbers[m].whole;
                    store(y, add_group<K::kShifts>(load(y), sum, scale, shift, numbers[m]));
                    sums[m][half] = VecI{};
                }
            }
            x += K::kGroup / 2 * kM;
            numbers += kM;
        });
}

template <typename K> void dot_panel(const linear_block_panels::DotArgs &args) {
    switch (args.m) {
    case 1:
        return dot_panel<K, 1>(args);
    case 2:
        return dot_panel<K, 2>(args);
    default:
        return dot_panel<K, 4>(args);
    }
}

template <typename K> void decode_panel(const linear_block_panels::DecodeArgs &a) {
    uint32_t *words = a.words;
    float *scales = a.scales, *shifts = a.shifts;
    const __m256i offset = _mm256_set1_epi16(K::kOffset);
    each_block<K, 0>(
        a.panel, a.blocks,
        [&](int, __m256i first, __m256i second) __attribute__((always_inline)) {
            auto *to = reinterpret_cast<__m256i *>(words);
            _mm256_storeu_si256(to, _mm256_sub_epi16(first, offset));
            _mm256_storeu_si256(to + 1, _mm256_sub_epi16(second, offset));
            words += kPanel;
        },
        [&](const typename K::Header &header, int g) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, scales += kLanes, shifts += kLanes) {
                store(scales, header.scale(g, half));
                if constexpr (K::kShifts) {
                    store(shifts, header.shift(g, half));
                }
            }
        });
}

#endif

} // namespace
} // namespace infini::INFINI_LEVEL
