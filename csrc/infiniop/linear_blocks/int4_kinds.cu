// 4-bit groups on CUDA: (code - zero point) * scale, which float holds.
#include "kernels_of_kinds.cuh"

namespace infini::linear_blocks {
namespace {

template <int kGroup> struct Int4 {
    static constexpr int kElements = kGroup, kBytes = 4 + kGroup / 2;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        const float scale = block.half(0), least = -block.half(2) * scale;
        if constexpr (kGroup == kRun) {
            uint32_t q[4];
            block.words(q, 4);
            each(w, [&](int i) { return fmaf(static_cast<float>(nibble_of(q, i)), scale, least); });
        } else { // 32 bytes hold 64 elements, the first half in the lower nibbles
            uint32_t q[8];
            block.words(q, 4 + run / 2 * 32);
            each(w, [&](int i) { return fmaf(static_cast<float>(nibble_of(q, i, run % 2 != 0)), scale, least); });
        }
    }
};

const RegisteredKindOnCuda kinds[] = {
    RegisteredKindOnCuda(on_cuda<Int4<32>>(1002)),
    RegisteredKindOnCuda(on_cuda<Int4<64>>(1003)),
    RegisteredKindOnCuda(on_cuda<Int4<128>>(1004)),
};

} // namespace
} // namespace infini::linear_blocks
