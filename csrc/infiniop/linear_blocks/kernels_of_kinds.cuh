// The two CUDA kernels that every kind of block gets of its decoder: products of a few rows of x, and decoded rows. A kind
// is a struct with kElements, kBytes and
//     static __device__ void decode(const Block &block, int run, float (&w)[32])
// for the 32 elements of a run of a block. Products: a warp for each row of the weight, whose lanes take its runs in turn,
// so the order of a sum depends on k alone; x is read in float from the caches, 4 rows at a time.
// Limit for one row of x, on paper: memory bandwidth of the blocks; the instructions of decoding are near it (about 100
// for 18 to 34 bytes, where a multiprocessor of an H200 reads 18.6 bytes in the time of 128 lanes' instructions). More
// rows take the time of their multiply-adds.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rows.cuh"
#include "cuda/vectors.cuh"
#include "kinds_on_cuda.h"
#include "linear/weight_stream_problem.cuh"

namespace infini::linear_blocks {
namespace {

constexpr int kRun = 32;     // elements that a lane decodes at once
constexpr int kRowsOfX = 4;  // that share a decoded run
constexpr int kRowWarps = 4; // rows of the weight in a thread block

// A block, at any address; `even`: at an even one.
struct Block {
    const uint8_t *p;
    bool even;

    __device__ __forceinline__ uint32_t byte(int at) const { return p[at]; }
    __device__ __forceinline__ uint32_t two_bytes(int at) const { // at: even
        return even ? *reinterpret_cast<const uint16_t *>(p + at)
                    : static_cast<uint32_t>(p[at]) | static_cast<uint32_t>(p[at + 1]) << 8;
    }
    __device__ __forceinline__ uint32_t word(int at) const { return two_bytes(at) | two_bytes(at + 2) << 16; }
    template <int kWords> __device__ __forceinline__ void words(uint32_t (&to)[kWords], int at) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            to[i] = word(at + 4 * i);
        }
    }
    __device__ __forceinline__ float half(int at) const {
        return cuda::widen(f16{static_cast<uint16_t>(two_bytes(at))});
    }
    __device__ __forceinline__ float real(int at) const { return __uint_as_float(word(at)); }
};

__device__ __forceinline__ uint32_t byte_of(const uint32_t *words, int i) {
    return words[i / 4] >> i % 4 * 8 & 255;
}
// Element i of 32 in 16 bytes, the lower nibbles first; or of 32 bytes, of which all nibbles are lower or upper ones.
__device__ __forceinline__ uint32_t nibble_of(const uint32_t *words, int i) {
    return words[i % 16 / 4] >> (i % 4 * 8 + i / 16 * 4) & 15;
}
__device__ __forceinline__ uint32_t nibble_of(const uint32_t *words, int i, bool upper) {
    return words[i / 4] >> (i % 4 * 8 + (upper ? 4 : 0)) & 15;
}

// 4-bit indices into a table of integers, four of them in a word.
__device__ __forceinline__ float level(const uint32_t (&table)[4], uint32_t index) {
    const uint32_t low = __byte_perm(table[0], table[1], index & 7), high = __byte_perm(table[2], table[3], index & 7);
    return static_cast<float>(static_cast<int8_t>((index < 8 ? low : high) & 255));
}

// Those of IQ4_NL and IQ4_XS: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113.
__device__ constexpr uint32_t kIq4Levels[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};

// Twice those of FP4: 0 1 2 3, 4 6 8 12, and their negatives.
__device__ constexpr uint32_t kFp4Table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};

// E4M3: exponent and mantissa at the place of float's; a power of two makes up for the bias, exactly.
__device__ __forceinline__ float e4m3(uint32_t code) {
    const uint32_t magnitude = code & 127;
    const float value = __uint_as_float(magnitude << 20 | code >> 7 << 31) * 0x1p120f;
    return magnitude == 127 ? __int_as_float(0x7fffffff) : value;
}

// w[i] = value(i)
template <typename Value> __device__ __forceinline__ void each(float (&w)[kRun], const Value &value) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        w[i] = value(i);
    }
}

// ---- products ----

template <typename T> struct FewRows {
    T *y;
    const T *x;
    const uint8_t *weight;
    weight_stream::FloatVector bias;
    cuda::RowStrides<2> rows; // y, x
    int64_t n, runs;          // of a row of the weight
    int64_t weight_row;       // bytes
    bool even, x_whole;
};

template <typename K, typename T>
__global__ void __launch_bounds__(kRowWarps *cuda::kWarp, 4) multiply_rows(const __grid_constant__ FewRows<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kRuns = K::kElements / kRun; // of a block
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.y;
    if (n >= a.n) { // the whole warp
        return;
    }
    const uint8_t *const row = a.weight + n * a.weight_row;
    const float bias = a.bias.data == nullptr ? 0.0f : a.bias[n * a.bias.stride];
    for (int64_t first = 0; first < a.rows.count; first += kRowsOfX) {
        const T *x[kRowsOfX];
        int64_t at[2], y_at[kRowsOfX];
#pragma unroll
        for (int m = 0; m < kRowsOfX; ++m) { // rows beyond the last read the first again
            a.rows.locate(first + m < a.rows.count ? first + m : first, at);
            y_at[m] = at[0];
            x[m] = a.x + at[1];
        }
        float sums[kRowsOfX] = {};
        for (int64_t run = lane; run < a.runs; run += cuda::kWarp) {
            float w[kRun];
            K::decode({row + run / kRuns * K::kBytes, K::kBytes % 2 == 0 && a.even}, static_cast<int>(run % kRuns), w);
#pragma unroll
            for (int m = 0; m < kRowsOfX; ++m) {
                if (first + m < a.rows.count) {
#pragma unroll
                    for (int i = 0; i < kRun; i += cuda::kWidth<T>) {
                        float values[cuda::kWidth<T>];
                        cuda::load(values, x[m] + run * kRun + i, a.x_whole, cuda::kWidth<T>);
#pragma unroll
                        for (int e = 0; e < cuda::kWidth<T>; ++e) {
                            sums[m] = fmaf(w[i + e], values[e], sums[m]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kRowsOfX; ++m) {
            const float sum = cuda::warp_reduce<cuda::Sum>(sums[m]) + bias;
            if (lane == 0 && first + m < a.rows.count) {
                cuda::narrow_to(a.y + y_at[m] + n, sum);
            }
        }
    }
}

inline bool is_even(const TensorView &weight) { // rows of bytes
    return reinterpret_cast<uintptr_t>(weight.data) % 2 == 0 && (weight.shape[0] <= 1 || weight.strides[0] % 2 == 0);
}

template <typename K> void multiply(const ExecutionContext &context, const Args &args) {
    const TensorView *const views[] = {&args.y, &args.x};
    const int64_t n = args.weight.size(0);
    const cuda::RowStrides<2> rows(views);
    const weight_stream::FloatVector bias(args.bias,
                                          args.bias.dtype != INFINI_DTYPE_INVALID ? args.bias.strides[0] : 1);
    cuda::with_float32_or_half(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        cuda::launch(context, multiply_rows<K, T>, cuda::grid_x((n + kRowWarps - 1) / kRowWarps),
                     dim3(cuda::kWarp, kRowWarps), 0,
                     FewRows<T>{args.y.as<T>(), args.x.as<const T>(), args.weight.as<const uint8_t>(), bias, rows, n,
                                args.x.size(-1) / kRun, args.weight.strides[0], is_even(args.weight),
                                cuda::vectors_fit(args.x)});
    });
}

// ---- decoded rows ----

template <typename T> struct Decoding {
    T *to;
    const uint8_t *weight;
    Indices ids;
    int64_t to_row, weight_row, rows, runs, count; // rows: of the weight; count: runs of all rows of `to`
    bool even, whole;
};

constexpr int kDecodeThreads = 128;

// A thread for each run.
template <typename K, typename T>
__global__ void __launch_bounds__(kDecodeThreads) decode_rows(const __grid_constant__ Decoding<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kRuns = K::kElements / kRun;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kDecodeThreads + threadIdx.x;
    if (at >= a.count) {
        return;
    }
    const int64_t i = at / a.runs, run = at - i * a.runs, row = a.ids.data == nullptr ? i : a.ids[i];
    float w[kRun];
    if (row >= 0 && row < a.rows) {
        const uint8_t *const block = a.weight + row * a.weight_row + run / kRuns * K::kBytes;
        K::decode({block, K::kBytes % 2 == 0 && a.even}, static_cast<int>(run % kRuns), w);
    } else {
        each(w, [](int) { return __int_as_float(0x7fffffff); });
    }
    cuda::store(a.to + i * a.to_row + run * kRun, w, a.whole, kRun);
}

template <typename K> void decode(const ExecutionContext &context, const RowsToDecode &args) {
    const int64_t runs = args.to.size(1) / kRun, count = args.to.size(0) * runs;
    cuda::with_float32_or_half(args.to.dtype, [&](auto type) {
        using T = decltype(type);
        cuda::launch(context, decode_rows<K, T>, cuda::grid_x((count + kDecodeThreads - 1) / kDecodeThreads),
                     dim3(kDecodeThreads), 0,
                     Decoding<T>{args.to.as<T>(), args.weight.as<const uint8_t>(), args.ids, args.to.strides[0],
                                 args.weight.strides[0], args.weight.size(0), runs, count, is_even(args.weight),
                                 cuda::vectors_fit(args.to)});
    });
}

// The kind of a decoder, to be registered.
template <typename K> KindOnCuda on_cuda(int64_t number) {
    static_assert(K::kElements % kRun == 0);
    return {number, multiply<K>, decode<K>};
}

} // namespace
} // namespace infini::linear_blocks
