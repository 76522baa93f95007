// The CUDA kernel of ssd: a warp for each sequence, head and 8 rows of S, which keeps them in registers and takes the
// tokens in turn; a lane has every 32nd column of S. Limit of a decode step: memory bandwidth, the state read and written
// once. A prompt is bound by the latency of its tokens, one after the other.
#include "sequence_states/sequence_states.cuh"
#include "ssd.h"

namespace infini::ssd {
namespace {

constexpr Checker kRule("ssd");
constexpr int kRows = 8;

template <typename T> struct Heads {
    cuda::Mixed<T> y;
    const T *x, *b, *c;
    cuda::Mixed<T> dt;
    const float *a;
    cuda::MixedOrZero<T> d, dt_bias;
    float *state;
    cuda::DeviceSequences sequences;
    cuda::TokenStrides y_at, x_at, dt_at, b_at, c_at;
    int64_t y_head, x_head, dt_head, a_head, b_group, c_group, state_row, state_head, state_x;
    int64_t heads, tiles, x_columns, b_columns;
    int64_t heads_of_b; // heads for one group of b and c
    float dt_min, dt_max;
    bool dt_softplus;
};

// What a lane holds of a token.
template <int kParts> struct Token {
    float b[kParts], c[kParts], x, dt;

    template <typename T>
    __device__ Token(const Heads<T> &of, int64_t s, int64_t t, int64_t head, int64_t row, int lane) {
        const T *const bs = of.b + of.b_at.at(s, t) + head / of.heads_of_b * of.b_group;
        const T *const cs = of.c + of.c_at.at(s, t) + head / of.heads_of_b * of.c_group;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const int64_t i = p * cuda::kWarp + lane;
            b[p] = i < of.b_columns ? cuda::widen(bs[i]) : 0.0f;
            c[p] = i < of.b_columns ? cuda::widen(cs[i]) : 0.0f;
        }
        x = row < of.x_columns ? cuda::widen(of.x[of.x_at.at(s, t) + head * of.x_head + row]) : 0.0f;
        dt = of.dt[of.dt_at.at(s, t) + head * of.dt_head];
    }
};

template <int kParts, typename T>
__global__ void __launch_bounds__(cuda::kWarp) state_space(const __grid_constant__ Heads<T> of) {
    cuda::grid_dependency_sync();
    const int64_t block = blockIdx.x, head = block / of.tiles % of.heads, s = block / of.tiles / of.heads;
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t first = of.sequences.first(s), last = of.sequences.last(s), slot = of.sequences.slot(s);
    if (first >= last || !of.sequences.has(slot)) { // the whole warp; the state stays
        return;
    }
    const int64_t tile = block % of.tiles * kRows, row = tile + lane % kRows; // the lane's own row
    const int64_t count = min(of.x_columns - tile, static_cast<int64_t>(kRows));
    float *const rows = slot < 0 ? nullptr : of.state + slot * of.state_row + head * of.state_head + tile * of.state_x;
    float state[kRows][kParts];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const int64_t i = p * cuda::kWarp + lane;
            state[r][p] = rows != nullptr && r < count && i < of.b_columns ? rows[r * of.state_x + i] : 0.0f;
        }
    }
    const float a = of.a[head * of.a_head], d = of.d[head], bias = of.dt_bias[head];
    Token<kParts> next(of, s, first, head, row, lane);
    for (int64_t t = first; t < last; ++t) {
        const Token<kParts> token = next;
        if (t + 1 < last) { // is on its way while this one is computed
            next = Token<kParts>(of, s, t + 1, head, row, lane);
        }
        float dt = token.dt + bias;
        dt = of.dt_softplus ? cuda::softplus(dt) : dt;
        dt = dt < of.dt_min ? of.dt_min : dt > of.dt_max ? of.dt_max : dt; // which keeps NaN
        const float decay = expf(dt * a), scaled = dt * token.x;
        float sums[kRows] = {};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float x = __shfl_sync(cuda::kAllLanes, scaled, r);
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
                state[r][p] = fmaf(x, token.b[p], decay * state[r][p]);
                sums[r] = fmaf(state[r][p], token.c[p], sums[r]);
            }
        }
        const float y = fmaf(d, token.x, cuda::column_sums(sums));
        if (lane < count) {
            of.y.set(of.y_at.at(s, t) + head * of.y_head + row, y);
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const int64_t i = p * cuda::kWarp + lane;
            if (rows != nullptr && r < count && i < of.b_columns) {
                rows[r * of.state_x + i] = state[r][p];
            }
        }
    }
}

template <typename T> void launch(const ExecutionContext &context, const Args &args) {
    const TensorView &x = args.x, &b = args.b, &state = args.state;
    const bool keeps = state.dtype;
    const int64_t heads = x.size(-2), tiles = (x.size(-1) + kRows - 1) / kRows;
    const auto head_stride = [](const TensorView &view) { return view.strides[view.ndim - 2]; };
    const cuda::DeviceSequences sequences(args.sequences, x, 2, state);
    const Heads<T> of{cuda::Mixed<T>(args.y),
                      x.as<const T>(),
                      b.as<const T>(),
                      args.c.as<const T>(),
                      cuda::Mixed<T>(args.dt),
                      args.a.as<const float>(),
                      cuda::MixedOrZero<T>(args.d),
                      cuda::MixedOrZero<T>(args.dt_bias),
                      keeps ? state.as<float>() : nullptr,
                      sequences,
                      cuda::TokenStrides(args.y, 2),
                      cuda::TokenStrides(x, 2),
                      cuda::TokenStrides(args.dt, 1),
                      cuda::TokenStrides(b, 2),
                      cuda::TokenStrides(args.c, 2),
                      head_stride(args.y),
                      head_stride(x),
                      args.dt.strides[args.dt.ndim - 1],
                      args.a.strides[0],
                      head_stride(b),
                      head_stride(args.c),
                      keeps ? state.strides[0] : 0,
                      keeps ? state.strides[1] : 0,
                      keeps ? state.strides[2] : 0,
                      heads,
                      tiles,
                      x.size(-1),
                      b.size(-1),
                      heads / b.size(-2),
                      static_cast<float>(args.dt_min),
                      static_cast<float>(args.dt_max),
                      args.dt_softplus};
    cuda::with_parts<1, 2, 4, 8, 16>(kRule, "b", b.size(-1), cuda::kWarp, [&](auto parts) {
        cuda::launch(context, state_space<parts.value, T>, cuda::grid_x(sequences.count * heads * tiles),
                     dim3(cuda::kWarp), 0, of);
    });
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float32_or_half(args.x.dtype, [&](auto x) { launch<decltype(x)>(context, args); });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::ssd
