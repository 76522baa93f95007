// The weight formats of weight_stream.cuh: how bytes of a stage in shared memory become fragments for the tensor cores.
// Elements of k are permuted so that no shuffles are needed: a lane multiplies what it has read, and `arrange` permutes
// x in the same way. A format processes a stage in steps; in a step a lane has kLane elements of a row, read kReadBytes
// at a time.
#pragma once

#include "cuda/mma.cuh"
#include "cuda/mma_int8.cuh"
#include "cuda/half2.cuh"
#include "cuda/vectors.cuh"
#include "weight_stages.cuh"

namespace infini::weight_stream {

// The offset of a lane's part in a slot: row lane / 4, the first of the lane's columns.
template <typename F> __device__ __forceinline__ int lane_part(int g, int t) {
    return F::kReadBytes == 4 ? place<F>(g, 0) + 4 * t : place<F>(g, t);
}

// Reads a lane's bytes of a step, from its first row and from the row 8 below; a step has kReadBytes per lane and row.
template <typename F, typename Read>
__device__ __forceinline__ void read_step(Read &low, Read &high, const unsigned char *slot, int part, int step) {
    const unsigned char *const from = slot + (F::kReadBytes == 4 ? part + step * 16 : part ^ step * 64);
    low = *reinterpret_cast<const Read *>(from);
    high = *reinterpret_cast<const Read *>(from + 8 * kPitch<F>);
}

template <typename T> struct Dense {
    using X = T;
    using Sum = float;
    using Part = Sum;
    static constexpr int kElementBytes = 2, kBits = 16, kLane = 8, kXRegisters = 4, kReadBytes = 16,
                         kMaxWeights = weight_stream::kMaxWeights;
    static constexpr bool kGrouped = false, kZeros = false;
    static __device__ __forceinline__ void arrange(uint32_t (&)[kXRegisters]) {}

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int part, int step,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4]) {
        cuda::Vector<uint32_t, 4> low, high;
        read_step<Dense>(low, high, slot, part, step);
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
            const uint32_t a[4] = {low.values[p], high.values[p], low.values[p + 1], high.values[p + 1]};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                cuda::mma<T>(sums[i], a, x[i][p], x[i][p + 1]);
            }
        }
    }
};

// int8 weights, x of a half type, which represents the integers exactly.
template <typename T> struct Int8 {
    using X = T;
    using Sum = float;
    using Part = Sum;
    static constexpr int kElementBytes = 1, kBits = 8, kLane = 16, kXRegisters = 8, kReadBytes = 16, kMaxWeights = 1;
    static constexpr bool kGrouped = false, kZeros = false;
    static __device__ __forceinline__ void arrange(uint32_t (&)[kXRegisters]) {}

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int part, int step,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4]) {
        cuda::Vector<uint32_t, 4> low, high;
        read_step<Int8>(low, high, slot, part, step);
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const uint32_t a[4] = {
                cuda::int8x2_to_half2<T, 0>(low.values[p]), cuda::int8x2_to_half2<T, 0>(high.values[p]),
                cuda::int8x2_to_half2<T, 2>(low.values[p]), cuda::int8x2_to_half2<T, 2>(high.values[p])};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                cuda::mma<T>(sums[i], a, x[i][2 * p], x[i][2 * p + 1]);
            }
        }
    }
};

// int8 weights and int8 x: exact sums.
struct Int8ByInt8 {
    using X = int8_t;
    using Sum = int32_t;
    using Part = Sum;
    static constexpr int kElementBytes = 1, kBits = 8, kLane = 16, kXRegisters = 4, kReadBytes = 16, kMaxWeights = 1;
    static constexpr bool kGrouped = false, kZeros = false;
    static __device__ __forceinline__ void arrange(uint32_t (&)[kXRegisters]) {}

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int part, int step,
                                                    const uint32_t (&x)[kTiles][kXRegisters], Sum (&sums)[kTiles][4]) {
        cuda::Vector<uint32_t, 4> low, high;
        read_step<Int8ByInt8>(low, high, slot, part, step);
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
            const uint32_t a[4] = {low.values[p], high.values[p], low.values[p + 1], high.values[p + 1]};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                cuda::mma(sums[i], a, x[i][p], x[i][p + 1]);
            }
        }
    }
};

// ---- int4: a step has 32 elements, all of one group; a product counts kUnit times a product with q - 8 ----

// sums += scale * products + zero * the sum of x, for a band and a group. The sum of x comes from products with ones,
// of which all rows are equal: these take 16 instructions per stage; additions by the lanes would take 130 for 8 rows.
template <typename F, int kTiles, int kOfX>
__device__ __forceinline__ void add_group(float (&sums)[kTiles][4], const typename F::Part (&products)[kTiles][4],
                                          const typename F::Part (&of_x)[kTiles][kOfX], const GroupScales &scales) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[i][e] += scales.scale[e / 2] * F::kUnit * static_cast<float>(products[i][e]);
            if constexpr (F::kZeros) {
                sums[i][e] += scales.zero[e / 2] * static_cast<float>(of_x[i][e % 2]);
            }
        }
    }
}

template <typename T, int kX> __device__ __forceinline__ void clear(T (&sums)[kX][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kX; ++i) {
        sums[i / 4][i % 4] = 0;
    }
}

// int4 weights, x of a half type, which represents q - 8 exactly.
template <typename T, bool kHasZeros = true> struct Int4 {
    using X = T;
    using Sum = float;
    using Part = float;
    using WithoutZeros = Int4<T, false>;
    static constexpr int kElementBytes = 1, kBits = 4, kLane = 8, kXRegisters = 4, kReadBytes = 4, kMaxWeights = 1;
    static constexpr bool kGrouped = true, kZeros = kHasZeros;
    static constexpr float kUnit = 1;

    // Pairs elements i and i + 4, in the order of the nibbles.
    static __device__ __forceinline__ void arrange(uint32_t (&x)[kXRegisters]) {
        const uint32_t a = x[0], b = x[1], c = x[2], d = x[3];
        x[0] = __byte_perm(a, c, 0x5410);
        x[1] = __byte_perm(a, c, 0x7632);
        x[2] = __byte_perm(b, d, 0x5410);
        x[3] = __byte_perm(b, d, 0x7632);
    }

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int part, int step,
                                                    const uint32_t (&x)[kTiles][kXRegisters],
                                                    Part (&products)[kTiles][4]) {
        uint32_t words[2], low[4], high[4];
        read_step<Int4>(words[0], words[1], slot, part, step);
        cuda::int4x8_to_half2<T>(low, words[0]);
        cuda::int4x8_to_half2<T>(high, words[1]);
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
            const uint32_t a[4] = {low[p], high[p], low[p + 1], high[p + 1]};
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
                cuda::mma<T>(products[i], a, x[i][p], x[i][p + 1]);
            }
        }
    }

    static __device__ __forceinline__ void add_x(const uint32_t (&x)[kXRegisters], Part (&of_x)[4]) {
        constexpr uint32_t kOne = std::is_same_v<T, bf16> ? 0x3f803f80u : 0x3c003c00u;
        constexpr uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
        cuda::mma<T>(of_x, kOnes, x[0], x[1]);
        cuda::mma<T>(of_x, kOnes, x[2], x[3]);
    }
};

// int4 weights and int8 x: sums within a group are exact. A nibble becomes the upper half of a byte: 16 (q - 8).
template <bool kHasZeros = true> struct Int4ByInt8Format {
    using X = int8_t;
    using Sum = float;
    using Part = int32_t;
    using WithoutZeros = Int4ByInt8Format<false>;
    static constexpr int kElementBytes = 1, kBits = 4, kLane = 8, kXRegisters = 2, kReadBytes = 4, kMaxWeights = 1;
    static constexpr bool kGrouped = true, kZeros = kHasZeros;
    static constexpr float kUnit = 1.0f / 16;

    // Even elements first, then odd ones, in the order of the nibbles.
    static __device__ __forceinline__ void arrange(uint32_t (&x)[kXRegisters]) {
        const uint32_t a = x[0], b = x[1];
        x[0] = __byte_perm(a, b, 0x6420);
        x[1] = __byte_perm(a, b, 0x7531);
    }

    template <int kTiles>
    static __device__ __forceinline__ void multiply(const unsigned char *slot, int part, int step,
                                                    const uint32_t (&x)[kTiles][kXRegisters],
                                                    Part (&products)[kTiles][4]) {
        constexpr uint32_t kUpper = 0xf0f0f0f0u, kEight = 0x80808080u;
        uint32_t low, high;
        read_step<Int4ByInt8Format>(low, high, slot, part, step);
        const uint32_t a[4] = {cuda::and_xor(low << 4, kUpper, kEight), cuda::and_xor(high << 4, kUpper, kEight),
                               cuda::and_xor(low, kUpper, kEight), cuda::and_xor(high, kUpper, kEight)};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            cuda::mma(products[i], a, x[i][0], x[i][1]);
        }
    }

    static __device__ __forceinline__ void add_x(const uint32_t (&x)[kXRegisters], Part (&of_x)[4]) {
        constexpr uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
        cuda::mma(of_x, kOnes, x[0], x[1]);
    }
};
using Int4ByInt8 = Int4ByInt8Format<>;

} // namespace infini::weight_stream
