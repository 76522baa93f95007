// torch.ops.infini.linear_int8 and linear_int4, functional and out; declared in torch_infini/ops/quantized_linear.py.
#include "../../torch/tensor.h"
#include "quantized_linear.h"

#include <optional>

namespace infini::quantized_linear {
namespace {

constexpr Checker kInt8Rule("linear_int8"), kInt4Rule("linear_int4");

// Checks the inputs and returns their views.
Args inputs(const ExecutionContext &context, Format format, const Tensor &x, const Tensor &weight, const Tensor &scales,
            const std::optional<Tensor> &zeros, const std::optional<Tensor> &bias, bool quantize_x) {
    const Checker &rule = format == Format::kInt8 ? kInt8Rule : kInt4Rule;
    Args args;
    args.x = view(context, rule, "x", x);
    args.weight = view(context, rule, "weight", weight);
    args.scales = view(context, rule, "scales", scales);
    if (zeros) {
        args.zeros = view(context, rule, "zeros", *zeros);
    }
    if (bias) {
        args.bias = view(context, rule, "bias", *bias);
    }
    args.quantize_x = quantize_x;
    check_inputs(format, args);
    return args;
}

// Computes, after allocating the workspace that the call needs.
void run_with_workspace(const ExecutionContext &context, Format format, Args args) {
    const size_t bytes = workspace_size(context, format, args);
    if (bytes == 0) {
        return run(context, format, args);
    }
    const Tensor workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
    args.workspace = workspace.data_ptr();
    run(context, format, args);
}

Tensor compute(const ExecutionContext &context, Format format, Args args) {
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = args.weight.size(0);
    Tensor y = empty_like(context, args.y);
    args.y = view(context, kInt8Rule, "out", y);
    run_with_workspace(context, format, args);
    return y;
}

Tensor compute(const ExecutionContext &context, Format format, Args args, Tensor out) {
    args.y = view(context, format == Format::kInt8 ? kInt8Rule : kInt4Rule, "out", out);
    check_output(format, args);
    run_with_workspace(context, format, args);
    return out;
}

Tensor linear_int8(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                   const std::optional<Tensor> &bias, bool quantize_x) {
    return compute(context, Format::kInt8, inputs(context, Format::kInt8, x, weight, scales, {}, bias, quantize_x));
}

Tensor linear_int8_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                       const std::optional<Tensor> &bias, bool quantize_x, Tensor out) {
    return compute(context, Format::kInt8, inputs(context, Format::kInt8, x, weight, scales, {}, bias, quantize_x),
                   out);
}

Tensor linear_int4(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                   const std::optional<Tensor> &zeros, const std::optional<Tensor> &bias, bool quantize_x) {
    return compute(context, Format::kInt4, inputs(context, Format::kInt4, x, weight, scales, zeros, bias, quantize_x));
}

Tensor linear_int4_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, const Tensor &scales,
                       const std::optional<Tensor> &zeros, const std::optional<Tensor> &bias, bool quantize_x,
                       Tensor out) {
    return compute(context, Format::kInt4, inputs(context, Format::kInt4, x, weight, scales, zeros, bias, quantize_x),
                   out);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("linear_int8", INFINI_BOX(linear_int8));
    m.impl("linear_int8.out", INFINI_BOX(linear_int8_out));
    m.impl("linear_int4", INFINI_BOX(linear_int4));
    m.impl("linear_int4.out", INFINI_BOX(linear_int4_out));
}

} // namespace infini::quantized_linear
