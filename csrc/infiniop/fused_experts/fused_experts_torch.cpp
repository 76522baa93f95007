// torch.ops.infini.fused_experts, functional and out; declared in torch_infini/ops/fused_experts.py.
#include "../../torch/tensor.h"
#include "check.h"
#include "fused_experts.h"

#include <optional>

namespace infini::fused_experts {
namespace {

constexpr Checker kRule("fused_experts");

const linear_blocks::Kind *kind_of(const char *name, int64_t number) {
    if (number < 0) {
        return nullptr;
    }
    const linear_blocks::Kind *const kind = linear_blocks::find_kind(number);
    if (kind == nullptr) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, name,
                   message("be one of ", linear_blocks::known_kinds(), ", or -1 for weights that are not in blocks"),
                   std::to_string(number));
    }
    return kind;
}

using Optional = std::optional<Tensor>;

// The names of the arguments that describe the weights of one product.
struct Names {
    const char *data, *scales, *bias, *kind;
};

Weights weights_of(const ExecutionContext &context, const Names &names, const Tensor &data, const Optional &scales,
                   const Optional &bias, int64_t kind) {
    Weights weights{view(context, kRule, names.data, data), optional_view(context, kRule, names.scales, scales),
                    optional_view(context, kRule, names.bias, bias), kind_of(names.kind, kind)};
    const TensorView &in_blocks = weights.data;
    if (weights.kind != nullptr && in_blocks.ndim > 0 &&
        in_blocks.size(-1) == linear_block_panels::kPanel * weights.kind->bytes) {
        weights.panel_kind = linear_block_panels::find_panel_kind(kind); // nullptr: the shape will be refused
    }
    return weights;
}

Args inputs(const ExecutionContext &context, const Tensor &x, const Tensor &gate_up, const Tensor &down,
            const Tensor &index, const Tensor &weights, int64_t activation, const Optional &gate_up_scales,
            const Optional &down_scales, const Optional &gate_up_bias, const Optional &down_bias, bool interleaved,
            double alpha, double limit, int64_t gate_up_kind, int64_t down_kind, bool weights_on_input,
            int64_t first_expert, int64_t total_experts) {
    Args args;
    args.x = view(context, kRule, "x", x);
    args.gate_up = weights_of(context, {"gate_up", "gate_up_scales", "gate_up_bias", "gate_up_kind"}, gate_up,
                              gate_up_scales, gate_up_bias, gate_up_kind);
    args.down =
        weights_of(context, {"down", "down_scales", "down_bias", "down_kind"}, down, down_scales, down_bias, down_kind);
    args.index = view(context, kRule, "index", index);
    args.weights = view(context, kRule, "weights", weights);
    args.activation = activation;
    args.interleaved = interleaved;
    args.alpha = alpha;
    args.limit = limit;
    args.weights_on_input = weights_on_input;
    args.first_expert = first_expert;
    args.total_experts = total_experts;
    check_inputs(args);
    return args;
}

void run_with_workspace(const ExecutionContext &context, Args &args) {
    Tensor workspace;
    if (const size_t bytes = kernels.workspace_bytes(context, args); bytes > 0) {
        workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace.data_ptr();
    }
    run(context, args);
}

Tensor fused_experts(const ExecutionContext &context, const Tensor &x, const Tensor &gate_up, const Tensor &down,
                     const Tensor &index, const Tensor &weights, int64_t activation, const Optional &gate_up_scales,
                     const Optional &down_scales, const Optional &gate_up_bias, const Optional &down_bias,
                     bool interleaved, double alpha, double limit, int64_t gate_up_kind, int64_t down_kind,
                     bool weights_on_input, int64_t first_expert, int64_t total_experts) {
    Args args = inputs(context, x, gate_up, down, index, weights, activation, gate_up_scales, down_scales, gate_up_bias,
                       down_bias, interleaved, alpha, limit, gate_up_kind, down_kind, weights_on_input, first_expert,
                       total_experts);
    Tensor y = empty_like(context, args.x);
    args.y = view(context, kRule, "out", y);
    run_with_workspace(context, args);
    return y;
}

Tensor fused_experts_out(const ExecutionContext &context, const Tensor &x, const Tensor &gate_up, const Tensor &down,
                         const Tensor &index, const Tensor &weights, int64_t activation, const Optional &gate_up_scales,
                         const Optional &down_scales, const Optional &gate_up_bias, const Optional &down_bias,
                         bool interleaved, double alpha, double limit, int64_t gate_up_kind, int64_t down_kind,
                         bool weights_on_input, int64_t first_expert, int64_t total_experts, Tensor out) {
    Args args = inputs(context, x, gate_up, down, index, weights, activation, gate_up_scales, down_scales, gate_up_bias,
                       down_bias, interleaved, alpha, limit, gate_up_kind, down_kind, weights_on_input, first_expert,
                       total_experts);
    args.y = view(context, kRule, "out", out);
    check_output(args);
    run_with_workspace(context, args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("fused_experts", INFINI_BOX(fused_experts));
    m.impl("fused_experts.out", INFINI_BOX(fused_experts_out));
}

} // namespace infini::fused_experts
