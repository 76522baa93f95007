// torch.ops.infini.linear and fused_linear, functional and out; declared in torch_infini/ops/linear.py and
// fused_linear.py.
#include "../../torch/tensor.h"
#include "gemm/gemm.h"
#include "linear.h"
#include "streamed_rows.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>

namespace infini::linear {
namespace {

using torch::headeronly::DeviceType;

void add_weight(const Op &op, Args &args, int i, const Tensor &weight, const std::optional<Tensor> &bias) {
    args.weight[i] = view(op.rule, op.weight[i], weight);
    if (bias) {
        args.bias[i] = view(op.rule, op.bias[i], *bias);
    }
}

Args linear_args(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias) {
    Args args;
    args.x = view(kLinear.rule, "x", x);
    add_weight(kLinear, args, 0, weight, bias);
    check_inputs(kLinear, args);
    return args;
}

Args fused_args(const Tensor &x, const Tensor &a, const Tensor &b, const std::optional<Tensor> &c,
                const std::optional<Tensor> &bias_a, const std::optional<Tensor> &bias_b,
                const std::optional<Tensor> &bias_c) {
    Args args;
    args.x = view(kFusedLinear.rule, "x", x);
    add_weight(kFusedLinear, args, 0, a, bias_a);
    add_weight(kFusedLinear, args, 1, b, bias_b);
    args.weights = c ? 3 : 2;
    if (c) {
        add_weight(kFusedLinear, args, 2, *c, bias_c);
    } else if (bias_c) {
        kFusedLinear.rule.fail(INFINI_STATUS_NULL_POINTER, "bias_c", "be None where c is", "a tensor");
    }
    check_inputs(kFusedLinear, args);
    return args;
}

void compute(Args args) {
    Tensor workspace;
    // Not for streamed rows: a CUDA graph would keep it.
    const int64_t rows = args.y.numel() / std::max<int64_t>(columns(args), 1);
    if (on_cuda() && args.x.size(-1) > 0 && rows > weight_stream::streamed_rows(size_of(args.x.dtype))) {
        workspace = empty({static_cast<int64_t>(gemm::kWorkspaceBytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace.data_ptr();
    }
    run(args);
}

Tensor result(const Op &op, Args args) {
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = columns(args);
    Tensor y = empty_like(args.y);
    args.y = view(op.rule, "out", y);
    compute(args);
    return y;
}

Tensor result(const Op &op, Args args, Tensor out) {
    args.y = view(op.rule, "out", out);
    check_output(op, args);
    compute(args);
    return out;
}

Tensor linear(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias) {
    return result(kLinear, linear_args(x, weight, bias));
}

Tensor linear_out(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, Tensor out) {
    return result(kLinear, linear_args(x, weight, bias), out);
}

Tensor fused_linear(const Tensor &x, const Tensor &a, const Tensor &b, const std::optional<Tensor> &c,
                    const std::optional<Tensor> &bias_a, const std::optional<Tensor> &bias_b,
                    const std::optional<Tensor> &bias_c) {
    return result(kFusedLinear, fused_args(x, a, b, c, bias_a, bias_b, bias_c));
}

Tensor fused_linear_out(const Tensor &x, const Tensor &a, const Tensor &b, const std::optional<Tensor> &c,
                        const std::optional<Tensor> &bias_a, const std::optional<Tensor> &bias_b,
                        const std::optional<Tensor> &bias_c, Tensor out) {
    return result(kFusedLinear, fused_args(x, a, b, c, bias_a, bias_b, bias_c), out);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear", INFINI_BOX(linear));
    m.impl("linear.out", INFINI_BOX(linear_out));
    m.impl("fused_linear", INFINI_BOX(fused_linear));
    m.impl("fused_linear.out", INFINI_BOX(fused_linear_out));
}

} // namespace infini::linear
