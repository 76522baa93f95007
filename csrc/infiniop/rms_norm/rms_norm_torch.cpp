// torch.ops.infini.rms_norm (functional, out, in place) and add_rms_norm (functional, out); declared in torch_infini/ops/{,add_}rms_norm.py.
#include "../../torch/tensor.h"
#include "rms_norm.h"

namespace infini::rms_norm {
namespace {

constexpr Checker kNorm("rms_norm"), kAddNorm("add_rms_norm");

Args norm_args(const ExecutionContext &context, const Checker &rule, const Tensor &x, const Tensor &weight, double eps,
               int64_t rounding) {
    Args args;
    args.x = view(context, rule, "x", x);
    args.weight = view(context, rule, "weight", weight);
    args.eps = eps;
    args.rounding = static_cast<Rounding>(rounding);
    return args;
}

infiniDtype_t output_dtype(const Args &args) {
    return output_dtype(args.x.dtype, args.weight.dtype, args.rounding);
}

Tensor rms_norm(const ExecutionContext &context, const Tensor &x, const Tensor &weight, double eps, int64_t rounding) {
    Args args = norm_args(context, kNorm, x, weight, eps, rounding);
    Tensor y = empty_like(context, args.x, output_dtype(args));
    args.y = view(context, kNorm, "out", y);
    run(context, "rms_norm", args);
    return y;
}

Tensor rms_norm_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, double eps,
                    int64_t rounding, Tensor out) {
    Args args = norm_args(context, kNorm, x, weight, eps, rounding);
    args.y = view(context, kNorm, "out", out);
    run(context, "rms_norm", args);
    return out;
}

void rms_norm_(const ExecutionContext &context, Tensor x, const Tensor &weight, double eps, int64_t rounding) {
    const Args args = norm_args(context, kNorm, x, weight, eps, rounding);
    kNorm.writable("x", args.x);
    if (output_dtype(args) != args.x.dtype) {
        kNorm.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, "weight",
                   message("be ", name_of(args.x.dtype), " as x is, which takes the result in place"),
                   name_of(args.weight.dtype));
    }
    rms_norm_out(context, x, weight, eps, rounding, x);
}

std::tuple<Tensor, Tensor> add_rms_norm_out(const ExecutionContext &context, const Tensor &x, const Tensor &residual,
                                            const Tensor &weight, double eps, int64_t rounding, Tensor out0,
                                            Tensor out1) {
    Args args = norm_args(context, kAddNorm, x, weight, eps, rounding);
    args.residual = view(context, kAddNorm, "residual", residual);
    args.y = view(context, kAddNorm, "out0", out0);
    args.h = view(context, kAddNorm, "out1", out1);
    run(context, "add_rms_norm", args);
    return {out0, out1};
}

std::tuple<Tensor, Tensor> add_rms_norm(const ExecutionContext &context, const Tensor &x, const Tensor &residual,
                                        const Tensor &weight, double eps, int64_t rounding) {
    const Args args = norm_args(context, kAddNorm, x, weight, eps, rounding);
    return add_rms_norm_out(context, x, residual, weight, eps, rounding,
                            empty_like(context, args.x, output_dtype(args)), empty_like(context, args.x));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("rms_norm", INFINI_BOX(rms_norm));
    m.impl("rms_norm.out", INFINI_BOX(rms_norm_out));
    m.impl("rms_norm_", INFINI_BOX(rms_norm_));
    m.impl("add_rms_norm", INFINI_BOX(add_rms_norm));
    m.impl("add_rms_norm.out", INFINI_BOX(add_rms_norm_out));
}

} // namespace infini::rms_norm
