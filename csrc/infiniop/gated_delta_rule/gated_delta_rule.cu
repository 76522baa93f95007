// The CUDA kernel of gated_delta_rule: a warp for each sequence, head and 8 columns of v, which keeps those columns of S in
// registers and takes the tokens in turn; a lane has every 32nd row of S. Limit of a decode step: memory bandwidth, the
// state read and written once. A prompt is bound by the latency of its tokens, one after the other.
// SASS: delta_rule: LDG.E.128 STG.E.128
#include "cuda/vectors.cuh"
#include "gated_delta_rule.h"
#include "sequence_states/sequence_states.cuh"

namespace infini::gated_delta_rule {
namespace {

constexpr Checker kRule("gated_delta_rule");
constexpr int kColumns = 8;

template <typename T> struct Heads {
    T *y;
    const T *q, *k, *v;
    cuda::Mixed<T> g, beta;
    float *state;
    cuda::DeviceSequences sequences;
    cuda::TokenStrides y_at, q_at, k_at, v_at, g_at, beta_at;
    int64_t y_head, q_head, k_head, v_head, g_head, beta_head, state_row, state_head, state_k;
    int64_t heads, tiles, k_columns, v_columns;
    int64_t heads_of_q; // heads of v for one of q
    float scale;
    bool l2norm, whole; // whole: the state takes vectors
};

// What a lane holds of a token.
template <int kParts> struct Token {
    float q[kParts], k[kParts], v, g, beta;

    template <typename T>
    __device__ Token(const Heads<T> &of, int64_t s, int64_t t, int64_t head, int64_t column, int lane) {
        const T *const qs = of.q + of.q_at.at(s, t) + head / of.heads_of_q * of.q_head;
        const T *const ks = of.k + of.k_at.at(s, t) + head / of.heads_of_q * of.k_head;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            const int64_t i = p * cuda::kWarp + lane;
            q[p] = i < of.k_columns ? cuda::widen(qs[i]) : 0.0f;
            k[p] = i < of.k_columns ? cuda::widen(ks[i]) : 0.0f;
        }
        v = column < of.v_columns ? cuda::widen(of.v[of.v_at.at(s, t) + head * of.v_head + column]) : 0.0f;
        g = of.g[of.g_at.at(s, t) + head * of.g_head];
        beta = of.beta[of.beta_at.at(s, t) + head * of.beta_head];
    }

    __device__ void normalize() {
        float squares[2] = {};
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            squares[0] = fmaf(q[p], q[p], squares[0]);
            squares[1] = fmaf(k[p], k[p], squares[1]);
        }
        const float factor = rsqrtf(cuda::column_sums(squares) + 1e-6f); // of q in even lanes, of k in odd ones
        const float of_q = __shfl_sync(cuda::kAllLanes, factor, 0), of_k = __shfl_sync(cuda::kAllLanes, factor, 1);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            q[p] *= of_q;
            k[p] *= of_k;
        }
    }
};

template <int kParts, typename T>
__global__ void __launch_bounds__(cuda::kWarp) delta_rule(const __grid_constant__ Heads<T> of) {
    cuda::grid_dependency_sync();
    const int64_t block = blockIdx.x, head = block / of.tiles % of.heads, s = block / of.tiles / of.heads;
    const int lane = static_cast<int>(threadIdx.x);
    const int64_t first = of.sequences.first(s), last = of.sequences.last(s), slot = of.sequences.slot(s);
    if (first >= last || !of.sequences.has(slot)) { // the whole warp; the state stays
        return;
    }
    const int64_t tile = block % of.tiles * kColumns, column = tile + lane % kColumns; // the lane's own column
    const int count = static_cast<int>(min(of.v_columns - tile, static_cast<int64_t>(kColumns)));
    const bool whole = of.whole && count == kColumns;
    float *const rows = slot < 0 ? nullptr : of.state + slot * of.state_row + head * of.state_head + tile;
    float state[kParts][kColumns];
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        const int64_t i = p * cuda::kWarp + lane;
        const bool there = rows != nullptr && i < of.k_columns;
        cuda::load(state[p], rows + (there ? i * of.state_k : 0), there && whole, there ? count : 0);
    }
    Token<kParts> next(of, s, first, head, column, lane);
    for (int64_t t = first; t < last; ++t) {
        Token<kParts> token = next;
        if (t + 1 < last) { // is on its way while this one is computed
            next = Token<kParts>(of, s, t + 1, head, column, lane);
        }
        if (of.l2norm) {
            token.normalize();
        }
        const float decay = expf(token.g);
        float sums[kColumns] = {};
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                state[p][c] *= decay;
                sums[c] = fmaf(token.k[p], state[p][c], sums[c]);
            }
        }
        const float correction = token.beta * (token.v - cuda::column_sums(sums));
        float results[kColumns] = {};
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const float u = __shfl_sync(cuda::kAllLanes, correction, c);
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
                state[p][c] = fmaf(token.k[p], u, state[p][c]);
                results[c] = fmaf(token.q[p], state[p][c], results[c]);
            }
        }
        const float y = of.scale * cuda::column_sums(results);
        if (lane < count) {
            cuda::narrow_to(of.y + of.y_at.at(s, t) + head * of.y_head + column, y);
        }
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        const int64_t i = p * cuda::kWarp + lane;
        if (rows != nullptr && i < of.k_columns) {
            cuda::store(rows + i * of.state_k, state[p], whole, count);
        }
    }
}

template <typename T> void launch(const ExecutionContext &context, const Args &args) {
    const TensorView &q = args.q, &v = args.v, &state = args.state;
    const bool keeps = state.dtype;
    const int64_t heads = v.size(-2), tiles = (v.size(-1) + kColumns - 1) / kColumns;
    const auto head_stride = [](const TensorView &view) { return view.strides[view.ndim - 2]; };
    const cuda::DeviceSequences sequences(args.sequences, q, 2, state);
    const Heads<T> of{args.y.as<T>(),
                      q.as<const T>(),
                      args.k.as<const T>(),
                      v.as<const T>(),
                      cuda::Mixed<T>(args.g),
                      cuda::Mixed<T>(args.beta),
                      keeps ? state.as<float>() : nullptr,
                      sequences,
                      cuda::TokenStrides(args.y, 2),
                      cuda::TokenStrides(q, 2),
                      cuda::TokenStrides(args.k, 2),
                      cuda::TokenStrides(v, 2),
                      cuda::TokenStrides(args.g, 1),
                      cuda::TokenStrides(args.beta, 1),
                      head_stride(args.y),
                      head_stride(q),
                      head_stride(args.k),
                      head_stride(v),
                      args.g.strides[args.g.ndim - 1],
                      args.beta.strides[args.beta.ndim - 1],
                      keeps ? state.strides[0] : 0,
                      keeps ? state.strides[1] : 0,
                      keeps ? state.strides[2] : 0,
                      heads,
                      tiles,
                      q.size(-1),
                      v.size(-1),
                      heads / q.size(-2),
                      static_cast<float>(args.scale),
                      args.l2norm,
                      keeps && cuda::vectors_fit(state)};
    cuda::with_parts<1, 2, 4, 8, 16>(kRule, "q", q.size(-1), cuda::kWarp, [&](auto parts) {
        cuda::launch(context, delta_rule<parts.value, T>, cuda::grid_x(sequences.count * heads * tiles),
                     dim3(cuda::kWarp), 0, of);
    });
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float32_or_half(args.q.dtype, [&](auto x) { launch<decltype(x)>(context, args); });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::gated_delta_rule
