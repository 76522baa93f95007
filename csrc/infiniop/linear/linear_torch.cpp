// torch.ops.infini.linear and fused_linear, functional and out; declared in torch_infini/ops/linear.py and
// fused_linear.py.
#include "../../torch/tensor.h"
#include "linear.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>

namespace infini::linear {
namespace {

using torch::headeronly::DeviceType;

void add_weight(const ExecutionContext &context, const Op &op, Args &args, int i, const Tensor &weight,
                const std::optional<Tensor> &bias) {
    args.weight[i] = view(context, op.rule, op.weight[i], weight);
    if (bias) {
        args.bias[i] = view(context, op.rule, op.bias[i], *bias);
    }
}

Args linear_args(const ExecutionContext &context, const Tensor &x, const Tensor &weight,
                 const std::optional<Tensor> &bias) {
    Args args;
    args.x = view(context, kLinear.rule, "x", x);
    add_weight(context, kLinear, args, 0, weight, bias);
    check_inputs(kLinear, args);
    return args;
}

Args fused_args(const ExecutionContext &context, const Tensor &x, const Tensor &a, const Tensor &b,
                const std::optional<Tensor> &c, const std::optional<Tensor> &bias_a,
                const std::optional<Tensor> &bias_b, const std::optional<Tensor> &bias_c) {
    Args args;
    args.x = view(context, kFusedLinear.rule, "x", x);
    add_weight(context, kFusedLinear, args, 0, a, bias_a);
    add_weight(context, kFusedLinear, args, 1, b, bias_b);
    args.weights = c ? 3 : 2;
    if (c) {
        add_weight(context, kFusedLinear, args, 2, *c, bias_c);
    } else if (bias_c) {
        kFusedLinear.rule.fail(INFINI_STATUS_NULL_POINTER, "bias_c", "be None where c is", "a tensor");
    }
    check_inputs(kFusedLinear, args);
    return args;
}

void compute(const ExecutionContext &context, Args args) {
    Tensor workspace;
    if (const size_t bytes = workspace_bytes(context, args); bytes > 0) {
        workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace.data_ptr();
    }
    run(context, args);
}

Tensor result(const ExecutionContext &context, const Op &op, Args args) {
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = columns(args);
    Tensor y = empty_like(context, args.y);
    args.y = view(context, op.rule, "out", y);
    compute(context, args);
    return y;
}

Tensor result(const ExecutionContext &context, const Op &op, Args args, Tensor out) {
    args.y = view(context, op.rule, "out", out);
    check_output(op, args);
    compute(context, args);
    return out;
}

Tensor linear(const ExecutionContext &context, const Tensor &x, const Tensor &weight,
              const std::optional<Tensor> &bias) {
    return result(context, kLinear, linear_args(context, x, weight, bias));
}

Tensor linear_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight,
                  const std::optional<Tensor> &bias, Tensor out) {
    return result(context, kLinear, linear_args(context, x, weight, bias), out);
}

Tensor fused_linear(const ExecutionContext &context, const Tensor &x, const Tensor &a, const Tensor &b,
                    const std::optional<Tensor> &c, const std::optional<Tensor> &bias_a,
                    const std::optional<Tensor> &bias_b, const std::optional<Tensor> &bias_c) {
    return result(context, kFusedLinear, fused_args(context, x, a, b, c, bias_a, bias_b, bias_c));
}

Tensor fused_linear_out(const ExecutionContext &context, const Tensor &x, const Tensor &a, const Tensor &b,
                        const std::optional<Tensor> &c, const std::optional<Tensor> &bias_a,
                        const std::optional<Tensor> &bias_b, const std::optional<Tensor> &bias_c, Tensor out) {
    return result(context, kFusedLinear, fused_args(context, x, a, b, c, bias_a, bias_b, bias_c), out);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear", INFINI_BOX(linear));
    m.impl("linear.out", INFINI_BOX(linear_out));
    m.impl("fused_linear", INFINI_BOX(fused_linear));
    m.impl("fused_linear.out", INFINI_BOX(fused_linear_out));
}

} // namespace infini::linear
