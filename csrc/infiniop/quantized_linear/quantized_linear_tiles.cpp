// The kernel of linear_int8 and linear_int4 in tile registers for bfloat16 x, which represents the integers exactly. A
// block of the weight is unpacked into tiles, once for all rows of x in a pass. For fewer than 5 rows vectors are
// faster.
// Limit: the tiles' rate (gemm/tile_loops.h); for int4 see nibble_tiles.h. Unpacking 32 integers takes 5.4 cycles
// (measured: 20 GB/s of int8 from L2, 16 GB/s from L3, 8 GB/s from memory, on an Intel Xeon (Sapphire Rapids) whose L3
// and memory deliver 30 and 15 GB/s).
#include "nibble_tiles.h"
#include "quantized_epilogue.h"

namespace infini::INFINI_LEVEL {
namespace {

// Converts the integers of a step to bfloat16, in the order of k.
inline void widen(const int8_t *from, char *to) {
#if defined(__AVX512BF16__)
    const __m512bh step = _mm512_cvtne2ps_pbh(load(from + kLanes), load(from));
    std::memcpy(to, &step, sizeof step);
#else
    for (int64_t i = 0; i < kTileStep<bf16>; i += kLanes) {
        store(reinterpret_cast<bf16 *>(to) + i, load(from + i));
    }
#endif
}

// The same for the first `count` integers of a step; the rest become zeros.
inline void widen(const int8_t *from, int64_t count, char *to) {
    int8_t step[kTileStep<bf16>] = {};
    std::memcpy(step, from, static_cast<size_t>(count));
    widen(step, to);
}

// Up to 32 rows of int8 weights as left operands of bfloat16.
struct WidenedBlock {
    const int8_t *rows;
    int64_t stride, count;

    static constexpr Weights kWeights = Weights::kCopied;

    TileSource source(int64_t k, int64_t first, int64_t steps, bool, char *to) const {
        k -= first * kTileStep<bf16>;
        for (int64_t row = 0; row < kPairRows; ++row) {
            const int8_t *from = rows + row * stride + first * kTileStep<bf16>;
            char *at = to + row * kTmmRowBytes; // the second tile follows the first
            for (int64_t step = 0; step < steps; ++step, from += kTileStep<bf16>, at += 2 * kTmmBytes) {
                const int64_t left = k - step * kTileStep<bf16>;
                if (row >= count) {
                    std::memset(at, 0, kTmmRowBytes);
                } else if (left < kTileStep<bf16>) {
                    widen(from, left, at);
                } else {
                    widen(from, at);
                }
            }
        }
        return {to, kTmmRowBytes, 2 * kTmmBytes, kTmmBytes};
    }
    PrefetchSpan ahead(int64_t first, int64_t pair, int64_t pairs) const {
        const int64_t begin = count * pair / pairs, end = count * (pair + 1) / pairs;
        return {reinterpret_cast<const char *>(rows) + begin * stride + first * kTileStep<bf16>, stride,
                kTileStep<bf16>, end - begin, kTmmRowBytes / kTileStep<bf16>};
    }
    bool is_left() const { return true; }
};

void multiply_int8(const Args &a) {
    const int64_t n = a.weight.size(0), stride = a.weight.stride(0);
    const auto block_of = [&](int64_t i) -> WidenedBlock {
        const int64_t first = i * kPairRows, left = n - first;
        return {a.weight.as<const int8_t>() + first * stride, stride, left < kPairRows ? left : kPairRows};
    };
    multiply_rows(a.x, a.y, ceil_div(n, kPairRows), block_of,
                  [&](int64_t block, int64_t offset, int64_t column, VecF value, auto lanes) {
                      QuantizedEpilogue{a, &offset, nullptr, true}(0, block * kPairRows + column, value, lanes);
                  });
}

void multiply_int4(const Args &a) {
    const NibbleWeight<bf16> weight{a};
    const GroupScales scales{a.scales, a.zeros};
    multiply_rows(
        a.x, a.y, weight.blocks(), [&](int64_t i) { return weight.block(i); },
        [&](int64_t block, int64_t offset, int64_t column, VecF value, auto lanes) {
            QuantizedEpilogue{a, &offset, nullptr, false}(0, block * kPairRows + column, value, lanes);
        },
        weight.sums(scales));
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::quantized_linear::INFINI_LEVEL::int8_tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply_int8(args);
}

void infini::quantized_linear::INFINI_LEVEL::int4_tile_kernel(const Args &args) {
    infini::INFINI_LEVEL::multiply_int4(args);
}
