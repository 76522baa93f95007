// FP8 and NF4 on CUDA: the code's value, which float holds, times the block's scale, rounded once.
#include "float_kinds.h"
#include "kernels_of_kinds.cuh"

namespace infini::linear_blocks {
namespace {

struct Fp8 {
    static constexpr int kElements = 128, kBytes = 132;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        uint32_t q[8];
        block.words(q, 4 + run * kRun);
        const float scale = block.real(0);
        each(w, [&](int i) { return e4m3(byte_of(q, i)) * scale; });
    }
};

struct Nf4 {
    static constexpr int kElements = 64, kBytes = 36;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        constexpr float kLevels[16] = {kNf4[0], kNf4[1], kNf4[2],  kNf4[3],  kNf4[4],  kNf4[5],  kNf4[6],  kNf4[7],
                                       kNf4[8], kNf4[9], kNf4[10], kNf4[11], kNf4[12], kNf4[13], kNf4[14], kNf4[15]};
        uint32_t q[4];
        block.words(q, 4 + run * kRun / 2);
        const float scale = block.real(0);
        each(w, [&](int i) { // the first of a pair is in the upper half of its byte
            return kLevels[byte_of(q, i / 2) >> (i % 2 == 0 ? 4 : 0) & 15] * scale;
        });
    }
};

const RegisteredKindOnCuda fp8(on_cuda<Fp8>(1000));
const RegisteredKindOnCuda nf4(on_cuda<Nf4>(1001));

} // namespace
} // namespace infini::linear_blocks
