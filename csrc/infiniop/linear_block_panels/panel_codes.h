// The two kernels that every kind of panel gets of its description: dot and decode. Included only by *_cpu.cpp files.
// Codes become integers in bfloat16, exactly, that are multiplied by x in pairs, 16 rows at once; the sum of a group is
// multiplied by its scales in float. A kind is a struct with kElements of a block, kGroup, kBits, kHeaderBytes, kShifts;
// a Header, made of its bytes, with scale(group) and, if it shifts, shift(group); and table(), the codes' values.
// The order of sums: up to 16 words of a group by turns to two sums, which are added, and to those before; then group
// by group. So a row of x has the same bits in either kernel, with any other rows.
#pragma once

#include "panel_kinds.h"
#include "vec.h"
#include "weight_reading.h"

namespace infini::INFINI_LEVEL {
namespace {

#if defined(__AVX512BF16__)
#define INFINI_BF16_PANELS

using linear_block_panels::kPanel;

// Words of a group are multiplied in runs of kChainWords, by turns to kSums sums: the next run can begin while the last
// additions of this one are under way. Against groups of 64 words in one run, 2048 -> 5632 from memory on a Zen 5 core
// took with two rows of x 0.86 of the time, with four 0.90 (by hand, in turns).
constexpr int kSums = 2;
constexpr int kChainWords = 16;

// How far ahead a panel is prefetched for kM rows of x; 0: not at all. For one or two rows the bandwidth is the limit, and
// the hardware's prefetcher alone is faster. GB/s of 2048 -> 11264 from memory in large pages on a Zen 4 core that sums
// floats at 31, 4 and 8 rows, ahead by 0, 2048 and 4096 bytes: q4_0 9.7 and 5.4, 9.7 and 5.3, 12.7 and 6.2; q4_k 8.7 and
// 5.3, 11.5 and 6.4, 11.4 and 6.2; q8_0 11.8 and 7.5, 14.7 and 10.5, 14.9 and 10.1. But a Zen 5 core that sums at 42,
// 2048 -> 5632, one and four rows, ahead by 0 (one row), 4096 and 10240 bytes: q4_0 34.8, 40.7 and 24.6, 50.7 and 27.2;
// q4_k 14.1, 32.9 and 22.0, 45.0 and 24.2; q6_k 12.5, 33.2 and 24.3, 44.9 and 30.3; q8_0 33.7, 36.8 and 27.4, 44.0 and
// 34.0; eight rows are as fast by 4096 (by hand).
template <int kM, bool kZen5> constexpr int kAheadBytes = kZen5 && kM <= 4 ? 10240 : kM > 2 ? 4096 : 0;

inline VecF halves_at(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

inline VecF multiply_words(__m512i words, uint32_t x, VecF sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
}

inline __m512i line_at(const uint8_t *p) {
    return _mm512_loadu_si512(p);
}

// Codes<bits>::pass(lines, table, sink) calls sink(i, words) for the kRunWords words of each row in a run of columns.
template <int kBits> struct Codes;

// 16 values, in bfloat16, for any index whose lower four bits are the code, or of fewer bits if they are repeated.
struct Table16 {
    __m512i values;
    explicit Table16(VecF of) : values(_mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(of))) {}
    INFINI_ALWAYS_INLINE __m512i operator[](__m512i index) const { return _mm512_permutexvar_epi16(index, values); }
};

inline Table16 table_of(const int (&levels)[16]) {
    VecF values{};
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        values[i] = static_cast<float>(levels[i]);
    }
    return Table16(values);
}
// Of IQ4_NL and IQ4_XS, and twice that of FP4.
inline Table16 iq4_table() {
    return table_of(linear_blocks::kIq4Levels);
}
inline Table16 fp4_table() {
    return table_of(linear_blocks::kFp4Levels);
}

struct Table32 {
    __m512i values;
    Table32(VecF first, VecF last) : values((__m512i)_mm512_cvtne2ps_pbh(last, first)) {}
    INFINI_ALWAYS_INLINE __m512i operator[](__m512i index) const { return _mm512_permutexvar_epi16(index, values); }
};

struct Table64 {
    __m512i lower, upper;
    Table64(VecF a, VecF b, VecF c, VecF d)
        : lower((__m512i)_mm512_cvtne2ps_pbh(b, a)), upper((__m512i)_mm512_cvtne2ps_pbh(d, c)) {}
    INFINI_ALWAYS_INLINE __m512i operator[](__m512i index) const {
        return _mm512_permutex2var_epi16(lower, index, upper);
    }
};

template <> struct Codes<2> {
    static constexpr int kRunWords = 8, kRunBytes = 64;
    template <typename Table, typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Table &table, const Sink &sink) {
        __m512i line = line_at(lines);
        keep_in_register(line);
        sink(0, table[line]);
#pragma GCC unroll 7
        for (int word = 1; word < 8; ++word) {
            sink(word, table[_mm512_srli_epi16(line, 2 * word)]);
        }
    }
};

template <> struct Codes<3> {
    static constexpr int kRunWords = 16, kRunBytes = 192;
    template <typename Table, typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Table &table, const Sink &sink) {
        const __m512i three = _mm512_set1_epi16(3), third = line_at(lines + 128);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            __m512i line = line_at(lines + 64 * i);
            keep_in_register(line);
#pragma GCC unroll 8
            for (int t = 0; t < 8; ++t) {
                const int word = 8 * i + t;
                const __m512i upper =
                    word < 2 ? _mm512_slli_epi16(third, 2 - word) : _mm512_srli_epi16(third, word - 2);
                const __m512i codes = _mm512_srli_epi16(line, 2 * t);
                // The bits of the code in `three`, the other of `upper`; the lookup ignores those above.
                sink(word, table[_mm512_ternarylogic_epi32(three, codes, upper, 0xca)]);
            }
        }
    }
};

template <> struct Codes<4> {
    static constexpr int kRunWords = 4, kRunBytes = 64;
    template <typename Table, typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Table &table, const Sink &sink) {
        __m512i line = line_at(lines);
        keep_in_register(line);
        sink(0, table[line]);
        sink(1, table[_mm512_srli_epi16(line, 4)]);
        sink(2, table[_mm512_srli_epi16(line, 8)]);
        sink(3, table[_mm512_srli_epi16(line, 12)]);
    }
};

template <> struct Codes<5> {
    static constexpr int kRunWords = 16, kRunBytes = 320;
    template <typename Table, typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Table &table, const Sink &sink) {
        const __m512i nibble = _mm512_set1_epi16(15), fifth = line_at(lines + 256);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            __m512i line = line_at(lines + 64 * i);
            keep_in_register(line);
            const __m512i codes[4] = {line, _mm512_srli_epi16(line, 4), _mm512_srli_epi16(line, 8),
                                      _mm512_srli_epi16(line, 12)};
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) {
                const int word = 4 * i + t;
                const __m512i upper =
                    word < 4 ? _mm512_slli_epi16(fifth, 4 - word) : _mm512_srli_epi16(fifth, word - 4);
                // The bits of the code in `nibble`, the other of `upper`; the lookup ignores those above.
                sink(word, table[_mm512_ternarylogic_epi32(nibble, codes[t], upper, 0xca)]);
            }
        }
    }
};

template <> struct Codes<6> {
    static constexpr int kRunWords = 8, kRunBytes = 192;
    template <typename Table, typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Table &table, const Sink &sink) {
        const __m512i nibble = _mm512_set1_epi16(15), two = line_at(lines + 128);
        const __m512i upper[8] = {_mm512_slli_epi16(two, 4), _mm512_slli_epi16(two, 2), two,
                                  _mm512_srli_epi16(two, 2), _mm512_srli_epi16(two, 4), _mm512_srli_epi16(two, 6),
                                  _mm512_srli_epi16(two, 8), _mm512_srli_epi16(two, 10)};
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            __m512i line = line_at(lines + 64 * i);
            keep_in_register(line);
            const __m512i codes[4] = {line, _mm512_srli_epi16(line, 4), _mm512_srli_epi16(line, 8),
                                      _mm512_srli_epi16(line, 12)};
#pragma GCC unroll 4
            for (int t = 0; t < 4; ++t) {
                sink(4 * i + t, table[_mm512_ternarylogic_epi32(nibble, codes[t], upper[4 * i + t], 0xca)]);
            }
        }
    }
};

// Signed bytes: a float of each has bfloat16 in its upper half.
struct NoTable {};
template <> struct Codes<8> {
    static constexpr int kRunWords = 2, kRunBytes = 64;
    template <typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const NoTable &, const Sink &sink) {
        const auto value = [&](int column) __attribute__((always_inline)) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(lines + kPanel * column));
            return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        };
        const auto pair = [](__m512i first, __m512i second) __attribute__((always_inline)) {
            return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), _mm512_srli_epi32(first, 16), second, 0xca);
        };
        sink(0, pair(value(0), value(1)));
        sink(1, pair(value(2), value(3)));
    }
};

// For each group of some blocks, from the begin of a unit, calls word(first, i, words) for its words, the i-th of the
// chain that begins with word `first`; sum() after each chain, where there are several; and then end(scale, shift).
// kAhead: bytes to the lines that are prefetched; kRolled: groups are a loop, with their scales in memory.
template <typename K, int kAhead, bool kRolled, typename Word, typename Sum, typename End>
INFINI_ALWAYS_INLINE void each_block(const uint8_t *panel, int64_t blocks, const Word &word, const Sum &sum,
                                     const End &end) {
    using C = Codes<K::kBits>;
    constexpr int kGroups = K::kElements / K::kGroup, kWords = K::kGroup / 2;
    constexpr int kChain = kWords < kChainWords ? kWords : kChainWords;
    static_assert(kWords % kChain == 0);
    constexpr int kPassWords = kWords > C::kRunWords ? kWords : C::kRunWords, kPassGroups = kPassWords / kWords;
    constexpr int kHeaders = K::kHeaderBytes, kUnitBlocks = linear_block_panels::unit_blocks(kHeaders);
    const auto table = K::table();
    const uint8_t *lines = panel;
    for (int64_t first = 0; first < blocks; first += kUnitBlocks) {
        const int64_t count = blocks - first < kUnitBlocks ? blocks - first : kUnitBlocks;
        const uint8_t *header_bytes = lines;
#pragma GCC unroll 5
        for (int byte = 0; kAhead > 0 && byte < kUnitBlocks * kHeaders; byte += 64) {
            __builtin_prefetch(lines + kAhead + byte);
        }
        lines += count * K::kHeaderBytes;
        for (int64_t block = 0; block < count; ++block) {
            const typename K::Header header(header_bytes);
            header_bytes += K::kHeaderBytes;
            const auto pass_run = [&](const auto &sink) __attribute__((always_inline)) {
#pragma GCC unroll 5
                for (int byte = 0; kAhead > 0 && byte < C::kRunBytes; byte += 64) {
                    __builtin_prefetch(lines + kAhead + byte);
                }
                C::pass(lines, table, sink);
                lines += C::kRunBytes;
            };
            // The words of a group, or of the groups whose codes lie together, and ended(g) after each of them.
            const auto pass_groups = [&](int g, const auto &ended) __attribute__((always_inline)) {
                if constexpr (kPassGroups == 1) {
#pragma GCC unroll 1
                    for (int chain = 0; chain < kWords; chain += kChain) {
#pragma GCC unroll 8
                        for (int run = 0; run < kChain; run += C::kRunWords) {
                            pass_run([&](int i, __m512i words)
                                         __attribute__((always_inline)) { word(chain, run + i, words); });
                        }
                        if constexpr (kChain < kWords) {
                            sum();
                        }
                    }
                    ended(g);
                } else {
                    pass_run([&](int i, __m512i words) __attribute__((always_inline)) {
                        word(0, i % kWords, words);
                        if (i % kWords == kWords - 1) {
                            ended(g + i / kWords);
                        }
                    });
                }
            };
            if constexpr (kRolled && kGroups > 1) {
                VecF scales[kGroups], shifts[K::kShifts ? kGroups : 1];
#pragma GCC unroll 16
                for (int g = 0; g < kGroups; ++g) {
                    scales[g] = header.scale(g);
                    if constexpr (K::kShifts) {
                        shifts[g] = header.shift(g);
                    }
                }
#pragma GCC unroll 1
                for (int g = 0; g < kGroups; g += kPassGroups) {
                    pass_groups(g, [&](int of) __attribute__((always_inline)) {
                        end(scales[of], shifts[K::kShifts ? of : 0]);
                    });
                }
            } else {
#pragma GCC unroll 16
                for (int g = 0; g < kGroups; g += kPassGroups) {
                    pass_groups(g, [&](int of) __attribute__((always_inline)) {
                        if constexpr (K::kShifts) {
                            end(header.scale(of), header.shift(of));
                        } else {
                            end(header.scale(of), VecF{});
                        }
                    });
                }
            }
        }
    }
}

template <typename K, int kM, bool kZen5>
__attribute__((noinline)) void dot_panel(const linear_block_panels::DotArgs &a) {
    constexpr int kWords = K::kGroup / 2;
    constexpr bool kTotalsInRegisters = kM <= 4; // otherwise the group's sums need them
    const uint32_t *x = a.x;
    const linear_block_panels::Numbers *numbers = a.numbers;
    constexpr bool kChains = kWords > kChainWords;
    VecF total[kTotalsInRegisters ? kM : 1], part[kM][kSums] = {}, group[kChains ? kM : 1] = {};
    if constexpr (kTotalsInRegisters) {
        for (int m = 0; m < kM; ++m) {
            total[m] = VecF{};
        }
    } else {
        std::memset(a.y, 0, kM * kPanel * sizeof(float));
    }
    each_block<K, kAheadBytes<kM, kZen5>, (kZen5 || kM > 2)>(
        a.panel, a.blocks,
        [&](int first, int word, __m512i words) __attribute__((always_inline)) {
            keep_in_register(words);
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                VecF &sum = part[m][word % kSums];
                sum = multiply_words(words, x[(first + word) * kM + m], sum);
            }
        },
        [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                group[kChains ? m : 0] += part[m][0] + part[m][1];
                part[m][0] = part[m][1] = VecF{};
            }
        },
        [&](VecF scale, VecF shift) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                float *const y = a.y + m * kPanel;
                VecF &own = total[kTotalsInRegisters ? m : 0];
                VecF &of_group = group[kChains ? m : 0];
                own = fma(kChains ? of_group : part[m][0] + part[m][1], scale, kTotalsInRegisters ? own : load(y));
                if constexpr (K::kShifts) {
                    own = fma(splat(numbers[m].sum), shift, own);
                }
                if constexpr (!kTotalsInRegisters) {
                    store(y, own);
                }
                of_group = part[m][0] = part[m][1] = VecF{};
            }
            x += kWords * kM;
            numbers += kM;
        });
    if constexpr (kTotalsInRegisters) {
        for (int m = 0; m < kM; ++m) {
            store(a.y + m * kPanel, total[m]);
        }
    }
}

template <typename K, bool kZen5> void dot_rows(const linear_block_panels::DotArgs &args) {
    switch (args.m) {
    case 1:
        return dot_panel<K, 1, kZen5>(args);
    case 2:
        return dot_panel<K, 2, kZen5>(args);
    default:
        return dot_panel<K, 4, kZen5>(args);
    }
}

template <typename K> void dot_panel(const linear_block_panels::DotArgs &args) {
    if (args.m == 8) {
        dot_panel<K, 8, false>(args);
    } else if (is_zen5()) {
        dot_rows<K, true>(args);
    } else {
        dot_rows<K, false>(args);
    }
}

template <typename K> void decode_panel(const linear_block_panels::DecodeArgs &a) {
    uint32_t *words_at = a.words;
    float *scales = a.scales, *shifts = a.shifts;
    each_block<K, 0, true>(
        a.panel, a.blocks,
        [&](int first, int word, __m512i words)
            __attribute__((always_inline)) { _mm512_storeu_si512(words_at + (first + word) * kPanel, words); },
        [] {},
        [&](VecF scale, VecF shift) __attribute__((always_inline)) {
            words_at += K::kGroup / 2 * kPanel;
            store(scales, scale);
            scales += kPanel;
            if constexpr (K::kShifts) {
                store(shifts, shift);
                shifts += kPanel;
            }
        });
}

inline VecF counted_from(float first) {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) + splat(first);
}

#endif

} // namespace
} // namespace infini::INFINI_LEVEL
