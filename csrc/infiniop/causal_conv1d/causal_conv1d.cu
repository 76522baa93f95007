// The CUDA kernel of causal_conv1d: a thread for each channel and some tokens, with the tokens before them in registers.
// The thread of a sequence's first token also replaces the channel's state, so no other reads it. Limit: memory
// bandwidth, x read once and y written once.
#include "causal_conv1d.h"
#include "sequence_states/sequence_states.cuh"

namespace infini::causal_conv1d {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kTokens = 16;     // of a thread: its first tokens' past is read once more
constexpr int64_t kFewTokens = 512; // up to which a thread takes one token alone

template <typename T, typename W> struct Convolution {
    T *y;
    const T *x;
    const W *weight, *bias;
    T *state;
    cuda::DeviceSequences sequences;
    cuda::TokenStrides y_at, x_at;
    int64_t weight_channel, weight_tap, bias_stride, state_row, state_channel, state_column;
    int64_t channels, columns, tiles;
    int64_t tokens; // of a thread
    int64_t parts;  // of a sequence of a batch
    int width;
    bool silu;
};

// A channel; kTaps: the width, or more.
template <int kTaps, typename T, typename W> struct Channel {
    const Convolution<T, W> &of;
    const T *x; // of token 0 of sequence 0
    T *y, *state;
    float weight[kTaps], bias; // the newest last; before the width: 0

    __device__ explicit Channel(const Convolution<T, W> &all, int64_t c)
        : of(all), x(all.x + c), y(all.y + c), state(all.state + c * all.state_channel) {
#pragma unroll
        for (int i = 0; i < kTaps; ++i) {
            const int tap = i - (kTaps - of.width);
            weight[i] = tap < 0 ? 0.0f : cuda::widen(of.weight[c * of.weight_channel + tap * of.weight_tap]);
        }
        bias = of.bias == nullptr ? 0.0f : cuda::widen(of.bias[c * of.bias_stride]);
    }

    // Tokens [begin, end) of sequence s; `first` and `last` bound the sequence.
    __device__ void convolve(int64_t s, int64_t first, int64_t last, int64_t begin, int64_t end) const {
        const int64_t slot = of.sequences.slot(s), head = min(last, first + of.width - 1);
        if (!of.sequences.has(slot)) {
            return;
        }
        const bool is_first = begin == first;
        begin = is_first ? begin : max(begin, head);
        end = is_first ? max(end, head) : end;
        T *const row = slot < 0 || of.state == nullptr ? nullptr : state + slot * of.state_row;
        float window[kTaps];
#pragma unroll
        for (int i = 0; i < kTaps - 1; ++i) {
            const int64_t t = begin - (kTaps - 1) + i;
            window[i] = i < kTaps - of.width ? 0.0f
                        : t >= first         ? cuda::widen(x[of.x_at.at(s, t)])
                        : row != nullptr     ? cuda::widen(row[(of.columns + t - first) * of.state_column])
                                             : 0.0f;
        }
        if (is_first && row != nullptr) { // a value moves to the left, so it is read before it is written
            for (int64_t j = 0; j < of.columns; ++j) {
                const int64_t t = last - of.columns + j;
                row[j * of.state_column] =
                    t >= first ? x[of.x_at.at(s, t)] : row[(of.columns + t - first) * of.state_column];
            }
        }
        for (int64_t t = begin; t < end; ++t) {
            window[kTaps - 1] = cuda::widen(x[of.x_at.at(s, t)]);
            float sum = bias;
#pragma unroll
            for (int i = 0; i < kTaps; ++i) {
                if (i >= kTaps - of.width) { // not 0 * x: x may be infinite
                    sum = fmaf(weight[i], window[i], sum);
                }
            }
            cuda::narrow_to(y + of.y_at.at(s, t), of.silu ? sum / (1.0f + expf(-sum)) : sum);
#pragma unroll
            for (int i = 0; i < kTaps - 1; ++i) {
                window[i] = window[i + 1];
            }
        }
    }
};

template <int kTaps, typename T, typename W>
__global__ void __launch_bounds__(kThreads) convolve(const __grid_constant__ Convolution<T, W> of) {
    cuda::grid_dependency_sync();
    const int64_t block = blockIdx.x, part = block / of.tiles;
    const int64_t c = block % of.tiles * kThreads + threadIdx.x;
    if (c >= of.channels) {
        return;
    }
    const Channel<kTaps, T, W> channel(of, c);
    const cuda::DeviceSequences &sequences = of.sequences;
    if (sequences.offsets.data == nullptr) {
        const int64_t begin = part % of.parts * of.tokens;
        channel.convolve(part / of.parts, 0, sequences.tokens, begin, min(begin + of.tokens, sequences.tokens));
        return;
    }
    int64_t at = part * of.tokens;
    const int64_t end = min(at + of.tokens, sequences.tokens);
    for (int64_t s = sequences.of_token(at); s < sequences.count && at < end; ++s) {
        const int64_t first = sequences.first(s), last = sequences.last(s);
        if (first <= at && at < last) {
            channel.convolve(s, first, last, at, min(end, last));
            at = min(end, last);
        }
    }
}

template <typename T, typename W> void launch(const ExecutionContext &context, const Args &args) {
    const TensorView &x = args.x, &weight = args.weight, &state = args.state;
    const bool packed = args.sequences.offsets.dtype;
    const cuda::DeviceSequences sequences(args.sequences, x, 1, state);
    const int64_t channels = x.size(-1), tiles = (channels + kThreads - 1) / kThreads;
    const int64_t all = packed ? sequences.tokens : sequences.count * sequences.tokens;
    const int64_t tokens = all <= kFewTokens ? 1 : kTokens, parts = (sequences.tokens + tokens - 1) / tokens;
    const bool keeps = state.dtype, biased = args.bias.dtype;
    const Convolution<T, W> of{args.y.as<T>(),
                               x.as<const T>(),
                               weight.as<const W>(),
                               biased ? args.bias.as<const W>() : nullptr,
                               keeps ? state.as<T>() : nullptr,
                               sequences,
                               cuda::TokenStrides(args.y, 1),
                               cuda::TokenStrides(x, 1),
                               weight.strides[0],
                               weight.strides[1],
                               biased ? args.bias.strides[0] : 0,
                               keeps ? state.strides[0] : 0,
                               keeps ? state.strides[1] : 0,
                               keeps ? state.strides[2] : 0,
                               channels,
                               keeps ? state.shape[2] : 0,
                               tiles,
                               tokens,
                               parts,
                               static_cast<int>(weight.shape[1]),
                               args.silu};
    const dim3 grid = cuda::grid_x((packed ? 1 : sequences.count) * parts * tiles);
    const auto kernel = of.width <= 4 ? convolve<4, T, W> : convolve<kMaxWidth, T, W>;
    cuda::launch(context, kernel, grid, dim3(kThreads), 0, of);
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float32_or_half(args.x.dtype, [&](auto x) {
        if (args.weight.dtype == args.x.dtype) {
            launch<decltype(x), decltype(x)>(context, args);
        } else {
            launch<decltype(x), float>(context, args);
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::causal_conv1d
