// GGML's kinds of blocks on CUDA (formulas: torch_infini/ops/_blocks). A value is exact in float but for the rounding of
// q * scale + shift, as a whole.
#include "kernels_of_kinds.cuh"

namespace infini::linear_blocks {
namespace {

struct Q4_0 {
    static constexpr int kElements = 32, kBytes = 18;
    static __device__ __forceinline__ void decode(const Block &block, int, float (&w)[kRun]) {
        uint32_t q[4];
        block.words(q, 2);
        const float scale = block.half(0);
        each(w, [&](int i) { return (static_cast<float>(nibble_of(q, i)) - 8) * scale; });
    }
};

struct Q4_1 {
    static constexpr int kElements = 32, kBytes = 20;
    static __device__ __forceinline__ void decode(const Block &block, int, float (&w)[kRun]) {
        uint32_t q[4];
        block.words(q, 4);
        const float scale = block.half(0), least = block.half(2);
        each(w, [&](int i) { return fmaf(static_cast<float>(nibble_of(q, i)), scale, least); });
    }
};

struct Q5_0 {
    static constexpr int kElements = 32, kBytes = 22;
    static __device__ __forceinline__ void decode(const Block &block, int, float (&w)[kRun]) {
        uint32_t q[4];
        block.words(q, 6);
        const uint32_t fifth = block.word(2);
        const float scale = block.half(0);
        each(w, [&](int i) { return (static_cast<float>(nibble_of(q, i) | (fifth >> i & 1) << 4) - 16) * scale; });
    }
};

struct Q5_1 {
    static constexpr int kElements = 32, kBytes = 24;
    static __device__ __forceinline__ void decode(const Block &block, int, float (&w)[kRun]) {
        uint32_t q[4];
        block.words(q, 8);
        const uint32_t fifth = block.word(4);
        const float scale = block.half(0), least = block.half(2);
        each(w, [&](int i) { return fmaf(static_cast<float>(nibble_of(q, i) | (fifth >> i & 1) << 4), scale, least); });
    }
};

struct Q8_0 {
    static constexpr int kElements = 32, kBytes = 34;
    static __device__ __forceinline__ void decode(const Block &block, int, float (&w)[kRun]) {
        uint32_t q[8];
        block.words(q, 2);
        const float scale = block.half(0);
        each(w, [&](int i) { return static_cast<float>(static_cast<int8_t>(byte_of(q, i))) * scale; });
    }
};

// The scale and the shift of a sub-block of Q4_K and Q5_K: six bits each, times a factor of the block.
struct SixBits {
    float scale, shift;

    __device__ __forceinline__ SixBits(const Block &block, int j) {
        const uint32_t own = block.byte(4 + j), later = block.byte(8 + j); // of scale and minimum where j < 4
        uint32_t scale_bits = own & 63, least_bits = later & 63;
        if (j >= 4) {
            scale_bits = (later & 15) | (block.byte(j) >> 6) << 4;
            least_bits = later >> 4 | (own >> 6) << 4;
        }
        scale = static_cast<float>(scale_bits) * block.half(0);
        shift = static_cast<float>(least_bits) * -block.half(2);
    }
};

struct Q4_K {
    static constexpr int kElements = 256, kBytes = 144;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        uint32_t q[8];
        block.words(q, 16 + run / 2 * 32);
        const SixBits of(block, run);
        each(w, [&](int i) { return fmaf(static_cast<float>(nibble_of(q, i, run % 2 != 0)), of.scale, of.shift); });
    }
};

struct Q5_K {
    static constexpr int kElements = 256, kBytes = 176;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        uint32_t q[8], fifth[8];
        block.words(q, 48 + run / 2 * 32);
        block.words(fifth, 16);
        const SixBits of(block, run);
        each(w, [&](int i) {
            const uint32_t code = nibble_of(q, i, run % 2 != 0) | (byte_of(fifth, i) >> run & 1) << 4;
            return fmaf(static_cast<float>(code), of.scale, of.shift);
        });
    }
};

struct Q6_K {
    static constexpr int kElements = 256, kBytes = 210;
    static __device__ __forceinline__ void decode(const Block &block, int run, float (&w)[kRun]) {
        const int half = run / 4, quarter = run % 4;
        uint32_t q[8], upper[8];
        block.words(q, 64 * half + quarter % 2 * 32);
        block.words(upper, 128 + 32 * half);
        const uint32_t scales = block.two_bytes(192 + 2 * run);
        const float factor = block.half(208);
        const float first = static_cast<float>(static_cast<int8_t>(scales & 255)) * factor;
        const float second = static_cast<float>(static_cast<int8_t>(scales >> 8)) * factor;
        each(w, [&](int i) {
            const uint32_t code = nibble_of(q, i, quarter >= 2) | (byte_of(upper, i) >> 2 * quarter & 3) << 4;
            return (static_cast<float>(code) - 32) * (i < 16 ? first : second);
        });
    }
};

struct Iq4Nl {
    static constexpr int kElements = 32, kBytes = 18;
    static __device__ __forceinline__ void decode(const Block &block, int, float (&w)[kRun]) {
        uint32_t q[4];
        block.words(q, 2);
        const float scale = block.half(0);
        each(w, [&](int i) { return level(kIq4Levels, nibble_of(q, i)) * scale; });
    }
};

struct Mxfp4 {
    static constexpr int kElements = 32, kBytes = 17;
    static __device__ __forceinline__ void decode(const Block &block, int, float (&w)[kRun]) {
        uint32_t q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) { // behind one byte, so at odd addresses half of the time
            q[i] = block.byte(1 + 4 * i) | block.byte(2 + 4 * i) << 8 | block.byte(3 + 4 * i) << 16 |
                   block.byte(4 + 4 * i) << 24;
        }
        const uint32_t e = block.byte(0); // half of the scale is 2 ** (e - 128)
        const float half = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        each(w, [&](int i) { return level(kFp4Table, nibble_of(q, i)) * half; });
    }
};

const RegisteredKindOnCuda kinds[] = {
    RegisteredKindOnCuda(on_cuda<Q4_0>(2)),   RegisteredKindOnCuda(on_cuda<Q4_1>(3)),
    RegisteredKindOnCuda(on_cuda<Q5_0>(6)),   RegisteredKindOnCuda(on_cuda<Q5_1>(7)),
    RegisteredKindOnCuda(on_cuda<Q8_0>(8)),   RegisteredKindOnCuda(on_cuda<Q4_K>(12)),
    RegisteredKindOnCuda(on_cuda<Q5_K>(13)),  RegisteredKindOnCuda(on_cuda<Q6_K>(14)),
    RegisteredKindOnCuda(on_cuda<Iq4Nl>(20)), RegisteredKindOnCuda(on_cuda<Mxfp4>(39)),
};

} // namespace
} // namespace infini::linear_blocks
