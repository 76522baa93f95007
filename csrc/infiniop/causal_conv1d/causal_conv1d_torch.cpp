// torch.ops.infini.causal_conv1d, which writes out and state; declared in torch_infini/ops/causal_conv1d.py.
#include <optional>

#include "../../torch/tensor.h"
#include "causal_conv1d.h"

namespace infini::causal_conv1d {
namespace {

constexpr Checker kRule("causal_conv1d");

void causal_conv1d(const ExecutionContext &context, Tensor out, const Tensor &x, const Tensor &weight,
                   const std::optional<Tensor> &bias, const std::optional<Tensor> &state,
                   const std::optional<Tensor> &offsets, const std::optional<Tensor> &slots, bool silu) {
    Args args;
    args.y = view(context, kRule, "out", out);
    args.x = view(context, kRule, "x", x);
    args.weight = view(context, kRule, "weight", weight);
    args.bias = optional_view(context, kRule, "bias", bias);
    args.state = optional_view(context, kRule, "state", state);
    args.sequences.offsets = optional_view(context, kRule, "offsets", offsets);
    args.sequences.slots = optional_view(context, kRule, "slots", slots);
    args.silu = silu;
    run(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("causal_conv1d", INFINI_BOX(causal_conv1d));
}

} // namespace infini::causal_conv1d
