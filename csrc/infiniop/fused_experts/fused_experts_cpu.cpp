// The CPU kernels of fused_experts around its products: inputs times weights, the activation of gate and up, and the
// weighted sum of each token's experts, in float.
// Limit: memory bandwidth of inputs, of gate and up, and of the experts' results, each read once.
#include "fused_experts.h"
#include "parallel.h"
#include "vec.h"

#include "elementwise/log_odds.h"

#define INFINI_FORMULA inline
#include "elementwise/formulas.h"

#include <utility>

namespace infini::INFINI_LEVEL {
namespace {

using fused_experts::Activation;

template <typename T> void scale_rows(const fused_experts::ScaleArgs &a) {
    const int64_t rows = a.to.size(0), hidden = a.to.size(1);
    with_float_type(a.weights.dtype, [&](auto type) {
        const auto *const weights = a.weights.as<const decltype(type)>();
        parallel_for(rows, 2 * rows * hidden * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const int64_t token = a.token[row];
                const VecF weight =
                    splat(widen(weights[token * a.weights.strides[0] + a.choice[row] * a.weights.strides[1]]));
                const auto *const x = a.x.as<const T>() + token * a.x.strides[0];
                T *const to = a.to.as<T>() + row * hidden;
                for_each_vector(hidden,
                                [&](int64_t i, auto lanes) { store_at(to, i, load_at(x, i, lanes) * weight, lanes); });
            }
        });
    });
}

struct Pair {
    VecF gate, up;
};

template <int... kLane> Pair even_and_odd(VecF a, VecF b, std::integer_sequence<int, kLane...>) {
    return {__builtin_shufflevector(a, b, (2 * kLane)...), __builtin_shufflevector(a, b, (2 * kLane + 1)...)};
}

// Lanes i on of gate and up in a row of `both`.
template <typename T, typename Lanes>
Pair load_gate_up(const T *both, int64_t inner, bool interleaved, int64_t i, Lanes lanes) {
    if (!interleaved) {
        return {load_at(both, i, lanes), load_at(both + inner, i, lanes)};
    }
    VecF first, second{};
    if constexpr (std::is_same_v<Lanes, Full>) {
        first = load(both + 2 * i);
        second = load(both + 2 * i + kLanes);
    } else {
        const int pairs = 2 * lanes;
        first = pairs < kLanes ? load(both + 2 * i, pairs) : load(both + 2 * i);
        if (pairs > kLanes) {
            second = load(both + 2 * i + kLanes, pairs - kLanes);
        }
    }
    return even_and_odd(first, second, std::make_integer_sequence<int, kLanes>{});
}

template <typename T, typename Formula> void gate_rows(const fused_experts::GateArgs &a, const Formula &formula) {
    const int64_t inner = a.y.size(1), rows = a.y.size(0);
    parallel_for(rows, rows * inner * 3 * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const auto *const both = a.both.as<const T>() + row * 2 * inner;
            T *const y = a.y.as<T>() + row * inner;
            for_each_vector(inner, [&](int64_t i, auto lanes) {
                const Pair pair = load_gate_up(both, inner, a.interleaved, i, lanes);
                store_at(y, i, formula(pair.gate, pair.up), lanes);
            });
        }
    });
}

template <typename T> void square_rows(const fused_experts::GateArgs &a) {
    const int64_t size = a.y.numel();
    parallel_for(size, 2 * size * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
        const auto *const up = a.both.as<const T>() + begin;
        for_each_vector(end - begin, [&](int64_t i, auto lanes) {
            const VecF positive = max(splat(0.0f), load_at(up, i, lanes));
            store_at(a.y.as<T>() + begin, i, positive * positive, lanes);
        });
    });
}

template <typename T> void apply_gate(const fused_experts::GateArgs &a) {
    const VecF alpha = splat(a.alpha), limit = splat(a.limit);
    // min and max return their second argument if either is NaN: NaN in gate or up stays.
    const auto below = [&](VecF x) { return min(limit, x); };
    const auto within = [&](VecF x) { return max(-limit, min(limit, x)); };
    switch (a.activation) {
    case Activation::kSwiglu:
        return gate_rows<T>(a, [](VecF gate, VecF up) { return formula::swiglu::of<T>(up, gate); });
    case Activation::kGeglu:
        return gate_rows<T>(a, [](VecF gate, VecF up) { return formula::geglu::of<T>(up, gate); });
    case Activation::kSwigluOai:
        return gate_rows<T>(a, [&](VecF gate, VecF up) {
            const VecF g = below(gate);
            return quotient_for<T>(g, 1.0f + exp_for<T>(-alpha * g)) * (within(up) + 1.0f);
        });
    case Activation::kRelu2NoMul:
        return square_rows<T>(a);
    case Activation::kSwigluClamped:
        return gate_rows<T>(a, [&](VecF gate, VecF up) { return formula::swiglu::of<T>(within(up), below(gate)); });
    }
}

template <typename T> void sum_experts(const fused_experts::SumArgs &a) {
    const int64_t tokens = a.y.size(0), hidden = a.y.size(1), k = a.weights.size(1);
    const auto *const results = static_cast<const T *>(a.results);
    with_float_type(a.weights.dtype, [&](auto type) {
        const auto *const weights = a.weights.as<const decltype(type)>();
        parallel_for(tokens, tokens * hidden * k * static_cast<int64_t>(sizeof(T)), [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                T *const y = a.y.as<T>() + t * a.y.strides[0];
                for_each_vector(hidden, [&](int64_t i, auto lanes) {
                    VecF total{};
                    for (int64_t j = 0; j < k; ++j) {
                        if (a.row[t * k + j] < 0) {
                            continue;
                        }
                        const int64_t at = t * a.weights.strides[0] + j * a.weights.strides[1];
                        const float weight = a.weighted ? widen(weights[at]) : 1.0f;
                        total += splat(weight) * load_at(results + a.row[t * k + j] * hidden, i, lanes);
                    }
                    store_at(y, i, total, lanes);
                });
            }
        });
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::fused_experts::INFINI_LEVEL::scale_kernel(const ScaleArgs &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.x.dtype, [&](auto type) { scale_rows<decltype(type)>(args); });
}

void infini::fused_experts::INFINI_LEVEL::gate_kernel(const GateArgs &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.y.dtype, [&](auto type) { apply_gate<decltype(type)>(args); });
}

void infini::fused_experts::INFINI_LEVEL::sum_kernel(const SumArgs &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.y.dtype, [&](auto type) { sum_experts<decltype(type)>(args); });
}
