// The CUDA kernel of conv: an implicit GEMM of w with the windows of x, gathered tile by tile into shared memory. It
// needs no workspace, takes any strides, and has one order of sums for all layouts and batches.
// Limit: float arithmetic outside of the tensor cores. For patch embeddings and audio towers; decode does not use it.
#include "conv.h"
#include "cuda/elementwise_map.cuh"

namespace infini::conv {
namespace {

constexpr int kTile = 64;              // channels, and positions, per block
constexpr int kDepth = 32;             // products per step of the loop
constexpr int kPart = 4;               // channels, and positions, per thread
constexpr int kAcross = kTile / kPart; // threads along the positions, and along the channels
constexpr int kThreads = kAcross * kAcross;
constexpr int kPitch = kTile + 4; // of a row in shared memory; keeps rows aligned to 16 bytes

template <typename T> struct Convolution {
    T *y;
    const T *x, *w, *bias;       // bias may be nullptr
    TensorView of_y, of_x, of_w; // shapes and strides of y, x and w
    int64_t bias_stride;
    cuda::IntDivider<uint64_t> y_sizes[kMaxSpatial], w_sizes[kMaxSpatial]; // of the spatial dimensions
    int spatial;
    int64_t pads[kMaxSpatial], strides[kMaxSpatial], dilations[kMaxSpatial];
    int64_t depth;     // Cin * kernel
    int64_t positions; // of all images together
    unsigned channel_tiles;
};

struct Shared {
    alignas(16) float w[kDepth][kPitch], x[kDepth][kPitch];
    // Per position: its offset in y, and the offset and coordinates of its window in x.
    int64_t y_at[kTile], x_at[kTile], first[kMaxSpatial][kTile];
    // Per product: the offset of its factor in w, and what it adds to a position's offset and coordinates in x.
    int64_t w_at[kDepth], step[kDepth], steps[kMaxSpatial][kDepth];
};

// Divides n in place and returns the remainder.
__device__ __forceinline__ int64_t remainder(const cuda::IntDivider<uint64_t> &by, int64_t &n) {
    const auto quotient = static_cast<int64_t>(by.quotient(static_cast<uint64_t>(n)));
    const int64_t rest = n - quotient * static_cast<int64_t>(by.divisor);
    n = quotient;
    return rest;
}

template <typename T> __device__ void place_position(const Convolution<T> &a, Shared &s, int i, int64_t position) {
    int64_t rest = position, y_at = 0, x_at = 0;
    for (int dim = a.spatial - 1; dim >= 0; --dim) {
        const int64_t index = remainder(a.y_sizes[dim], rest);
        const int64_t first = index * a.strides[dim] - a.pads[dim];
        s.first[dim][i] = first;
        y_at += index * a.of_y.strides[dim + 2];
        x_at += first * a.of_x.strides[dim + 2];
    }
    s.y_at[i] = y_at + rest * a.of_y.strides[0]; // the rest is the image's index
    s.x_at[i] = x_at + rest * a.of_x.strides[0];
}

template <typename T> __device__ void place_product(const Convolution<T> &a, Shared &s, int i, int64_t product) {
    int64_t rest = product, w_at = 0, step = 0;
    for (int dim = a.spatial - 1; dim >= 0; --dim) {
        const int64_t index = remainder(a.w_sizes[dim], rest);
        s.steps[dim][i] = index * a.dilations[dim];
        w_at += index * a.of_w.strides[dim + 2];
        step += index * a.dilations[dim] * a.of_x.strides[dim + 2];
    }
    s.w_at[i] = w_at + rest * a.of_w.strides[1]; // the rest is the input channel's index
    s.step[i] = step + rest * a.of_x.strides[1];
}

template <typename T> __global__ void __launch_bounds__(kThreads) convolve(const __grid_constant__ Convolution<T> a) {
    cuda::grid_dependency_sync();
    INFINI_SHARED(s, Shared);
    const int thread = threadIdx.x;
    const unsigned tile = blockIdx.x / a.channel_tiles;
    const int64_t channel_0 = int64_t{blockIdx.x - tile * a.channel_tiles} * kTile, position_0 = int64_t{tile} * kTile;
    const int channels = static_cast<int>(min(a.of_w.shape[0] - channel_0, int64_t{kTile}));
    const int positions = static_cast<int>(min(a.positions - position_0, int64_t{kTile}));
    if (thread < positions) {
        place_position(a, s, thread, position_0 + thread);
    }
    float sums[kPart][kPart] = {}; // [channel][position]
    const int my_channel = thread / kAcross * kPart, my_position = thread % kAcross * kPart;

    for (int64_t begin = 0; begin < a.depth; begin += kDepth) {
        const int depth = static_cast<int>(min(a.depth - begin, int64_t{kDepth}));
        __syncthreads(); // until all threads have used the tiles
        if (thread < depth) {
            place_product(a, s, thread, begin + thread);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTile * kDepth / kThreads; ++i) {
            const int k = thread % kDepth, channel = thread / kDepth + i * (kThreads / kDepth);
            s.w[k][channel] = k < depth && channel < channels
                                  ? cuda::widen(a.w[(channel_0 + channel) * a.of_w.strides[0] + s.w_at[k]])
                                  : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kTile * kDepth / kThreads; ++i) {
            const int position = thread % kTile, k = thread / kTile + i * (kThreads / kTile);
            bool inside = k < depth && position < positions;
            if (inside) {
                for (int dim = 0; dim < a.spatial; ++dim) {
                    const int64_t at = s.first[dim][position] + s.steps[dim][k];
                    inside = inside && at >= 0 && at < a.of_x.shape[dim + 2];
                }
            }
            s.x[k][position] = inside ? cuda::widen(a.x[s.x_at[position] + s.step[k]]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < kDepth; ++k) {
            float w[kPart], x[kPart];
            cuda::load(w, &s.w[k][my_channel], true, kPart);
            cuda::load(x, &s.x[k][my_position], true, kPart);
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
#pragma unroll
                for (int j = 0; j < kPart; ++j) {
                    sums[i][j] += w[i] * x[j];
                }
            }
        }
    }
    if (a.depth == 0) {
        __syncthreads(); // in the first pass, this barrier also covers the positions
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
        const int channel = my_channel + i;
        if (channel < channels) {
            const float bias = a.bias == nullptr ? 0.0f : cuda::widen(a.bias[(channel_0 + channel) * a.bias_stride]);
            T *y = a.y + (channel_0 + channel) * a.of_y.strides[1];
#pragma unroll
            for (int j = 0; j < kPart; ++j) {
                if (my_position + j < positions) {
                    y[s.y_at[my_position + j]] = cuda::narrow<T>(sums[i][j] + bias);
                }
            }
        }
    }
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    infini::cuda::with_float_type(args.x.dtype, [&](auto value) {
        using T = decltype(value);
        if constexpr (!std::is_same_v<T, double>) { // the check rejects double
            const bool with_bias = args.bias.dtype != INFINI_DTYPE_INVALID;
            Convolution<T> a{};
            a.y = args.y.as<T>();
            a.x = args.x.as<const T>();
            a.w = args.w.as<const T>();
            a.bias = with_bias ? args.bias.as<const T>() : nullptr;
            a.of_y = args.y;
            a.of_x = args.x;
            a.of_w = args.w;
            a.bias_stride = with_bias ? args.bias.strides[0] : 0;
            a.spatial = args.spatial;
            a.depth = 1;
            for (int dim = 1; dim < args.w.ndim; ++dim) {
                a.depth *= args.w.shape[dim];
            }
            for (int dim = 0; dim < args.spatial; ++dim) {
                a.y_sizes[dim] = infini::cuda::IntDivider<uint64_t>(static_cast<uint64_t>(args.y.shape[dim + 2]));
                a.w_sizes[dim] = infini::cuda::IntDivider<uint64_t>(static_cast<uint64_t>(args.w.shape[dim + 2]));
                a.pads[dim] = args.pads[dim];
                a.strides[dim] = args.strides[dim];
                a.dilations[dim] = args.dilations[dim];
            }
            const int64_t channels = args.w.shape[0];
            a.positions = args.y.numel() / channels;
            const int64_t channel_tiles = (channels + kTile - 1) / kTile;
            const int64_t blocks = (a.positions + kTile - 1) / kTile * channel_tiles;
            a.channel_tiles = static_cast<unsigned>(channel_tiles);
            infini::cuda::launch(context, convolve<T>, infini::cuda::grid_x(blocks), kThreads, 0, a);
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::conv
