// torch.ops.infini.linear and fused_linear, functional and out; declared in torch_infini/ops/linear.py and
// fused_linear.py. Where the table in linear.cpp says so, the products are ATen's.
#include "../../torch/tensor.h"
#include "gemm/gemm.h"
#include "linear.h"

#include <torch/csrc/stable/ops.h>

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

// A tensor that borrows the view's memory. It carries no autograd state, so ATen records nothing on it.
Tensor borrow(const TensorView &view, torch::headeronly::ScalarType type) {
    const auto ndim = static_cast<size_t>(view.ndim);
    return torch::stable::from_blob(view.data, {view.shape, ndim}, {view.strides, ndim}, {DeviceType::CPU}, type);
}

// y = x @ weight^T + bias by aten::linear.out, on matrices: for these it adds the bias before the result is rounded.
void multiply_aten(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, const Tensor &y) {
    std::array<StableIValue, 4> stack{torch::stable::detail::from(x), torch::stable::detail::from(weight),
                                      torch::stable::detail::from(bias), torch::stable::detail::from(y)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]); // takes over the reference that the call returned
}

// reshape copies only where rows do not lie at one distance.
void run_aten(const Args &args, torch::headeronly::ScalarType type) {
    const int64_t n = args.y.size(-1), rows = args.y.numel() / n;
    Tensor y = borrow(args.y, type);
    const Tensor x_matrix = torch::stable::reshape(borrow(args.x, type), {rows, args.x.size(-1)});
    Tensor y_matrix = torch::stable::reshape(y, {rows, n});
    int64_t column = 0;
    for (int i = 0; i < args.weights; ++i) {
        const TensorView &weight = args.weight[i], &bias = args.bias[i];
        if (weight.size(0) > 0) {
            multiply_aten(x_matrix, borrow(weight, type),
                          bias.dtype != INFINI_DTYPE_INVALID ? std::optional<Tensor>(borrow(bias, type)) : std::nullopt,
                          torch::stable::narrow(y_matrix, 1, column, weight.size(0)));
        }
        column += weight.size(0);
    }
    if (y_matrix.data_ptr() != args.y.data) {
        torch::stable::copy_(y, torch::stable::reshape(y_matrix, y.sizes()));
    }
}

void compute(Args args, const Tensor &x) {
    if (on_cuda()) {
        const Tensor workspace = empty({static_cast<int64_t>(gemm::kWorkspaceBytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace.data_ptr();
        return run(args);
    }
    if (args.y.numel() == 0 || kernel_is_faster(args)) {
        run(args);
    } else {
        run_aten(args, x.scalar_type());
    }
}

Tensor result(const Op &op, Args args, const Tensor &x) {
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = columns(args);
    Tensor y = empty_like(args.y);
    args.y = view(op.rule, "out", y);
    compute(args, x);
    return y;
}

Tensor result(const Op &op, Args args, const Tensor &x, Tensor out) {
    args.y = view(op.rule, "out", out);
    check_output(op, args);
    compute(args, x);
    return out;
}

Tensor linear(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias) {
    return result(kLinear, linear_args(x, weight, bias), x);
}

Tensor linear_out(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, Tensor out) {
    return result(kLinear, linear_args(x, weight, bias), x, out);
}

Tensor fused_linear(const Tensor &x, const Tensor &a, const Tensor &b, const std::optional<Tensor> &c,
                    const std::optional<Tensor> &bias_a, const std::optional<Tensor> &bias_b,
                    const std::optional<Tensor> &bias_c) {
    return result(kFusedLinear, fused_args(x, a, b, c, bias_a, bias_b, bias_c), x);
}

Tensor fused_linear_out(const Tensor &x, const Tensor &a, const Tensor &b, const std::optional<Tensor> &c,
                        const std::optional<Tensor> &bias_a, const std::optional<Tensor> &bias_b,
                        const std::optional<Tensor> &bias_c, Tensor out) {
    return result(kFusedLinear, fused_args(x, a, b, c, bias_a, bias_b, bias_c), x, out);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear", INFINI_BOX(linear));
    m.impl("linear.out", INFINI_BOX(linear_out));
    m.impl("fused_linear", INFINI_BOX(fused_linear));
    m.impl("fused_linear.out", INFINI_BOX(fused_linear_out));
}

} // namespace infini::linear
