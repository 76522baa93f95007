// The CUDA kernels of fused_experts: the pairs of a token and its j-th expert are sorted by expert on the device, so that
// the op can be captured; two grouped products (grouped_product.cuh) with the activation between them; and the weighted
// sum of each token's experts. A token with an index that is no expert becomes NaN.
// Limit: that of the products; for one token of 8 experts the launches of 5 kernels are next.
// SASS: multiply_groups: LDGSTS.E.BYPASS.128
#include "elementwise/scalar_vec.cuh"
#include "fused_experts.h"
#include "grouped_product.cuh"
#include "check.h"
#include "indices.h"

#include "elementwise/formulas.h"

#include <algorithm>

namespace infini::fused_experts {
namespace {

constexpr Checker kRule("fused_experts");
constexpr int64_t kMostTokens = 4096;  // at a time: pairs * (hidden + inner) results are held
constexpr int64_t kMostExperts = 4096; // two numbers of each in shared memory
constexpr int64_t kAlignment = 256;
constexpr int kSortThreads = 1024, kElementThreads = 256;

// ---- sorting ----

struct Sorting {
    Indices index; // [tokens, k]; stride: of tokens
    int64_t choice_stride, k;
    int64_t first_expert;
    int pairs, experts; // of this rank
    int rows;           // of a tile
    int *sorted;
    Tile *tiles;
    int *count; // of tiles
};

// An index as an expert of this rank, or -1.
__device__ __forceinline__ int expert_of(const Sorting &a, int pair) {
    const int64_t e = a.index.at(pair / a.k * a.index.stride + pair % a.k * a.choice_stride);
    return static_cast<int>(own_expert(e, a.first_expert, a.experts));
}

// One block. In shared memory, for each expert: its pairs, then where its next pair goes; and its tiles, likewise.
__global__ void __launch_bounds__(kSortThreads) sort_pairs(const __grid_constant__ Sorting a) {
    cuda::grid_dependency_sync();
    int *const places = cuda::dynamic_shared<int>(), *const tiles = places + a.experts;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % cuda::kWarp;
    for (int e = thread; e < a.experts; e += kSortThreads) {
        places[e] = 0;
    }
    __syncthreads();
    for (int pair = thread; pair < a.pairs; pair += kSortThreads) {
        if (const int e = expert_of(a, pair); e >= 0) {
            atomicAdd(&places[e], 1);
        }
    }
    __syncthreads();
    if (thread < cuda::kWarp) { // sums of what is before each expert, 32 experts at a time
        int pairs_before = 0, tiles_before = 0;
        for (int first = 0; first < a.experts; first += cuda::kWarp) {
            const int e = first + lane, own = e < a.experts ? places[e] : 0, own_tiles = (own + a.rows - 1) / a.rows;
            int up_to = own, tiles_up_to = own_tiles;
#pragma unroll
            for (int distance = 1; distance < cuda::kWarp; distance *= 2) {
                const int other = __shfl_up_sync(cuda::kAllLanes, up_to, distance);
                const int other_tiles = __shfl_up_sync(cuda::kAllLanes, tiles_up_to, distance);
                up_to += lane >= distance ? other : 0;
                tiles_up_to += lane >= distance ? other_tiles : 0;
            }
            if (e < a.experts) {
                const int begin = pairs_before + up_to - own;
                places[e] = begin;
                tiles[e] = tiles_before + tiles_up_to - own_tiles;
                for (int i = 0; i < own_tiles; ++i) {
                    a.tiles[tiles[e] + i] = {e, begin + i * a.rows, begin + min(own, (i + 1) * a.rows)};
                }
            }
            pairs_before += __shfl_sync(cuda::kAllLanes, up_to, cuda::kWarp - 1);
            tiles_before += __shfl_sync(cuda::kAllLanes, tiles_up_to, cuda::kWarp - 1);
        }
        if (lane == 0) {
            *a.count = tiles_before;
        }
    }
    __syncthreads();
    for (int pair = thread; pair < a.pairs; pair += kSortThreads) {
        if (const int e = expert_of(a, pair); e >= 0) {
            a.sorted[atomicAdd(&places[e], 1)] = pair; // in any order: each pair's row has its own bits
        }
    }
}

// ---- elements ----

template <typename T> struct Inputs {
    T *to; // [pairs, hidden]
    const T *x, *weights;
    int64_t x_row, token, choice, k, hidden; // token, choice: strides of weights
    bool wide;                               // weights are float32
};

template <typename T> __device__ __forceinline__ float weight_at(const T *weights, bool wide, int64_t at) {
    return wide ? reinterpret_cast<const float *>(weights)[at] : cuda::widen(weights[at]);
}

// A block for each pair.
template <typename T> __global__ void __launch_bounds__(kElementThreads) scale_x(const __grid_constant__ Inputs<T> a) {
    cuda::grid_dependency_sync();
    const int64_t pair = blockIdx.x, t = pair / a.k;
    const float weight = weight_at(a.weights, a.wide, t * a.token + pair % a.k * a.choice);
    for (int64_t i = threadIdx.x; i < a.hidden; i += kElementThreads) {
        cuda::narrow_to(a.to + pair * a.hidden + i, cuda::widen(a.x[t * a.x_row + i]) * weight);
    }
}

template <typename T> struct Gates {
    T *y;          // [pairs, inner]
    const T *both; // [pairs, 2 * inner], or inner without gate
    int64_t inner, size;
    Activation activation;
    bool interleaved;
    float alpha, limit;
};

template <typename T> __global__ void __launch_bounds__(kElementThreads) gate(const __grid_constant__ Gates<T> a) {
    cuda::grid_dependency_sync();
    using namespace nvidia;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
    if (at >= a.size) {
        return;
    }
    if (a.activation == Activation::kRelu2NoMul) {
        const float up = max(0.0f, cuda::widen(a.both[at]));
        cuda::narrow_to(a.y + at, up * up);
        return;
    }
    const int64_t pair = at / a.inner, i = at - pair * a.inner;
    const T *const row = a.both + pair * 2 * a.inner;
    const float g = cuda::widen(row[a.interleaved ? 2 * i : i]);
    const float u = cuda::widen(row[a.interleaved ? 2 * i + 1 : a.inner + i]);
    // min and max return their second argument if either is NaN: NaN in gate or up stays.
    const float below = min(a.limit, g), within = max(-a.limit, min(a.limit, u));
    float result = 0;
    switch (a.activation) {
    case Activation::kGeglu:
        result = formula::geglu::of<T>(u, g);
        break;
    case Activation::kSwigluOai:
        result = quotient_for<T>(below, 1.0f + exp_for<T>(-a.alpha * below)) * (within + 1.0f);
        break;
    case Activation::kSwigluClamped:
        result = formula::swiglu::of<T>(within, below);
        break;
    default:
        result = formula::swiglu::of<T>(u, g);
    }
    cuda::narrow_to(a.y + at, result);
}

template <typename T> struct Results {
    T *y; // [tokens, hidden]
    const T *weights, *results;
    Indices index;
    int64_t y_row, token, choice, index_choice, k, hidden; // token, choice: strides of weights
    int64_t first_expert, experts, total;                  // experts: of this rank
    bool wide, weighted;
};

// A block for each token.
template <typename T>
__global__ void __launch_bounds__(kElementThreads) sum_experts(const __grid_constant__ Results<T> a) {
    cuda::grid_dependency_sync();
    const int64_t t = blockIdx.x;
    bool right = true;
    for (int64_t j = 0; j < a.k; ++j) {
        const int64_t e = a.index.at(t * a.index.stride + j * a.index_choice);
        right = right && e >= 0 && e < a.total;
    }
    for (int64_t i = threadIdx.x; i < a.hidden; i += kElementThreads) {
        float sum = right ? 0.0f : __int_as_float(0x7fffffff);
        for (int64_t j = 0; right && j < a.k; ++j) {
            if (own_expert(a.index.at(t * a.index.stride + j * a.index_choice), a.first_expert, a.experts) < 0) {
                continue;
            }
            const float weight = a.weighted ? weight_at(a.weights, a.wide, t * a.token + j * a.choice) : 1.0f;
            sum += weight * cuda::widen(a.results[(t * a.k + j) * a.hidden + i]);
        }
        cuda::narrow_to(a.y + t * a.y_row + i, sum);
    }
}

// ---- the op ----

// Where things are in the workspace, for so many tokens at a time.
struct Plan {
    int64_t tokens, pairs, n, inner, hidden;
    int sets; // of 8 rows of x in a tile
    int64_t most_tiles;
    int64_t tiles_at, both_at, gated_at, scaled_at, bytes; // the count of tiles is first, then the sorted pairs

    explicit Plan(const Args &args)
        : tokens(std::min(args.x.size(0), kMostTokens)), pairs(tokens * args.index.size(1)),
          n(args.gate_up.data.size(1)), inner(args.down.data.size(2)), hidden(args.x.size(1)) {
        const int64_t experts = args.gate_up.data.size(0);
        sets = pairs <= 2 * kXRows * std::min(experts, pairs) ? 1 : kManySets;
        most_tiles = pairs / (sets * kXRows) + std::min(experts, pairs);
        const auto size = static_cast<int64_t>(size_of(args.x.dtype));
        const auto after = [](int64_t at, int64_t elements, int64_t each) {
            return (at + elements * each + kAlignment - 1) / kAlignment * kAlignment;
        };
        tiles_at = after(0, 1 + pairs, sizeof(int));
        both_at = after(tiles_at, most_tiles, sizeof(Tile));
        gated_at = after(both_at, pairs * std::max(n, hidden), size); // of both, then of the experts' results
        scaled_at = after(gated_at, pairs * inner, size);
        bytes = after(scaled_at, args.weights_on_input ? pairs * hidden : 0, size);
    }
};

void check_form(const char *name, const Weights &weights) {
    if (weights.scales.dtype != INFINI_DTYPE_INVALID || weights.kind != nullptr) {
        kRule.fail(INFINI_STATUS_NOT_IMPLEMENTED, name, "be in the dtype of x on CUDA", "quantized weights");
    }
}

template <typename T> void compute(const ExecutionContext &context, const Args &args, const Plan &plan) {
    const int64_t tokens = args.x.size(0), k = args.index.size(1), pairs = tokens * k;
    const int64_t experts = args.gate_up.data.size(0), hidden = plan.hidden;
    auto *const memory = static_cast<char *>(args.workspace);
    auto *const count = reinterpret_cast<int *>(memory);
    auto *const tiles = reinterpret_cast<Tile *>(memory + plan.tiles_at);
    T *const both = reinterpret_cast<T *>(memory + plan.both_at), *const gated =
                                                                      reinterpret_cast<T *>(memory + plan.gated_at);
    T *const scaled = reinterpret_cast<T *>(memory + plan.scaled_at);
    const Indices index(args.index);
    const bool wide = args.weights.dtype == INFINI_DTYPE_F32;
    const int64_t token = args.weights.strides[0], choice = args.weights.strides[1];
    if (pairs > 0 && experts > 0) {
        const Sorting sorting{index,
                              args.index.strides[1],
                              k,
                              args.first_expert,
                              static_cast<int>(pairs),
                              static_cast<int>(experts),
                              plan.sets * kXRows,
                              count + 1,
                              tiles,
                              count};
        cuda::launch(context, sort_pairs, dim3(1), dim3(kSortThreads), static_cast<size_t>(2 * experts) * sizeof(int),
                     sorting);
        if (args.weights_on_input && hidden > 0) {
            cuda::launch(context, scale_x<T>, cuda::grid_x(pairs), dim3(kElementThreads), 0,
                         Inputs<T>{scaled, args.x.as<const T>(), args.weights.as<const T>(), args.x.strides[0], token,
                                   choice, k, hidden, wide});
        }
        const Groups groups{count + 1, tiles, count, static_cast<unsigned>(plan.most_tiles)};
        const auto multiply_by = [&](const Weights &weights, T *y, const T *x, int64_t x_row, int64_t divisor,
                                     bool x_whole) {
            const TensorView &data = weights.data;
            const bool columns = data.shape[2] > 1 && data.strides[2] != 1;
            const bool biased = weights.bias.dtype != INFINI_DTYPE_INVALID;
            TensorView rows = data;
            if (columns) { // as vectors_fit has it: the last dimension dense
                std::swap(rows.shape[1], rows.shape[2]);
                std::swap(rows.strides[1], rows.strides[2]);
            }
            multiply<T>(context,
                        {y, x, data.as<const T>(), biased ? weights.bias.as<const T>() : nullptr, x_row, divisor,
                         data.strides[0], rows.strides[1], biased ? weights.bias.strides[0] : 0, data.shape[1],
                         data.shape[2], x_whole, cuda::vectors_fit(rows), groups},
                        plan.sets, columns);
        };
        const auto whole = [](int64_t columns) { return columns * static_cast<int64_t>(sizeof(T)) % 16 == 0; };
        if (args.weights_on_input) {
            multiply_by(args.gate_up, both, scaled, hidden, 1, whole(hidden));
        } else {
            multiply_by(args.gate_up, both, args.x.as<const T>(), args.x.strides[0], k, cuda::vectors_fit(args.x));
        }
        if (const int64_t size = pairs * plan.inner; size > 0) {
            const int64_t blocks = (size + kElementThreads - 1) / kElementThreads;
            cuda::launch(context, gate<T>, cuda::grid_x(blocks), dim3(kElementThreads), 0,
                         Gates<T>{gated, both, plan.inner, size, static_cast<Activation>(args.activation),
                                  args.interleaved, static_cast<float>(args.alpha), static_cast<float>(args.limit)});
        }
        multiply_by(args.down, both, gated, plan.inner, 1, whole(plan.inner));
    }
    cuda::launch(context, sum_experts<T>, cuda::grid_x(tokens), dim3(kElementThreads), 0,
                 Results<T>{args.y.as<T>(), args.weights.as<const T>(), both, index, args.y.strides[0], token, choice,
                            args.index.strides[1], k, hidden, args.first_expert, experts, all_experts(args), wide,
                            !args.weights_on_input});
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    check_form("gate_up", args.gate_up);
    check_form("down", args.down);
    if (args.gate_up.data.size(0) > kMostExperts) {
        kRule.fail(INFINI_STATUS_NOT_IMPLEMENTED, "gate_up", message("have at most ", kMostExperts, " experts on CUDA"),
                   message(args.gate_up.data.size(0)));
    }
    const Plan plan(args);
    Args part = args;
    for (int64_t first = 0; first < args.x.size(0); first += plan.tokens) {
        for (auto [view, of] : {std::pair(&part.x, &args.x), std::pair(&part.y, &args.y),
                                std::pair(&part.index, &args.index), std::pair(&part.weights, &args.weights)}) {
            view->data = of->as<char>() + first * of->strides[0] * static_cast<int64_t>(size_of(of->dtype));
            view->shape[0] = std::min(plan.tokens, args.x.size(0) - first);
        }
        cuda::with_float32_or_half(args.x.dtype, [&](auto x) { compute<decltype(x)>(context, part, plan); });
    }
}

size_t workspace_on_cuda(const ExecutionContext &, const Args &args) {
    return static_cast<size_t>(Plan(args).bytes);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda, workspace_on_cuda};

} // namespace
} // namespace infini::fused_experts
