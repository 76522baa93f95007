// torch.ops.infini.scaled_mm_int8, functional and out; declared in torch_infini/ops/scaled_mm_int8.py.
#include "../../torch/tensor.h"
#include "int8_gemm.h"

#include <optional>

namespace infini::int8_gemm {
namespace {

using torch::headeronly::ScalarType;

constexpr Checker kRule("scaled_mm_int8");
constexpr Names kTorchNames{"scaled_mm_int8", "a", "a_scale", "b", "b_scale"};

// The arguments without the output.
Args scaled_args(const ExecutionContext &context, const Tensor &a, const Tensor &b, const Tensor &a_scale,
                 const Tensor &b_scale, const std::optional<Tensor> &bias) {
    Args args;
    args.x = view(context, kRule, "a", a);
    args.weights = view(context, kRule, "b", b);
    args.x_scale = view(context, kRule, "a_scale", a_scale);
    args.weights_scale = view(context, kRule, "b_scale", b_scale);
    kRule.rank("a", args.x, 2);
    kRule.rank("b", args.weights, 2);
    if (bias) {
        args.bias = view(context, kRule, "bias", *bias);
    }
    return args;
}

// Without a dtype: that of bias, or bfloat16.
infiniDtype_t output_dtype(std::optional<ScalarType> dtype, const Args &args) {
    if (!dtype) {
        if (args.bias.dtype == INFINI_DTYPE_INVALID) {
            return INFINI_DTYPE_BF16;
        }
        kRule.dtype("bias", args.bias, INFINI_FLOATS);
        return args.bias.dtype;
    }
    switch (*dtype) {
    case ScalarType::Float:
        return INFINI_DTYPE_F32;
    case ScalarType::BFloat16:
        return INFINI_DTYPE_BF16;
    case ScalarType::Half:
        return INFINI_DTYPE_F16;
    default:
        kRule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "out_dtype", "be float32, bfloat16 or float16", toString(*dtype));
    }
}

Tensor run_with(const ExecutionContext &context, Args args, Tensor out) {
    args.out = view(context, kRule, "out", out);
    kRule.rank("out", args.out, 2);
    squeeze(args); // squeezes the scales
    if (context.is_cpu()) {
        run(context, args, kTorchNames);
        return out;
    }
    check(args, kTorchNames);
    Tensor workspace;
    if (const size_t bytes = workspace_size(context, args)) {
        workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace.data_ptr();
    }
    run(context, args, kTorchNames);
    return out;
}

Tensor scaled_mm_int8_out(const ExecutionContext &context, const Tensor &a, const Tensor &b, const Tensor &a_scale,
                          const Tensor &b_scale, const std::optional<Tensor> &bias, std::optional<ScalarType> out_dtype,
                          Tensor out) {
    const Args args = scaled_args(context, a, b, a_scale, b_scale, bias);
    if (out_dtype) {
        const infiniDtype_t wanted = output_dtype(out_dtype, args);
        kRule.dtype("out", view(context, kRule, "out", out), {wanted});
    }
    return run_with(context, args, out);
}

Tensor scaled_mm_int8(const ExecutionContext &context, const Tensor &a, const Tensor &b, const Tensor &a_scale,
                      const Tensor &b_scale, const std::optional<Tensor> &bias, std::optional<ScalarType> out_dtype) {
    const Args args = scaled_args(context, a, b, a_scale, b_scale, bias);
    return run_with(context, args,
                    empty(context, {args.x.size(0), args.weights.size(1)}, output_dtype(out_dtype, args)));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("scaled_mm_int8", INFINI_BOX(scaled_mm_int8));
    m.impl("scaled_mm_int8.out", INFINI_BOX(scaled_mm_int8_out));
}

} // namespace infini::int8_gemm
