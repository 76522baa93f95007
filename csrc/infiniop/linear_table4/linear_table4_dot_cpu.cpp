// linear_table4 by dot products of bytes: one shuffle turns indices into bytes.
#include "linear_table4.h"
#include "panel_weights/panel_dots.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_table4::kTable;

alignas(64) constexpr uint8_t kLevels[64] = {
    0,  12, 22,  32,  40, 47, 54, 60, 65,  70,  76, 82, 89, 97, 106, 121, 0,  12, 22,  32,  40, 47,
    54, 60, 65,  70,  76, 82, 89, 97, 106, 121, 0,  12, 22, 32, 40,  47,  54, 60, 65,  70,  76, 82,
    89, 97, 106, 121, 0,  12, 22, 32, 40,  47,  54, 60, 65, 70, 76,  82,  89, 97, 106, 121,
};

constexpr bool levels_are_of_the_table() {
    for (int i = 0; i < 64; ++i) {
        if (kLevels[i] != kTable[i % 16] + 64) {
            return false;
        }
    }
    return true;
}
static_assert(levels_are_of_the_table());

// Replaces each byte below 16 by table[byte] + 64.
inline VecU look_up(VecU indices) {
#if defined(__AVX512F__)
    return (VecU)_mm512_shuffle_epi8(_mm512_load_si512(kLevels), (__m512i)indices);
#elif defined(__AVX2__)
    return (VecU)_mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i *>(kLevels)), (__m256i)indices);
#elif defined(__aarch64__)
    return (VecU)vqtbl1q_u8(vld1q_u8(kLevels), (uint8x16_t)indices);
#else
    uint8_t bytes[kVectorBytes];
    std::memcpy(bytes, &indices, sizeof bytes);
    for (uint8_t &byte : bytes) {
        byte = kLevels[byte];
    }
    return load_bytes(bytes);
#endif
}

struct TableWeights : linear_table4::Layout {
    static constexpr int kOffset = 64;

    static void unpack(const uint8_t *lines, int pair, int v, VecU (&columns)[2]) {
        const VecU indices = load_bytes(lines + pair * kLineBytes + v * kVectorBytes);
        columns[0] = look_up(indices & 0x0f0f0f0fu);
        columns[1] = look_up(indices >> 4 & 0x0f0f0f0fu);
    }

    static VecI add_products(VecI sum, VecU columns, VecI x) { return dot_of_small(sum, columns, x); }
};

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::linear_table4::INFINI_LEVEL::dot_kernel(const panels::Args &args) {
    infini::INFINI_LEVEL::multiply_by_dots<infini::INFINI_LEVEL::TableWeights>(args);
}
