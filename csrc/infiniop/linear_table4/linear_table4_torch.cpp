// torch.ops.infini.linear_table4, functional and out, and quantize_table4, which writes into its arguments; declared in
// torch_infini/ops/linear_table4.py and quantize_table4.py.
#include "../../torch/tensor.h"
#include "check.h"
#include "linear_table4.h"

#include <optional>

namespace infini::linear_table4 {
namespace {

constexpr Checker kLinear("linear_table4"), kQuantize("quantize_table4");

Args linear_args(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                 const std::optional<Tensor> &bias) {
    Args args;
    args.x = view(context, kLinear, "x", x);
    args.weight = view(context, kLinear, "weight", weight);
    args.scales = view(context, kLinear, "scales", scales);
    args.bias = optional_view(context, kLinear, "bias", bias);
    check_inputs(args);
    return args;
}

Tensor linear_table4(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                     const std::optional<Tensor> &bias) {
    Args args = linear_args(context, x, weight, scales, bias);
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = args.scales.size(0);
    Tensor y = empty_like(context, args.y);
    args.y = view(context, kLinear, "out", y);
    run(context, args);
    return y;
}

Tensor linear_table4_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                         const std::optional<Tensor> &bias, Tensor out) {
    Args args = linear_args(context, x, weight, scales, bias);
    args.y = view(context, kLinear, "out", out);
    check_output(args);
    run(context, args);
    return out;
}

void quantize_table4(const ExecutionContext &context, Tensor packed, Tensor scales, const Tensor &weight,
                     int64_t first_row) {
    QuantizeArgs args;
    args.packed = view(context, kQuantize, "packed", packed);
    args.scales = view(context, kQuantize, "scales", scales);
    args.weight = view(context, kQuantize, "weight", weight);
    args.first_row = first_row;
    run_quantize(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY_CPU(m) {
    m.impl("linear_table4", INFINI_BOX(linear_table4));
    m.impl("linear_table4.out", INFINI_BOX(linear_table4_out));
    m.impl("quantize_table4", INFINI_BOX(quantize_table4));
}

} // namespace infini::linear_table4
