// The CUDA kernel of linear_table4: three byte permutations turn four indices into bytes. The limits are in
// panel_product.cuh.
// SASS: multiply_panels: LDG.E.64 LDG.E.128 IMMA.16816.S8.S8
#include "linear_table4.h"
#include "panel_weights/panel_product.cuh"

namespace infini::linear_table4 {
namespace {

// Entries 4 i to 4 i + 3 of the table.
constexpr uint32_t levels(int i) {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
        word |= static_cast<uint32_t>(static_cast<uint8_t>(kTable[4 * i + b])) << 8 * b;
    }
    return word;
}
constexpr uint32_t kLevels0 = levels(0), kLevels4 = levels(1), kLevels8 = levels(2), kLevels12 = levels(3);

struct TableWeights : Layout {
    // Columns 0, 4, 1, 5 of a line, or 2, 6, 3, 7: the order of their indices in the word.
    static __device__ __forceinline__ uint32_t columns(uint32_t word, int part) {
        const uint32_t indices = word >> 16 * part; // __byte_perm selects by the lower three bits of each
        const uint32_t low = __byte_perm(kLevels0, kLevels4, indices & 0x7777u),
                       high = __byte_perm(kLevels8, kLevels12, indices & 0x7777u);
        return __byte_perm(low, high, (indices >> 1 & 0x4444u) | 0x3210u);
    }
    static __device__ __forceinline__ void arrange(uint32_t (&x)[2]) {
        const uint32_t first = x[0], second = x[1];
        x[0] = __byte_perm(first, second, 0x5140);
        x[1] = __byte_perm(first, second, 0x7362);
    }
};

const RegisteredKernel<panels::Args> registered{kOp.kernels, INFINI_DEVICE_NVIDIA, panels::multiply<TableWeights>,
                                                panels::workspace_bytes<TableWeights>};

} // namespace
} // namespace infini::linear_table4
