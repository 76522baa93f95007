// The CPU kernel of linear_block_panels, where bfloat16 is multiplied in pairs, or as integers from AVX2 on. A few rows of
// x are multiplied while a panel is decoded, in parts of 8 (with AVX-512), 4, 2 and 1, of which later ones find it in L2;
// for more rows a stretch of a panel is decoded in L1 and multiplied by tiles of rows.
// Limit: memory bandwidth of the blocks for few rows of x, the multiply-add units beyond.
#include "linear_block_panels.h"

#include "bias.h"
#include "panel_kernels.h"
#include "parallel.h"
#include "row_iterator.h"
#include "scratch.h"

#if defined(INFINI_BF16_PANELS) || defined(INFINI_INTEGER_PANELS)

namespace infini::INFINI_LEVEL {
namespace {

using linear_block_panels::Args;
using linear_block_panels::Numbers;
using linear_block_panels::PanelKind;

// kDotRows: rows that are multiplied while a panel is decoded; up to kFewRows rows in tiles of these, for which a panel is
// decoded again. That takes, of the time of decoding a stretch first, with AVX2 and 8 and 12 rows 0.86 (q4_k) to 0.7
// (q8_0) on a Zen 3 core, with AVX-512 BF16 and 12, 16 and 32 rows 0.54, 0.61, 0.84 (q4_k) to 0.66, 0.70, 0.88 (q8_0) on
// a Zen 5 core (by hand, in turns). A tile of a decoded stretch has kTileRows.
constexpr int kTileRows = kManyRegisters ? 8 : 6, kDotRows = kManyRegisters ? 8 : 4;
constexpr int kFewRows = kManyRegisters ? 32 : 12;
#if defined(INFINI_INTEGER_PANELS)
constexpr bool kIntegers = true;
#else
constexpr bool kIntegers = false;
#endif
constexpr int64_t kStretch = 512;  // columns decoded at a time, 16 KiB: a multiple of every block's elements
constexpr int64_t kPassRows = 256; // rows of x that share a pass over the weight
constexpr int64_t kGroupLeast = 16, kGroupMost = 128; // columns of the smallest and the largest group

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Rows of x in tiles: split evenly, or if there are few into whole tiles and powers of two. The rows of a tile are
// interleaved word by word, and so are the numbers of its groups.
struct Pass {
    int64_t rows = 0, k = 0, group = 1;
    int64_t words = k / 2, groups = k / group;
    bool few = rows <= kFewRows;
    int64_t tiles = few ? rows / kDotRows + __builtin_popcountll(static_cast<uint64_t>(rows % kDotRows))
                        : ceil_div(rows, kTileRows);
    int64_t row(int64_t tile) const {
        if (!few) {
            return rows * tile / tiles;
        }
        const int64_t whole = rows / kDotRows;
        if (tile <= whole) {
            return tile * kDotRows;
        }
        int64_t left = rows % kDotRows;
        for (tile -= whole; tile > 0; --tile) {
            left &= ~(int64_t{1} << (63 - __builtin_clzll(static_cast<uint64_t>(left))));
        }
        return rows - left;
    }
    int64_t bytes() const {
        return ceil_div(rows * (words * 4 + groups * static_cast<int64_t>(sizeof(Numbers)) + kIntegers), 64) * 64;
    }
};

class PackedX {
public:
    PackedX() = default;
    PackedX(const Pass &pass, void *memory)
        : pass_(pass), words_(static_cast<uint32_t *>(memory)),
          numbers_(reinterpret_cast<Numbers *>(words_ + pass.rows * pass.words)),
          is_finite_(reinterpret_cast<bool *>(numbers_ + pass.rows * pass.groups)) {}

    const Pass &pass() const { return pass_; }
    const uint32_t *words(int64_t tile) const { return words_ + pass_.row(tile) * pass_.words; }
    const Numbers *numbers(int64_t tile) const { return numbers_ + pass_.row(tile) * pass_.groups; }
    // Of rows as integers, which neither infinity nor NaN has.
    bool is_finite(int64_t row) const { return !kIntegers || is_finite_[row]; }

    void set(int64_t tile, const bf16 *x, const int64_t *offsets) const {
        const int64_t first = pass_.row(tile), rows = pass_.row(tile + 1) - first;
        for (int64_t r = 0; r < rows; ++r) {
            const bf16 *const from = x + offsets[first + r];
            uint32_t *words = words_ + first * pass_.words + r;
            Numbers *const numbers = numbers_ + first * pass_.groups + r;
            bool is_finite = true;
            for (int64_t group = 0; group < pass_.groups; ++group) {
                const bf16 *const of_group = from + group * pass_.group;
                const void *elements = of_group;
#if defined(INFINI_INTEGER_PANELS)
                alignas(32) int16_t integers[kGroupMost];
                numbers[group * rows] = to_integers(of_group, integers);
                is_finite = is_finite && numbers[group * rows].scale > 0; // not NaN
                elements = integers;
#else
                VecF total{};
                for (int64_t i = 0; i < pass_.group; i += kLanes) {
                    total += load(of_group + i);
                }
                numbers[group * rows].sum = infini::INFINI_LEVEL::sum(total);
#endif
                for (int64_t word = 0; word < pass_.group / 2; ++word, words += rows) {
                    std::memcpy(words, static_cast<const char *>(elements) + 4 * word, sizeof(uint32_t));
                }
            }
            if (kIntegers) {
                is_finite_[first + r] = is_finite;
            }
        }
    }

private:
#if defined(INFINI_INTEGER_PANELS)
    // x = integer * scale, a power of two by which the largest has 15 bits. With infinity or NaN the scale is NaN.
    Numbers to_integers(const bf16 *x, int16_t *integers) const {
        VecI largest{};
        for (int64_t i = 0; i < pass_.group; i += kLanes) {
            const VecI size = (VecI)load(x + i) & 0x7fffffff;
            largest = size > largest ? size : largest;
        }
        int32_t bits = 0;
        for (int lane = 0; lane < kLanes; ++lane) {
            bits = largest[lane] > bits ? largest[lane] : bits;
        }
        const auto exponent = static_cast<int>(bits >> 23);
        if (exponent == 255) {
            std::memset(integers, 0, static_cast<size_t>(pass_.group) * sizeof(int16_t));
            return {0, float_of(0x7fc00000u), 0};
        }
        // x * 2 ** (14 - e), of small x in two steps, because the power may be too large for a float. The scale, its
        // inverse, may be denormal.
        const int before = exponent < 32 ? 64 : 0, by = 127 + 14 + 127 - exponent - before, of_scale = exponent - 14;
        const VecF first = splat(float_of(static_cast<uint32_t>(127 + before) << 23));
        const VecF second = splat(float_of(static_cast<uint32_t>(by) << 23));
        const float scale =
            float_of(of_scale > 0 ? static_cast<uint32_t>(of_scale) << 23 : 1u << static_cast<uint32_t>(22 + of_scale));
        VecI total{};
        for (int64_t i = 0; i < pass_.group; i += kLanes) {
#if defined(__AVX512F__)
            const VecI values = (VecI)_mm512_cvtps_epi32(load(x + i) * first * second);
            const __m256i packed = _mm512_cvtepi32_epi16((__m512i)values);
#else
            const VecI values = (VecI)_mm256_cvtps_epi32(load(x + i) * first * second);
            const __m256i twice = _mm256_packs_epi32((__m256i)values, (__m256i)values);
            const __m128i packed = _mm256_castsi256_si128(_mm256_permute4x64_epi64(twice, 0xd8));
#endif
            total += values;
            std::memcpy(integers + i, &packed, sizeof packed);
        }
        int32_t whole = 0;
        for (int lane = 0; lane < kLanes; ++lane) {
            whole += total[lane];
        }
        return {static_cast<float>(whole) * scale, scale, whole};
    }
#endif

    Pass pass_;
    uint32_t *words_ = nullptr;
    Numbers *numbers_ = nullptr;
    bool *is_finite_ = nullptr;
};

// A decoded stretch of a panel.
struct Decoded {
    alignas(64) uint32_t words[kStretch / 2 * kPanel];
    alignas(64) float scales[kStretch / kGroupLeast * kPanel], shifts[kStretch / kGroupLeast * kPanel];
};

#if defined(INFINI_INTEGER_PANELS)

// Adds the products of a stretch of `groups` groups with kM rows to y [kM][kPanel], with the bits of dot_panel.
template <int kM, bool kShifts, bool>
__attribute__((noinline)) void multiply_tile(const Decoded &decoded, int64_t groups, int64_t group_words,
                                             const uint32_t *x, const Numbers *numbers, float *y) {
    const uint32_t *words = decoded.words;
    for (int64_t g = 0; g < groups; ++g, numbers += kM) {
        VecI sums[kM][kParts] = {};
        for (int64_t word = 0; word < group_words; ++word, words += kPanel, x += kM) {
            VecS codes[kParts];
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                codes[part] = part_at(reinterpret_cast<const uint8_t *>(words), part);
                keep_in_register(codes[part]);
            }
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 2
                for (int part = 0; part < kParts; ++part) {
                    add_products(sums[m][part], codes[part], x[m]);
                }
            }
        }
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            const int64_t at = g * kPanel + part * kLanes;
            const VecF scale = load(decoded.scales + at), shift = kShifts ? load(decoded.shifts + at) : VecF{};
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                float *const to = y + m * kPanel + part * kLanes;
                store(to, add_group<kShifts>(load(to), sums[m][part], scale, shift, numbers[m]));
            }
        }
    }
}

// y [kPanel] of a stretch and a row that has infinity or NaN, which becomes that of y element by element.
void multiply_elements(const Decoded &decoded, const PanelKind &kind, int64_t columns, const bf16 *x, float *y) {
    for (int64_t column = 0; column < columns; ++column) {
        const float of_x = load(x + column, 1)[0];
        for (int row = 0; row < kPanel; ++row) {
            const int64_t number = column / kind.group * kPanel + row;
            int16_t codes[2];
            std::memcpy(codes, &decoded.words[column / 2 * kPanel + row], sizeof codes);
            const float shift = kind.shifts ? decoded.shifts[number] : 0;
            y[row] += of_x * (static_cast<float>(codes[column % 2]) * decoded.scales[number] + shift);
        }
    }
}

#else

// Adds the products of a stretch of `groups` groups with kM rows to y [kM][kPanel], in the order of dot_panel.
// kChains: of which a group has several, all of kChainWords.
template <int kM, bool kShifts, bool kChains>
__attribute__((noinline)) void multiply_tile(const Decoded &decoded, int64_t groups, int64_t group_words,
                                             const uint32_t *x, const Numbers *numbers, float *y) {
    const uint32_t *words = decoded.words;
    for (int64_t g = 0; g < groups; ++g) {
        VecF group[kM];
        // Sets group to the sums of so many words.
        const auto multiply_chain = [&](int64_t count) __attribute__((always_inline)) {
            VecF part[kM][kSums] = {};
            for (int64_t word = 0; word < count; word += kSums) {
#pragma GCC unroll 2
                for (int s = 0; s < kSums; ++s) {
                    __m512i of_rows = _mm512_loadu_si512(words);
                    keep_in_register(of_rows);
#pragma GCC unroll 8
                    for (int m = 0; m < kM; ++m) {
                        part[m][s] = multiply_words(of_rows, x[m], part[m][s]);
                    }
                    words += kPanel;
                    x += kM;
                }
            }
#pragma GCC unroll 8
            for (int m = 0; m < kM; ++m) {
                group[m] = part[m][0] + part[m][1];
            }
        };
        if constexpr (kChains) {
            VecF before[kM] = {};
            for (int64_t left = group_words; left > 0; left -= kChainWords) {
                multiply_chain(kChainWords);
#pragma GCC unroll 8
                for (int m = 0; m < kM; ++m) {
                    group[m] = before[m] += group[m];
                }
            }
        } else {
            multiply_chain(group_words);
        }
        const VecF scale = load(decoded.scales + g * kPanel), shift = load(decoded.shifts + g * kPanel);
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
            VecF total = fma(group[m], scale, load(y + m * kPanel));
            if constexpr (kShifts) {
                total = fma(splat(numbers[g * kM + m].sum), shift, total);
            }
            store(y + m * kPanel, total);
        }
    }
}

#endif

// The same for a number of rows known at run time.
template <bool kShifts, bool kChains, int kM = 1, typename... More>
void multiply_rows(int64_t m, const Decoded &decoded, More... more) {
    if constexpr (kM < kTileRows) {
        if (m > kM) {
            return multiply_rows<kShifts, kChains, kM + 1>(m, decoded, more...);
        }
    }
    multiply_tile<kM, kShifts, kChains>(decoded, more...);
}

// The same for a kind.
template <typename... More> void multiply_kind(const PanelKind &kind, int64_t m, const Decoded &decoded, More... more) {
#if !defined(INFINI_INTEGER_PANELS)
    if (kind.group / 2 > kChainWords) {
        return kind.shifts ? multiply_rows<true, true>(m, decoded, more...)
                           : multiply_rows<false, true>(m, decoded, more...);
    }
#endif
    kind.shifts ? multiply_rows<true, false>(m, decoded, more...) : multiply_rows<false, false>(m, decoded, more...);
}

// Rows of a product that share a pass over its weight.
struct Part {
    const Args *product;
    PackedX x;
    const int64_t *x_offsets, *y_offsets;
};

// Decodes a panel in stretches, and calls body(first column, columns) for each.
template <typename Body> void each_stretch(const Args &a, int64_t panel, Decoded &decoded, const Body &body) {
    const int64_t blocks = a.weight.size(1), elements = a.block->elements, step = kStretch / elements;
    const uint8_t *const data = a.weight.as<const uint8_t>() + panel * a.weight.stride(0);
    for (int64_t block = 0; block < blocks; block += step) {
        const int64_t count = blocks - block < step ? blocks - block : step;
        a.kind->decode({},
                       {data + block * kPanel * a.block->bytes, count, decoded.words, decoded.scales, decoded.shifts});
        body(block * elements, count * elements);
    }
}

// y [rows][kPanel] of a panel.
void multiply_panel(const Part &part, int64_t panel, Decoded &decoded, float *y) {
    const Args &a = *part.product;
    const PackedX &x = part.x;
    const PanelKind &kind = *a.kind;
    const Pass &pass = x.pass();
    if (pass.few) {
        const uint8_t *const data = a.weight.as<const uint8_t>() + panel * a.weight.stride(0);
        for (int64_t tile = 0; tile < pass.tiles; ++tile) {
            const int64_t row = pass.row(tile), rows = pass.row(tile + 1) - row;
            kind.dot(
                {}, {data, a.weight.size(1), static_cast<int>(rows), x.words(tile), x.numbers(tile), y + row * kPanel});
        }
    } else {
        std::memset(y, 0, static_cast<size_t>(pass.rows * kPanel) * sizeof(float));
        each_stretch(a, panel, decoded, [&](int64_t column, int64_t columns) {
            for (int64_t tile = 0; tile < pass.tiles; ++tile) {
                const int64_t row = pass.row(tile), rows = pass.row(tile + 1) - row;
                multiply_kind(kind, rows, decoded, columns / kind.group, int64_t{kind.group / 2},
                              x.words(tile) + column / 2 * rows, x.numbers(tile) + column / kind.group * rows,
                              y + row * kPanel);
            }
        });
    }
#if defined(INFINI_INTEGER_PANELS)
    for (int64_t row = 0; row < pass.rows; ++row) {
        if (!x.is_finite(row)) {
            const bf16 *const of_x = a.x.as<const bf16>() + part.x_offsets[row];
            std::memset(y + row * kPanel, 0, kPanel * sizeof(float));
            each_stretch(a, panel, decoded, [&](int64_t column, int64_t columns) {
                multiply_elements(decoded, kind, columns, of_x + column, y + row * kPanel);
            });
        }
    }
#endif
}

void pack(const Part *parts, int64_t count) {
    int64_t tiles = 0, bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Pass &pass = parts[i].x.pass();
        tiles += pass.tiles;
        bytes += pass.rows * pass.k * static_cast<int64_t>(sizeof(bf16));
    }
    parallel_for(tiles, bytes, [&](int64_t first, int64_t last) {
        for (const Part *part = parts; last > 0; ++part) {
            const int64_t own = part->x.pass().tiles;
            for (int64_t tile = first > 0 ? first : 0; tile < own && tile < last; ++tile) {
                part->x.set(tile, part->product->x.as<const bf16>(), part->x_offsets);
            }
            first -= own;
            last -= own;
        }
    });
}

void write_panel(const Part &part, int64_t panel, const float *y) {
    const Bias<bf16> bias(part.product->bias, panel * kPanel);
    for (int64_t row = 0; row < part.x.pass().rows; ++row) {
        bf16 *const to = part.product->y.as<bf16>() + part.y_offsets[row] + panel * kPanel;
        for (int i = 0; i < kPanel; i += kLanes) {
            store(to + i, bias.plus(load(y + row * kPanel + i), i, Full{}));
        }
    }
}

void multiply(const linear_block_panels::Products &products) {
    const Args &one = products.args[0];
    const int64_t k = one.x.size(-1), panels = one.weight.size(0), count = products.count, group = one.kind->group;
    const auto rows_of = [](const Args &a) {
        const TensorView *const views[] = {&a.x, &a.y};
        return RowIterator<2>(views);
    };
    int64_t largest = 0, x_bytes = 0, work = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t rows = rows_of(products.args[i]).count();
        largest = rows > largest ? rows : largest;
    }
    const int64_t most = ceil_div(largest, ceil_div(largest, kPassRows)); // several products have one pass
    for (int64_t i = 0; i < count; ++i) {
        const int64_t rows = rows_of(products.args[i]).count(), in_pass = rows < most ? rows : most;
        x_bytes += Pass{in_pass, k, group}.bytes();
        work += one.weight.numel() * ceil_div(in_pass, kTileRows);
    }
    const int64_t threads = parallel_threads(count * panels, work);
    const int64_t own_bytes =
        static_cast<int64_t>(sizeof(Decoded)) + most * kPanel * static_cast<int64_t>(sizeof(float));
    auto *const scratch = static_cast<char *>(cpu::scratch(static_cast<size_t>(x_bytes + threads * own_bytes)));
    int64_t x_offsets[kPassRows], y_offsets[kPassRows];
    Part parts[linear_block_panels::kTogether];
    for (int64_t begin = 0; begin < largest; begin += most) {
        int64_t found = 0;
        char *memory = scratch;
        for (int64_t i = 0; i < count; ++i) {
            const Args &a = products.args[i];
            const auto rows = rows_of(a);
            const int64_t end = rows.count() < begin + most ? rows.count() : begin + most;
            const Pass pass{end - begin, k, group};
            parts[i] = {&a, PackedX(pass, memory), x_offsets + found, y_offsets + found};
            memory += pass.bytes();
            rows.visit(begin, end, [&](const int64_t *at) {
                x_offsets[found] = at[0];
                y_offsets[found++] = at[1];
            });
        }
        pack(parts, count);
        parallel_for(count * panels, work, [&](int64_t first, int64_t last) {
            char *const own = scratch + x_bytes + (threads > 1 ? omp_get_thread_num() * own_bytes : 0);
            auto &decoded = *reinterpret_cast<Decoded *>(own);
            auto *const y = reinterpret_cast<float *>(own + sizeof(Decoded));
            for (int64_t i = first; i < last; ++i) {
                const Part &part = parts[i / panels];
                multiply_panel(part, i % panels, decoded, y);
                write_panel(part, i % panels, y);
            }
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_block_panels::INFINI_LEVEL::multiply_kernel(const Products &products) {
    infini::INFINI_LEVEL::multiply(products);
}

#else

void infini::linear_block_panels::INFINI_LEVEL::multiply_kernel(const Products &) {} // linear_blocks serves

#endif
