// The CPU decoders of 4-bit groups: (code - zero point) * scale, which float holds.
#include "int4_kinds.h"

#include "codes.h"

namespace infini::INFINI_LEVEL {
namespace {

template <int kGroup> struct Int4 {
    static constexpr int kElements = kGroup, kBytes = 4 + kGroup / 2;
    static constexpr int kHalf = kGroup == 32 ? 16 : 32; // elements in the lower nibbles of their bytes

    template <typename Sink> INFINI_ALWAYS_INLINE static void decode(const uint8_t *p, const Sink &sink) {
        const float scale = half_at(p), least = -half_at(p + 2) * scale;
#pragma GCC unroll 2
        for (int i = 0; i < kElements; i += 2 * kHalf) {
#pragma GCC unroll 2
            for (int j = 0; j < kHalf; j += 16) {
                shifted(load_bytes(p + 4 + i / 2 + j) & 15, scale, least, i + j, sink);
            }
#pragma GCC unroll 2
            for (int j = 0; j < kHalf; j += 16) {
                shifted(shifted_right<4>(load_bytes(p + 4 + i / 2 + j), 15), scale, least, i + kHalf + j, sink);
            }
        }
    }
#if defined(__AVX512BF16__)
    template <typename Sink> INFINI_ALWAYS_INLINE static void decode_pairs(const uint8_t *p, const Sink &sink) {
        const __m512i table = table_of((counted() - splat(half_at(p + 2))) * splat(half_at(p)));
        if constexpr (kHalf == 16) {
            sink(0, look_up(table, nibble_words(p + 4)));
        } else {
#pragma GCC unroll 2
            for (int i = 0; i < kElements; i += 2 * kHalf) {
                const __m512i q = load_words(p + 4 + i / 2);
                sink(i, look_up(table, q));
                sink(i + kHalf, look_up(table, _mm512_srli_epi16(q, 4)));
            }
        }
    }
#endif
};

} // namespace
} // namespace infini::INFINI_LEVEL

namespace infini::linear_blocks::INFINI_LEVEL {

using namespace infini::INFINI_LEVEL;

INFINI_DEFINE_BLOCK_KIND(int4_32, Int4<32>)
INFINI_DEFINE_BLOCK_KIND(int4_64, Int4<64>)
INFINI_DEFINE_BLOCK_KIND(int4_128, Int4<128>)

} // namespace infini::linear_blocks::INFINI_LEVEL
