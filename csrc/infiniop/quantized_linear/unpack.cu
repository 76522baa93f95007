// The kernel that unpacks integers: a thread reads eight elements at a time (8 bytes of int8 or 4 of int4), so that
// adjacent threads write adjacent 16 bytes of a half type; four such loads are in flight. Limit: memory bandwidth: for
// a half type 3 bytes per element with int8, 2.5 with int4, plus the scales.
// SASS: unpack_rows: LDG.E.64 STG.E.128
#include "unpack.h"

#include "cuda/launch.cuh"
#include "cuda/half2.cuh"
#include "cuda/packed32.cuh"

namespace infini::unpack {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8; // elements per thread and load
constexpr int kAhead = 4;    // loads in flight

template <typename T> using Unpacked = cuda::Vector<uint32_t, kElements * sizeof(T) / 4>;

template <typename T> struct Bytes {
    using To = T;
    static constexpr int kVectorBytes = kElements;
    using Packed = cuda::Packed32<uint8_t, kVectorBytes>;

    __device__ __forceinline__ Unpacked<T> unpack(const Packed &packed, int64_t, int64_t) const {
        Unpacked<T> out;
        if constexpr (std::is_same_v<T, float>) {
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                const auto value = static_cast<int8_t>(packed.values[i / 4] >> 8 * (i % 4));
                out.values[i] = __float_as_uint(static_cast<float>(value));
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                out.values[2 * i] = cuda::int8x2_to_half2<T, 0>(packed.values[i]);
                out.values[2 * i + 1] = cuda::int8x2_to_half2<T, 2>(packed.values[i]);
            }
        }
        return out;
    }
};

// S: the type of scales and zeros.
template <typename T, typename S> struct Nibbles {
    using To = T;
    static constexpr int kVectorBytes = kElements / 2;
    using Packed = cuda::Packed32<uint8_t, kVectorBytes>;

    const S *scales, *zeros;
    int64_t scales_row, zeros_row;
    int group_shift;

    __device__ __forceinline__ Unpacked<T> unpack(const Packed &packed, int64_t row, int64_t vector) const {
        const int64_t group = vector * kElements >> group_shift; // a group has at least 32 elements
        const float scale = cuda::widen(scales[row * scales_row + group]);
        const float zero = zeros != nullptr ? cuda::widen(zeros[row * zeros_row + group]) : 0.0f;
        float values[kElements];
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            // 0x4b000000 is 2^23, from which on floats are consecutive integers
            const float biased = __uint_as_float((packed.values[0] >> 4 * i & 15u) | 0x4b000000u);
            values[i] = __fmaf_rn(biased - 8388616.0f, scale, zero);
        }
        Unpacked<T> out;
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                out.values[i] = __float_as_uint(values[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kElements / 2; ++i) {
                out.values[i] = cuda::pack_half2<T>(values[2 * i], values[2 * i + 1]);
            }
        }
        return out;
    }
};

template <typename F> struct Rows {
    const uint8_t *from;
    int64_t from_row, row_bytes;
    bool whole; // a thread's bytes can be read in one access
    uint32_t *to;
    int64_t to_row, rows; // to_row: row stride in words
    int64_t vectors;      // per row of `to`
    F format;
};

template <typename F> __global__ void __launch_bounds__(kThreads) unpack_rows(const __grid_constant__ Rows<F> a) {
    cuda::grid_dependency_sync();
    constexpr int kWords = sizeof(Unpacked<typename F::To>) / 4, kPart = kWords < 4 ? kWords : 4;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= a.rows) {
        return;
    }
    const uint8_t *const from = a.from + row * a.from_row;
    uint32_t *const to = a.to + row * a.to_row;
    for (int64_t first = threadIdx.x; first < a.vectors; first += static_cast<int64_t>(blockDim.x) * kAhead) {
        typename F::Packed packed[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int64_t byte = (first + static_cast<int64_t>(i) * blockDim.x) * F::kVectorBytes,
                          left = a.row_bytes - byte;
            packed[i] = cuda::load_packed32<uint8_t, F::kVectorBytes>(
                from + byte, a.whole && left >= F::kVectorBytes,
                static_cast<int>(left < F::kVectorBytes ? left : F::kVectorBytes));
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int64_t vector = first + static_cast<int64_t>(i) * blockDim.x;
            if (vector < a.vectors) {
                Unpacked<typename F::To> out{};
                if (vector * F::kVectorBytes < a.row_bytes) {
                    out = a.format.unpack(packed[i], row, vector);
                }
#pragma unroll
                for (int part = 0; part < kWords; part += kPart) {
                    cuda::Vector<uint32_t, kPart> words;
#pragma unroll
                    for (int word = 0; word < kPart; ++word) {
                        words.values[word] = out.values[part + word];
                    }
                    cuda::store_vectorized(to + vector * kWords + part, words);
                }
            }
        }
    }
}

template <typename F> void launch(const ExecutionContext &context, const Args &args, const F &format) {
    const TensorView &from = args.from, &to = args.to;
    const auto size = static_cast<int64_t>(size_of(to.dtype));
    const auto fits = [](int64_t value) { return value % F::kVectorBytes == 0; };
    const Rows<F> rows{from.as<const uint8_t>(),
                       from.stride(0),
                       from.size(1),
                       fits(static_cast<int64_t>(reinterpret_cast<uintptr_t>(from.data))) &&
                           (fits(from.stride(0)) || from.size(0) <= 1),
                       to.as<uint32_t>(),
                       to.stride(0) * size / 4,
                       to.size(0),
                       padded(to.size(1)) / kElements,
                       format};
    int64_t threads = (rows.vectors + kAhead - 1) / kAhead;
    threads = threads < kThreads ? (threads + 31) / 32 * 32 : kThreads;
    const int64_t in_block = kThreads / threads;
    cuda::launch(context, unpack_rows<F>, cuda::grid_x((rows.rows + in_block - 1) / in_block),
                 dim3(static_cast<unsigned>(threads), static_cast<unsigned>(in_block)), 0, rows);
}

template <typename T, typename S> Nibbles<T, S> nibbles(const Args &args) {
    const int64_t groups = args.scales.size(1), group = groups > 0 ? args.to.size(1) / groups : 32;
    const bool has_zeros = args.zeros.dtype != INFINI_DTYPE_INVALID;
    return {args.scales.as<const S>(), has_zeros ? args.zeros.as<const S>() : nullptr, args.scales.stride(0),
            has_zeros ? args.zeros.stride(0) : 0,
            group == 32   ? 5
            : group == 64 ? 6
                          : 7}; // linear_int4's rules allow no other
}

} // namespace

void run(const ExecutionContext &context, const Args &args) {
    cuda::with_float_type(args.to.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) {
            if (args.from.dtype == INFINI_DTYPE_I8) {
                launch(context, args, Bytes<T>{});
            } else if (args.scales.dtype == INFINI_DTYPE_F32) {
                launch(context, args, nibbles<T, float>(args));
            } else {
                launch(context, args, nibbles<T, T>(args));
            }
        }
    });
}

} // namespace infini::unpack
