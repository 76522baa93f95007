// linear_table4 by dot products of bytes: one shuffle turns indices into bytes.
#include "linear_table4.h"
#include "panel_weights/panel_dots.h"

namespace infini::INFINI_LEVEL {
namespace {

using linear_table4::kTable;

constexpr int kAdded = 64; // to the levels, to make them unsigned

// The levels for each 16 bytes of a vector.
struct Levels {
    alignas(64) uint8_t bytes[64];
};

constexpr Levels make_levels() {
    Levels levels{};
    for (int i = 0; i < 64; ++i) {
        levels.bytes[i] = static_cast<uint8_t>(kTable[i % 16] + kAdded);
    }
    return levels;
}

constexpr Levels kLevels = make_levels();

// Replaces each byte below 16 by table[byte] + kAdded.
inline VecU look_up(VecU indices) {
#if defined(__AVX512F__)
    return (VecU)_mm512_shuffle_epi8(_mm512_load_si512(kLevels.bytes), (__m512i)indices);
#elif defined(__AVX2__)
    return (VecU)_mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i *>(kLevels.bytes)),
                                     (__m256i)indices);
#elif defined(__aarch64__)
    return (VecU)vqtbl1q_u8(vld1q_u8(kLevels.bytes), (uint8x16_t)indices);
#else
    uint8_t bytes[kVectorBytes];
    std::memcpy(bytes, &indices, sizeof bytes);
    for (uint8_t &byte : bytes) {
        byte = kLevels.bytes[byte];
    }
    return load_bytes(bytes);
#endif
}

struct TableWeights : linear_table4::Layout {
    static constexpr int kOffset = kAdded;

    static void unpack(const uint8_t *lines, int pair, int v, VecU (&columns)[2]) {
        VecU indices = load_bytes(lines + pair * kLineBytes + v * kVectorBytes);
        keep_in_register(indices); // GCC would load the line twice: a third slower while it is on its way from memory
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
