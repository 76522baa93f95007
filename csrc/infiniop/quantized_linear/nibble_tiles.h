// Blocks of grouped 4-bit weights for products in tile registers: integers are unpacked to tiles of int8 or (exactly)
// bfloat16, and the tiles' sums over a group are scaled and added in float, group by group from the first on.
// Limit: for a group of s steps, 4 tile products per step take 64 s cycles; storing their sums and the scaled sums
// takes 128 cycles, in parallel. On paper that leaves 0.5, 1 and 1 of the tiles' rate in bfloat16 for groups of 32, 64
// and 128, and 0.25, 0.5 and 1 in int8 (32 elements fill half a step). Totals in vector registers would save stores but
// cost as many loads; scaling the weights in bfloat16 would avoid both, but rounds twice. Measured on an Intel Xeon
// (Sapphire Rapids) with 512 rows and groups of 128: 0.74 TFLOP/s in bfloat16 (linear: 1.0), 1.08 TOP/s in int8
// (linear_int8: 1.7).
#pragma once

#include "formats.h"
#include "gemm/tile_rows.h"
#include "group_scales.h"
#include "int8_gemm/int8_dots.h"
#include "quantized_linear.h"

namespace infini::INFINI_LEVEL {
namespace {

using quantized_linear::Args;

// ---- unpacking ----

// Unpacks the 32 elements of 16 bytes, minus 8, in the order of k.
inline void unpack(const uint8_t *from, bf16 *to) {
#if defined(__AVX512BF16__)
    const VecU bytes = (VecU)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)(bytes | bytes << 12), _mm512_load_si512(kInt4Halves)));
#else
    for (int i = 0; i < 32; ++i) {
        const int q = (from[i / 2] >> (i % 2 * 4) & 15) - 8;
        to[i].bits = static_cast<uint16_t>(bits_of(static_cast<float>(q)) >> 16);
    }
#endif
}

inline void unpack(const uint8_t *from, int8_t *to) {
#if defined(__AVX2__)
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    const __m256i values = _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_sub_epi8(values, _mm256_set1_epi8(8)));
#else
    for (int i = 0; i < 32; ++i) {
        to[i] = static_cast<int8_t>((from[i / 2] >> (i % 2 * 4) & 15) - 8);
    }
#endif
}

// Up to 32 rows of weights as left operands. E: the type of x, bf16 or int8_t.
template <typename E> struct NibbleBlock {
    const uint8_t *rows;
    int64_t stride, count;
    int64_t step_bytes; // bytes of a row in a step: fewer than a step holds if a group is shorter

    static constexpr Weights kWeights = Weights::kGrouped;
    static constexpr int64_t kUnpacked = 16; // bytes unpacked at a time

    TileSource source(int64_t, int64_t first, int64_t steps, bool, char *to) const {
        constexpr int64_t kBytes = 2 * kUnpacked * static_cast<int64_t>(sizeof(E)); // the bytes that they unpack to
        for (int64_t row = 0; row < kPairRows; ++row) {
            char *at = to + row * kTmmRowBytes; // the second tile follows the first
            if (row >= count) {
                for (int64_t step = 0; step < steps; ++step, at += 2 * kTmmBytes) {
                    std::memset(at, 0, kTmmRowBytes);
                }
                continue;
            }
            const uint8_t *from = rows + row * stride + first * step_bytes;
            for (int64_t step = 0; step < steps; ++step, at += 2 * kTmmBytes) {
                for (int64_t i = 0; i < kTmmRowBytes; i += kBytes) {
                    if (i / kBytes * kUnpacked < step_bytes) {
                        unpack(from, reinterpret_cast<E *>(at + i));
                        from += kUnpacked;
                    } else {
                        std::memset(at + i, 0, kBytes);
                    }
                }
            }
        }
        return {to, kTmmRowBytes, 2 * kTmmBytes, kTmmBytes};
    }
    PrefetchSpan ahead(int64_t first, int64_t pair, int64_t pairs) const {
        const int64_t begin = count * pair / pairs, end = count * (pair + 1) / pairs;
        return {reinterpret_cast<const char *>(rows) + begin * stride + first * step_bytes, stride, step_bytes,
                end - begin, kTmmRowBytes / step_bytes};
    }
    bool is_left() const { return true; }
};

// ---- groups ----

// Adds the tiles' sums over a group to the totals: scale * sum + zero * (sum of x), as in int8_gemm/int8_product.h, and
// without fused multiply-adds, which lower levels do not have.
template <typename E> struct GroupSums {
    const GroupScales &scales;
    int64_t n;               // weight rows
    int64_t count, steps;    // groups per row; steps of k per group, which divide those of a piece
    float *x_sums = nullptr; // [group][row of x in the pass]
    int64_t x_pitch = 0;

    int64_t elements() const { return steps * kTileStep<E>; } // elements of k per group, in the layout of packed x

    // The bytes of x's sums, which are stored after its tiles.
    int64_t x_bytes(const Pass<E> &pass) const { return scales.has_zeros() ? count * pass.pairs * kPairRows * 4 : 0; }
    void set_memory(const Pass<E> &pass, void *memory) {
        x_sums = static_cast<float *>(memory);
        x_pitch = pass.pairs * kPairRows;
        // Missing rows are 0, because denormals would be slow.
        std::memset(memory, 0, static_cast<size_t>(x_bytes(pass)));
    }
    void sum_row(int64_t row, const E *x) const {
        if (!scales.has_zeros()) {
            return;
        }
        for (int64_t g = 0; g < count; ++g) {
            VecF total{}; // exact for int8
            for (int64_t i = 0; i < elements(); i += kLanes) {
                total += load(x + g * elements() + i);
            }
            x_sums[g * x_pitch + row] = sum(total);
        }
    }

    // A thread's scratch: the sums of a group, then scales and zeros of the groups of a piece: [group][weight row].
    static int64_t scratch_bytes() { return (kPairSums + 2 * kLongPieceSteps * kPairRows) * 4; }
    float *part(char *scratch) const { return reinterpret_cast<float *>(scratch); }
    float *scales_in(char *scratch) const { return part(scratch) + kPairSums; }

    // Loads the scales and zeros of block i for these groups.
    void begin_piece(int64_t i, int64_t first, int64_t groups, char *scratch) const {
        const int64_t row = i * kPairRows, left = n - row;
        pack_scales<kPairRows / kLanes>(WeightRows{nullptr, 0, row, left < kPairRows ? left : kPairRows}, groups,
                                        From{scales, first}, scales_in(scratch));
    }

    // Adds the sums of the group at step `step` of k (step `in_piece` of a piece of piece_steps steps) to those of a
    // block of `rows` weight rows and of a pair of tiles of x.
    __attribute__((noinline)) void add(const Pass<E> &pass, int64_t pair, int64_t rows, int64_t step, int64_t in_piece,
                                       int64_t piece_steps, char *scratch, float *totals) const {
        const float *const sums = part(scratch);
        const float *const scale_rows = scales_in(scratch) + in_piece / steps * kPairRows;
        const float *const zero_rows = scale_rows + piece_steps / steps * kPairRows;
        const float *const of_x = x_sums + step / steps * x_pitch + pair * kPairRows;
        const bool has_zeros = scales.has_zeros();
        for (int64_t left = 0; left * kTmmRows < rows; ++left) {
            for (int64_t right = 0; right < 2 && 2 * pair + right < pass.tiles; ++right) {
                const int64_t tile = (2 * left + right) * kTileSums;
                for (int64_t row = 0; row < kTmmRows; ++row) {
                    const VecF scale = splat(scale_rows[left * kTmmRows + row]);
                    const VecF zero = has_zeros ? splat(zero_rows[left * kTmmRows + row]) : VecF{};
                    for (int64_t j = 0; j < kTmmRows; j += kLanes) {
                        const int64_t at = tile + row * kTmmRows + j;
                        VecF products = load(sums + at);
                        if constexpr (sizeof(E) == 1) {
                            products = __builtin_convertvector((VecI)products, VecF);
                        }
                        VecF scaled = scale * products;
                        if (has_zeros) {
                            scaled += zero * load(of_x + right * kTmmRows + j);
                        }
                        store(totals + at, load(totals + at) + scaled);
                    }
                }
            }
        }
    }

private:
    // The same scales, from group `first` on.
    struct From {
        const GroupScales &all;
        int64_t first;

        bool has_zeros() const { return all.has_zeros(); }
        template <typename Lanes, int kRows>
        void scales(int64_t row, int64_t apart, int64_t group, Lanes lanes, VecF (&to)[kRows]) const {
            all.scales(row, apart, first + group, lanes, to);
        }
        template <typename Lanes, int kRows>
        void zeros(int64_t row, int64_t apart, int64_t group, Lanes lanes, VecF (&to)[kRows]) const {
            all.zeros(row, apart, first + group, lanes, to);
        }
    };
};

// An int4 weight for multiply_tiles: its blocks, and its groups, in steps of E.
template <typename E> struct NibbleWeight {
    const Args &args;
    int64_t n = args.weight.size(0), groups = args.scales.size(1);
    int64_t group = groups > 0 ? args.x.size(-1) / groups : kTileStep<E>; // elements of k per group
    int64_t steps = ceil_div(group, kTileStep<E>);
    int64_t k = groups * steps * kTileStep<E>; // includes zeros that fill the last step of each group

    int64_t blocks() const { return ceil_div(n, kPairRows); }
    NibbleBlock<E> block(int64_t i) const {
        const int64_t first = i * kPairRows, left = n - first, stride = args.weight.stride(0);
        return {args.weight.as<const uint8_t>() + first * stride, stride, left < kPairRows ? left : kPairRows,
                group / steps / 2};
    }
    GroupSums<E> sums(const GroupScales &scales) const { return {scales, n, groups, steps}; }
};

} // namespace
} // namespace infini::INFINI_LEVEL
