// The CUDA kernel of selective_scan: 4 lanes for each sequence and channel, or 32 where S is longer than 16, which keep its
// S in registers and take the tokens in turn; a lane has every 4th or 32nd value of S. Limit: the exponentials, one for
// each channel, token and value of S, where channels fill the GPU; else the latency of the tokens, one after the other.
#include "selective_scan.h"
#include "sequence_states/sequence_states.cuh"

namespace infini::selective_scan {
namespace {

constexpr Checker kRule("selective_scan");
constexpr int kThreads = 128;
constexpr int kFewLanes = 4, kFewParts = 4; // of a channel: for S of up to 16 values

template <typename T> struct Channels {
    cuda::Mixed<T> y;
    const T *x, *b, *c;
    cuda::Mixed<T> dt;
    const float *a;
    cuda::MixedOrZero<T> d, dt_bias;
    const T *z;
    float *state;
    cuda::DeviceSequences sequences;
    cuda::TokenStrides y_at, x_at, dt_at, b_at, c_at, z_at;
    int64_t dt_channel, a_channel, z_channel, state_row, state_channel;
    int64_t channels, columns;
    int64_t tiles; // blocks of a sequence
    bool dt_softplus;
};

// What a lane holds of a token.
template <int kLanes, int kParts> struct Token {
    float b[kParts], c[kParts], x, dt, z;

    template <typename T> __device__ Token(const Channels<T> &of, int64_t s, int64_t t, int64_t channel, int lane) {
        const T *const bs = of.b + of.b_at.at(s, t), *const cs = of.c + of.c_at.at(s, t);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const int64_t i = p * kLanes + lane;
            b[p] = i < of.columns ? cuda::widen(bs[i]) : 0.0f;
            c[p] = i < of.columns ? cuda::widen(cs[i]) : 0.0f;
        }
        x = cuda::widen(of.x[of.x_at.at(s, t) + channel]);
        dt = of.dt[of.dt_at.at(s, t) + channel * of.dt_channel];
        z = of.z == nullptr ? 0.0f : cuda::widen(of.z[of.z_at.at(s, t) + channel * of.z_channel]);
    }
};

template <int kLanes, int kParts, typename T>
__global__ void __launch_bounds__(kThreads) scan(const __grid_constant__ Channels<T> of) {
    cuda::grid_dependency_sync();
    const int64_t block = blockIdx.x, s = block / of.tiles;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int64_t own = block % of.tiles * (kThreads / kLanes) + threadIdx.x / kLanes;
    const int64_t first = of.sequences.first(s), last = of.sequences.last(s), slot = of.sequences.slot(s);
    if (first >= last || !of.sequences.has(slot)) { // the whole block; the state stays
        return;
    }
    const bool mine = own < of.channels; // the lanes of others take part in the sums
    const int64_t channel = mine ? own : of.channels - 1;
    float *const row = slot < 0 || !mine ? nullptr : of.state + slot * of.state_row + channel * of.state_channel;
    float state[kParts], a[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        const int64_t i = p * kLanes + lane;
        state[p] = row != nullptr && i < of.columns ? row[i] : 0.0f;
        a[p] = i < of.columns ? of.a[channel * of.a_channel + i] : 0.0f;
    }
    const float d = of.d[channel], bias = of.dt_bias[channel];
    Token<kLanes, kParts> next(of, s, first, channel, lane);
    for (int64_t t = first; t < last; ++t) {
        const Token<kLanes, kParts> token = next;
        if (t + 1 < last) { // is on its way while this one is computed
            next = Token<kLanes, kParts>(of, s, t + 1, channel, lane);
        }
        const float dt = of.dt_softplus ? cuda::softplus(token.dt + bias) : token.dt + bias;
        const float scaled = dt * token.x;
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            state[p] = fmaf(scaled, token.b[p], expf(dt * a[p]) * state[p]);
            sum = fmaf(state[p], token.c[p], sum);
        }
        float y = fmaf(d, token.x, cuda::warp_reduce<cuda::Sum, kLanes>(sum));
        if (mine && lane == 0) {
            y = of.z == nullptr ? y : y * (token.z / (1.0f + expf(-token.z)));
            of.y.set(of.y_at.at(s, t) + channel, y);
        }
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        const int64_t i = p * kLanes + lane;
        if (row != nullptr && i < of.columns) {
            row[i] = state[p];
        }
    }
}

template <typename T> void launch(const ExecutionContext &context, const Args &args) {
    const TensorView &x = args.x, &a = args.a, &state = args.state;
    const bool keeps = state.dtype, gated = args.z.dtype;
    const int64_t channels = x.size(-1), columns = a.shape[1];
    const bool few = columns <= kFewLanes * kFewParts;
    const int64_t of_block = kThreads / (few ? kFewLanes : cuda::kWarp), tiles = (channels + of_block - 1) / of_block;
    const cuda::DeviceSequences sequences(args.sequences, x, 1, state);
    const Channels<T> of{cuda::Mixed<T>(args.y),
                         x.as<const T>(),
                         args.b.as<const T>(),
                         args.c.as<const T>(),
                         cuda::Mixed<T>(args.dt),
                         a.as<const float>(),
                         cuda::MixedOrZero<T>(args.d),
                         cuda::MixedOrZero<T>(args.dt_bias),
                         gated ? args.z.as<const T>() : nullptr,
                         keeps ? state.as<float>() : nullptr,
                         sequences,
                         cuda::TokenStrides(args.y, 1),
                         cuda::TokenStrides(x, 1),
                         cuda::TokenStrides(args.dt, 1),
                         cuda::TokenStrides(args.b, 1),
                         cuda::TokenStrides(args.c, 1),
                         cuda::TokenStrides(gated ? args.z : x, 1),
                         args.dt.strides[args.dt.ndim - 1],
                         a.strides[0],
                         gated ? args.z.strides[args.z.ndim - 1] : 0,
                         keeps ? state.strides[0] : 0,
                         keeps ? state.strides[1] : 0,
                         channels,
                         columns,
                         tiles,
                         args.dt_softplus};
    const auto call = [&](auto kernel) {
        cuda::launch(context, kernel, cuda::grid_x(sequences.count * tiles), dim3(kThreads), 0, of);
    };
    if (few) {
        call(scan<kFewLanes, kFewParts, T>);
    } else {
        cuda::with_parts<1, 2, 4, 8>(kRule, "a", columns, cuda::kWarp,
                                     [&](auto parts) { call(scan<cuda::kWarp, parts.value, T>); });
    }
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float32_or_half(args.x.dtype, [&](auto x) { launch<decltype(x)>(context, args); });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::selective_scan
