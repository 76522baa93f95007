// The two kernels that every kind of panel gets of its description: dot and decode. Codes are integers of 16 bits, and x
// is one too, with a scale for each group of columns, a power of two: so elements of a bfloat16 x are exact but for those
// below 2^-7 of their group's largest, off by at most 2^-15 of it. Sums of a group are exact in int32 in any order, and
// are multiplied by the scales in float, group by group: a row of x has the same bits in either kernel.
// A kind is a struct with kElements of a block, kGroup, kBits, kHeaderBytes, kShifts, kOffset, which is subtracted from
// its codes; a Header, made of its bytes, with scale(group, part) and, if it shifts, shift(group, part), of the kLanes
// rows of a part of the panel; and value(), of two codes of as many rows. Included only by *_cpu.cpp files.
#pragma once

#include "panel_kinds.h"
#include "vec.h"

#if defined(__AVX2__) && !defined(INFINI_BF16_PANELS)
#define INFINI_INTEGER_PANELS
#endif

namespace infini::INFINI_LEVEL {
namespace {

#if defined(INFINI_INTEGER_PANELS)

using linear_block_panels::kPanel;
using linear_block_panels::Numbers;

constexpr int kParts = kPanel / kLanes; // of a panel: rows that share a register
typedef uint16_t VecS __attribute__((vector_size(kLanes * 4)));

// A part of a line: two codes, or more, of each row.
inline VecS part_at(const uint8_t *line, int part) {
    VecS words;
    std::memcpy(&words, line + part * static_cast<int>(sizeof words), sizeof words);
    return words;
}

inline VecF halves_at(const uint8_t *p, int part) {
    return load(reinterpret_cast<const f16 *>(p) + part * kLanes);
}

inline VecU bytes_at(const uint8_t *p, int part) {
    const uint8_t *const bytes = p + part * kLanes;
#if defined(__AVX512F__)
    return (VecU)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
#else
    return (VecU)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes)));
#endif
}

inline VecF floats_of(VecU integers) {
    return __builtin_convertvector((VecI)integers, VecF);
}

// Looks bytes up; those of the upper halves must be 0 or have their highest bit set.
INFINI_ALWAYS_INLINE VecS values_of(VecS code, __m128i table) {
#if defined(__AVX512F__)
    return (VecS)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)code);
#else
    return (VecS)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)code);
#endif
}

// Levels, and what makes the least of them 0, so that they are bytes without a sign.
struct LevelsFrom0 {
    uint8_t of[16];
};
constexpr LevelsFrom0 from_0(const int (&levels)[16], int added) {
    LevelsFrom0 found{};
    for (int i = 0; i < 16; ++i) {
        found.of[i] = static_cast<uint8_t>(levels[i] + added);
    }
    return found;
}
constexpr LevelsFrom0 kIq4From0 = from_0(linear_blocks::kIq4Levels, 127);
constexpr LevelsFrom0 kFp4From0 = from_0(linear_blocks::kFp4Levels, 12);

// The levels of two codes and 127, which is 0 for code 0 of the upper halves.
INFINI_ALWAYS_INLINE VecS iq4_value(VecS code) {
    return values_of(code, _mm_loadu_si128(reinterpret_cast<const __m128i *>(kIq4From0.of)));
}
// Twice the values and 12.
INFINI_ALWAYS_INLINE VecS fp4_value(VecS code) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i *>(kFp4From0.of));
    return values_of(code | static_cast<uint16_t>(0x8000), table);
}

// Two codes of each of the panel's rows.
struct Words {
    VecS part[kParts];
};

template <typename Make> INFINI_ALWAYS_INLINE Words words_of(const Make &make) {
    Words words;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
        words.part[part] = make(part);
    }
    return words;
}

// Codes<bits>::pass(lines, sink) calls sink(i, words) for the words of a run of columns.
template <int kBits> struct Codes;

template <int kBits> struct CodesOfLine {
    static constexpr int kRunWords = 16 / kBits, kRunBytes = 64;
    static constexpr uint16_t kMask = (1 << kBits) - 1;
    template <typename Sink> INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Sink &sink) {
        VecS line[kParts];
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            line[part] = part_at(lines, part);
            keep_in_register(line[part]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kRunWords - 1; ++i) {
            sink(i, words_of([&](int part) { return line[part] >> (kBits * i) & kMask; }));
        }
        sink(kRunWords - 1, words_of([&](int part) { return line[part] >> (16 - kBits); }));
    }
};
template <> struct Codes<2> : CodesOfLine<2> {};
template <> struct Codes<4> : CodesOfLine<4> {};

// Lines with the lower bits of codes, then one with kUpper more bits of each.
template <int kLower, int kUpper> struct CodesWithUpper {
    static constexpr int kLines = kLower / kUpper, kLineWords = 16 / kLower;
    static constexpr int kRunWords = kLineWords * kLines, kRunBytes = 64 * (kLines + 1);

    template <int kWord> INFINI_ALWAYS_INLINE static VecS code(VecS lower, VecS upper) {
        constexpr int kShift = kWord * kUpper - kLower;
        constexpr uint16_t kLowerMask = (1 << kLower) - 1, kMask = ((1 << kUpper) - 1) << kLower;
        VecS moved = upper;
        if constexpr (kShift < 0) {
            moved = upper << -kShift;
        } else if constexpr (kShift > 0) {
            moved = upper >> kShift;
        }
        return (lower >> (kWord % kLineWords * kLower) & kLowerMask) | (moved & kMask);
    }
    template <int... kWord, typename Sink>
    INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Sink &sink,
                                          std::integer_sequence<int, kWord...>) {
        const Words upper = words_of([&](int part) { return part_at(lines + 64 * kLines, part); });
        (sink(kWord, words_of([&](int part) {
                  return code<kWord>(part_at(lines + kWord / kLineWords * 64, part), upper.part[part]);
              })),
         ...);
    }
    template <typename Sink> INFINI_ALWAYS_INLINE static void pass(const uint8_t *lines, const Sink &sink) {
        pass(lines, sink, std::make_integer_sequence<int, kRunWords>{});
    }
};
template <> struct Codes<3> : CodesWithUpper<2, 1> {};
template <> struct Codes<5> : CodesWithUpper<4, 1> {};
template <> struct Codes<6> : CodesWithUpper<4, 2> {};

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
            const __m128i low = _mm_unpacklo_epi8(a, b), high = _mm_unpackhi_epi8(a, b);
#if defined(__AVX512F__)
            sink(word, Words{{(VecS)_mm512_cvtepi8_epi16(_mm256_set_m128i(high, low)) }});
#else
            sink(word, Words{{(VecS)_mm256_cvtepi8_epi16(low), (VecS)_mm256_cvtepi8_epi16(high) }});
#endif
        }
    }
};

// How far ahead a panel is prefetched where it is multiplied as it is decoded. One row of x on a Zen 3 core, 2048 ->
// 5632 from memory, against none: 1024 bytes ahead 1.1 to 1.3 times as fast, 3072 and 6144 1.3 to 1.45, 10240 1.2 to 1.7
// but four rows slower (by hand, in turns).
constexpr int kAheadOfDots = 6144;

// For each group of some blocks, from the begin of a unit, calls word(i, words) for its words, then end(header, group).
// kAhead: bytes to the lines that are prefetched; 0: none.
template <typename K, int kAhead, typename Word, typename End>
INFINI_ALWAYS_INLINE void each_block(const uint8_t *panel, int64_t blocks, const Word &word, const End &end) {
    using C = Codes<K::kBits>;
    constexpr int kUnitBlocks = linear_block_panels::unit_blocks(K::kHeaderBytes), kWords = K::kGroup / 2;
    constexpr int kPassWords = kWords > C::kRunWords ? kWords : C::kRunWords, kPassGroups = kPassWords / kWords;
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
            for (int g = 0; g < K::kElements / K::kGroup; g += kPassGroups) {
#pragma GCC unroll 4
                for (int i = 0; i < kPassWords; i += C::kRunWords, lines += C::kRunBytes) {
#pragma GCC unroll 5
                    for (int byte = 0; kAhead > 0 && byte < C::kRunBytes; byte += 64) {
                        __builtin_prefetch(lines + kAhead + byte);
                    }
                    C::pass(lines, [&](int j, const Words &words) __attribute__((always_inline)) {
                        word((i + j) % kWords, words_of([&](int part) { return K::value(words.part[part]); }));
                        if ((i + j) % kWords == kWords - 1) {
                            end(header, g + (i + j) / kWords);
                        }
                    });
                }
            }
        }
    }
}

// Adds the products of codes and two elements of x in each lane.
INFINI_ALWAYS_INLINE void add_products(VecI &sum, VecS codes, uint32_t x) {
#if defined(__AVX512VNNI__)
    sum = (VecI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(static_cast<int>(x)));
#elif defined(__AVX512F__)
    sum += (VecI)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(static_cast<int>(x)));
#else
    sum += (VecI)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(static_cast<int>(x)));
#endif
    keep_in_register(sum); // GCC would add all products of a group at its end, and spill them until then
}

// total + sum * scale * that of x, and where there are shifts + shift * the sum of x.
template <bool kShifts> INFINI_ALWAYS_INLINE VecF add_group(VecF total, VecI sum, VecF scale, VecF shift, Numbers x) {
    total = fma(__builtin_convertvector(sum, VecF) * scale, splat(x.scale), total);
    return kShifts ? fma(splat(x.sum), shift, total) : total;
}

template <typename K, int kM> __attribute__((noinline)) void dot_panel(const linear_block_panels::DotArgs &a) {
    // Sums of a group that are added at its end: so many chains of products can be under way.
    constexpr int kSums = kParts > 1 ? 1 : kM == 1 ? 4 : kM <= 4 ? 2 : 1;
    const uint32_t *x = a.x;
    const Numbers *numbers = a.numbers;
    VecI sums[kM][kParts][kSums] = {};
    std::memset(a.y, 0, kM * kPanel * sizeof(float));
    each_block<K, kAheadOfDots>(
        a.panel, a.blocks,
        [&](int word, Words words) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                keep_in_register(words.part[part]);
            }
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
                for (int part = 0; part < kParts; ++part) {
                    add_products(sums[m][part][word % kSums], words.part[part], x[word * kM + m]);
                }
            }
        },
        [&](const typename K::Header &header, int g) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                const VecF scale = header.scale(g, part);
                VecF shift{};
                if constexpr (K::kShifts) {
                    shift = header.shift(g, part);
                }
#pragma GCC unroll 8
                for (int m = 0; m < kM; ++m) {
                    float *const y = a.y + m * kPanel + part * kLanes;
                    VecI sum = sums[m][part][0];
#pragma GCC unroll 4
                    for (int s = 1; s < kSums; ++s) {
                        sum += sums[m][part][s];
                    }
                    sum -= K::kOffset * numbers[m].whole;
                    store(y, add_group<K::kShifts>(load(y), sum, scale, shift, numbers[m]));
#pragma GCC unroll 4
                    for (int s = 0; s < kSums; ++s) {
                        sums[m][part][s] = VecI{};
                    }
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
    case 4:
        return dot_panel<K, 4>(args);
    default:
        return dot_panel<K, (kParts > 1 ? 4 : 8)>(args); // 8 rows come only where a part is the panel
    }
}

template <typename K> void decode_panel(const linear_block_panels::DecodeArgs &a) {
    uint32_t *words_at = a.words;
    float *scales = a.scales, *shifts = a.shifts;
    each_block<K, 0>(
        a.panel, a.blocks,
        [&](int, const Words &words) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part, words_at += kLanes) {
                const VecS codes = words.part[part] - static_cast<uint16_t>(K::kOffset);
                std::memcpy(words_at, &codes, sizeof codes);
            }
        },
        [&](const typename K::Header &header, int g) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part, scales += kLanes, shifts += kLanes) {
                store(scales, header.scale(g, part));
                if constexpr (K::kShifts) {
                    store(shifts, header.shift(g, part));
                }
            }
        });
}

#endif

} // namespace
} // namespace infini::INFINI_LEVEL
