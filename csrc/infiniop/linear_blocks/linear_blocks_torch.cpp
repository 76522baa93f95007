// torch.ops.infini.linear_blocks, functional and out; declared in torch_infini/ops/linear_blocks.py.
#include "../../torch/tensor.h"
#include "check.h"
#include "linear_blocks.h"

#include <optional>

namespace infini::linear_blocks {
namespace {

constexpr Checker kRule("linear_blocks");

const Kind *kind_of(int64_t number) {
    const Kind *const kind = find_kind(number);
    if (kind == nullptr) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "kind", message("be one of ", known_kinds()), std::to_string(number));
    }
    return kind;
}

Args inputs(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t kind,
            const std::optional<Tensor> &bias) {
    Args args;
    args.kind = kind_of(kind);
    args.x = view(context, kRule, "x", x);
    args.weight = view(context, kRule, "weight", weight);
    args.bias = optional_view(context, kRule, "bias", bias);
    check_inputs(args);
    return args;
}

// Computes, after allocating the workspace that the call needs.
void run_with_workspace(const ExecutionContext &context, Args args) {
    const size_t bytes = workspace_size(context, args);
    if (bytes == 0) {
        return run(context, args);
    }
    const Tensor workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
    args.workspace = workspace.data_ptr();
    run(context, args);
}

Tensor linear_blocks(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t kind,
                     const std::optional<Tensor> &bias) {
    Args args = inputs(context, x, weight, kind, bias);
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = args.weight.size(0);
    Tensor y = empty_like(context, args.y);
    args.y = view(context, kRule, "out", y);
    run_with_workspace(context, args);
    return y;
}

Tensor linear_blocks_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t kind,
                         const std::optional<Tensor> &bias, Tensor out) {
    Args args = inputs(context, x, weight, kind, bias);
    args.y = view(context, kRule, "out", out);
    check_output(args);
    run_with_workspace(context, args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear_blocks", INFINI_BOX(linear_blocks));
    m.impl("linear_blocks.out", INFINI_BOX(linear_blocks_out));
}

} // namespace infini::linear_blocks
