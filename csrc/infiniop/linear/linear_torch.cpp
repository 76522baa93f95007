// torch.ops.infini.linear, functional and out; declared in torch_infini/ops/linear.py.
// Where the table in linear.cpp says so, the product is ATen's.
#include "../../torch/tensor.h"
#include "linear.h"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>

namespace infini::linear {
namespace {

using torch::headeronly::DeviceType;

constexpr Checker kRule("linear");

Args linear_args(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias) {
    Args args;
    args.x = view(kRule, "x", x);
    args.weight = view(kRule, "weight", weight);
    if (bias) {
        args.bias = view(kRule, "bias", *bias);
    }
    return args;
}

// A tensor that borrows the view's memory. It carries no autograd state, so ATen records nothing on it.
Tensor borrow(const TensorView &view, torch::headeronly::ScalarType type) {
    const auto ndim = static_cast<size_t>(view.ndim);
    return torch::stable::from_blob(view.data, {view.shape, ndim}, {view.strides, ndim}, {DeviceType::CPU}, type);
}

// y = x @ weight^T + bias by aten::linear.out, on matrices: for these it adds the bias before the result is rounded.
// reshape copies only where rows do not lie at one distance.
void run_aten(const Args &args, torch::headeronly::ScalarType type) {
    const int64_t n = args.weight.size(0), k = args.weight.size(1), rows = args.y.numel() / n;
    Tensor y = borrow(args.y, type);
    const Tensor y_matrix = torch::stable::reshape(y, {rows, n});
    std::optional<Tensor> bias;
    if (args.bias.dtype != INFINI_DTYPE_INVALID) {
        bias = borrow(args.bias, type);
    }
    std::array<StableIValue, 4> stack{
        torch::stable::detail::from(torch::stable::reshape(borrow(args.x, type), {rows, k})),
        torch::stable::detail::from(borrow(args.weight, type)), torch::stable::detail::from(bias),
        torch::stable::detail::from(y_matrix)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]); // takes over the reference that the call returned
    if (y_matrix.data_ptr() != args.y.data) {
        torch::stable::copy_(y, torch::stable::reshape(y_matrix, y.sizes()));
    }
}

void compute(const Args &args, const Tensor &x) {
    if (args.y.numel() == 0 || kernel_is_faster(args)) {
        run(args);
    } else {
        run_aten(args, x.scalar_type());
    }
}

Tensor linear(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias) {
    Args args = linear_args(x, weight, bias);
    check_inputs(args);
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = args.weight.size(0);
    Tensor y = empty_like(args.y);
    args.y = view(kRule, "out", y);
    compute(args, x);
    return y;
}

Tensor linear_out(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, Tensor out) {
    Args args = linear_args(x, weight, bias);
    check_inputs(args);
    args.y = view(kRule, "out", out);
    check_output(args);
    compute(args, x);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear", TORCH_BOX(&linear));
    m.impl("linear.out", TORCH_BOX(&linear_out));
}

} // namespace infini::linear
