// GGML's kinds of few bits on CUDA. A value is exact in float but for the rounding of q * scale + shift, as a whole.
#include "kernels_of_kinds.cuh"

namespace infini::linear_blocks {
namespace {

struct Q2_K {
    static constexpr int kElements = 256, kBytes = 84;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        uint32_t q[8];
        block.words(q, 16 + run / 4 * 32);
        const uint32_t both = block.two_bytes(2 * run); // the scale and the minimum of 16 elements, then of the next
        const float d = block.half(80), least = -block.half(82);
        const float scales[2] = {static_cast<float>(both & 15) * d, static_cast<float>(both >> 8 & 15) * d};
        const float shifts[2] = {static_cast<float>(both >> 4 & 15) * least, static_cast<float>(both >> 12) * least};
        each(w, [&](int i) {
            return fmaf(static_cast<float>(byte_of(q, i) >> run % 4 * 2 & 3), scales[i / 16], shifts[i / 16]);
        });
    }
};

struct Q3_K {
    static constexpr int kElements = 256, kBytes = 110;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        uint32_t q[8], third[8];
        block.words(q, 32 + run / 4 * 32);
        block.words(third, 0);
        const float d = block.half(108);
        const float scales[2] = {scale(block, 2 * run) * d, scale(block, 2 * run + 1) * d};
        each(w, [&](int i) {
            const uint32_t code = (byte_of(q, i) >> run % 4 * 2 & 3) | (byte_of(third, i) >> run & 1) << 2;
            return (static_cast<float>(code) - 4) * scales[i / 16];
        });
    }

private:
    static __device__ __forceinline__ float scale(const Block &block, int j) {
        const uint32_t low = block.byte(96 + j % 8) >> j / 8 * 4 & 15, upper = block.byte(104 + j % 4) >> j / 4 * 2 & 3;
        return static_cast<float>(low | upper << 4) - 32;
    }
};

struct Iq4Xs {
    static constexpr int kElements = 256, kBytes = 136;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        uint32_t q[4];
        block.words(q, 8 + 16 * run);
        const uint32_t low = block.byte(4 + run / 2) >> run % 2 * 4 & 15;
        const uint32_t upper = block.byte(2 + run / 4) >> run % 4 * 2 & 3;
        const float scale = block.half(0) * (static_cast<float>(low | upper << 4) - 32);
        each(w, [&](int i) { return level(kIq4Levels, nibble_of(q, i)) * scale; });
    }
};

const RegisteredKindOnCuda kinds[] = {
    RegisteredKindOnCuda(on_cuda<Q2_K>(10)),
    RegisteredKindOnCuda(on_cuda<Q3_K>(11)),
    RegisteredKindOnCuda(on_cuda<Iq4Xs>(23)),
};

} // namespace
} // namespace infini::linear_blocks
