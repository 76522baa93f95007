// The torch functions of ops with weights in panels: the product, functional and out, and the op that quantizes, which
// writes into its arguments.
#pragma once

#include "../../torch/tensor.h"
#include "panel_weights.h"

#include <optional>

namespace infini::panels {
namespace {

template <const Op &op>
Args linear_args(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                 const std::optional<Tensor> &bias) {
    Args args;
    args.x = view(context, op.linear, "x", x);
    args.weight = view(context, op.linear, "weight", weight);
    args.scales = view(context, op.linear, "scales", scales);
    args.bias = optional_view(context, op.linear, "bias", bias);
    op.check_inputs(args);
    return args;
}

template <const Op &op> void run_with_workspace(const ExecutionContext &context, Args args) {
    const size_t bytes = op.workspace_size(context, args);
    if (bytes == 0) {
        return op.run(context, args);
    }
    const Tensor workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
    args.workspace = workspace.data_ptr();
    op.run(context, args);
}

template <const Op &op>
Tensor linear(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
              const std::optional<Tensor> &bias) {
    Args args = linear_args<op>(context, x, weight, scales, bias);
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = args.scales.size(0);
    Tensor y = empty_like(context, args.y);
    args.y = view(context, op.linear, "out", y);
    run_with_workspace<op>(context, args);
    return y;
}

template <const Op &op>
Tensor linear_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                  const std::optional<Tensor> &bias, Tensor out) {
    Args args = linear_args<op>(context, x, weight, scales, bias);
    args.y = view(context, op.linear, "out", out);
    op.check_output(args);
    run_with_workspace<op>(context, args);
    return out;
}

template <const Op &op>
void quantize(const ExecutionContext &context, Tensor packed, Tensor scales, const Tensor &weight, int64_t first_row) {
    QuantizeArgs args;
    args.packed = view(context, op.quantize, "packed", packed);
    args.scales = view(context, op.quantize, "scales", scales);
    args.weight = view(context, op.quantize, "weight", weight);
    args.first_row = first_row;
    op.run_quantize(context, args);
}

} // namespace
} // namespace infini::panels
