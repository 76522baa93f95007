// torch.ops.infini.fused_experts, functional and out; declared in torch_infini/ops/fused_experts.py.
#include "../../torch/tensor.h"
#include "check.h"
#include "fused_experts.h"

#include <optional>

namespace infini::fused_experts {
namespace {

constexpr Checker kRule("fused_experts");

Args inputs(const ExecutionContext &context, const Tensor &x, const Tensor &gate_up, const Tensor &down,
            const Tensor &index, const Tensor &weights, int64_t activation, const std::optional<Tensor> &gate_up_scales,
            const std::optional<Tensor> &down_scales) {
    Args args;
    args.x = view(context, kRule, "x", x);
    args.gate_up = view(context, kRule, "gate_up", gate_up);
    args.down = view(context, kRule, "down", down);
    args.index = view(context, kRule, "index", index);
    args.weights = view(context, kRule, "weights", weights);
    args.activation = activation;
    args.gate_up_scales = optional_view(context, kRule, "gate_up_scales", gate_up_scales);
    args.down_scales = optional_view(context, kRule, "down_scales", down_scales);
    check_inputs(args);
    return args;
}

Tensor fused_experts(const ExecutionContext &context, const Tensor &x, const Tensor &gate_up, const Tensor &down,
                     const Tensor &index, const Tensor &weights, int64_t activation,
                     const std::optional<Tensor> &gate_up_scales, const std::optional<Tensor> &down_scales) {
    Args args = inputs(context, x, gate_up, down, index, weights, activation, gate_up_scales, down_scales);
    Tensor y = empty_like(context, args.x);
    args.y = view(context, kRule, "out", y);
    run(context, args);
    return y;
}

Tensor fused_experts_out(const ExecutionContext &context, const Tensor &x, const Tensor &gate_up, const Tensor &down,
                         const Tensor &index, const Tensor &weights, int64_t activation,
                         const std::optional<Tensor> &gate_up_scales, const std::optional<Tensor> &down_scales,
                         Tensor out) {
    Args args = inputs(context, x, gate_up, down, index, weights, activation, gate_up_scales, down_scales);
    args.y = view(context, kRule, "out", out);
    check_output(args);
    run(context, args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY_CPU(m) {
    m.impl("fused_experts", INFINI_BOX(fused_experts));
    m.impl("fused_experts.out", INFINI_BOX(fused_experts_out));
}

} // namespace infini::fused_experts
