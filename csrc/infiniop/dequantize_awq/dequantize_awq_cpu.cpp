// The CPU kernel of dequantize_awq: one row at a time. q - zero is a whole number of magnitude below 16, and its
// product with a float16 scale is exact in float, so the only rounding is to float16.
// Limit: memory bandwidth, 2 bytes written per half byte read; the scales and zeros of a group stay in the cache.
#include "dequantize_awq.h"
#include "level_types.h"
#include "parallel.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// The eight shifts, repeated so that vectors of four to sixteen columns can load them from any multiple of four on.
alignas(64) constexpr uint32_t kShifts[16] = {0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28};

// Loads the 4-bit values of the columns from i on, one per lane. Does not read words beyond the row.
inline VecI unpack(const int32_t *words, int64_t i, int lanes) {
    VecU shifts;
    std::memcpy(&shifts, kShifts + i % 8, sizeof shifts);
    words += i / 8;
#if defined(__AVX512F__)
    int64_t pair = 0;
    std::memcpy(&pair, words, lanes == kLanes ? 8 : 4);
    const __m512i both = _mm512_set1_epi64(pair);
    const VecU word =
        (VecU)_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1), both);
#else
    (void)lanes;
    const VecU word = VecU{} + static_cast<uint32_t>(*words);
#endif
    return (VecI)((word >> shifts) & 15u);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::dequantize_awq::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    if (kOnlyBf16) { // bf16's level would compile the same code
        return INFINI_FLOAT_LEVEL::cpu_kernel(args);
    }
    const int64_t rows = args.out.shape[0], columns = args.out.shape[1], group_size = rows / args.scales.shape[0];
    parallel_for(rows, rows * columns * 5 / 2, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const int64_t group = row / group_size;
            const auto *q = args.qweight.as<const int32_t>() + row * args.qweight.strides[0];
            const auto *zero = args.zeros.as<const int32_t>() + group * args.zeros.strides[0];
            const auto *scale = args.scales.as<const f16>() + group * args.scales.strides[0];
            auto *out = args.out.as<f16>() + row * args.out.strides[0];
            for_each_vector(columns, [&](int64_t i, auto lanes) {
                const VecI difference = unpack(q, i, lanes) - unpack(zero, i, lanes);
                store_at(out, i, __builtin_convertvector(difference, VecF) * load_at(scale, i, lanes), lanes);
            });
        }
    });
}
