// NVFP4 on CUDA: a scale times the block's factor, rounded, times the code's value, rounded once more.
#include "kernels_of_kinds.cuh"
#include "nvfp4_kind.h"

namespace infini::linear_blocks {
namespace {

struct Nvfp4 {
    static constexpr int kElements = 128, kBytes = 76;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        uint32_t q[4];
        block.words(q, 12 + run * kRun / 2);
        const uint32_t scales = block.two_bytes(4 + 2 * run);
        const float half = 0.5f * block.real(0); // for doubled values
        const float first = e4m3(scales & 255) * half, second = e4m3(scales >> 8) * half;
        each(w, [&](int i) { return level(kFp4Table, nibble_of(q, i)) * (i < 16 ? first : second); });
    }
};

const RegisteredKindOnCuda nvfp4(on_cuda<Nvfp4>(1005));

} // namespace
} // namespace infini::linear_blocks
