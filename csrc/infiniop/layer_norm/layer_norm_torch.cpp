// torch.ops.infini.layer_norm, functional, out and in-place; declared in torch_infini/ops/layer_norm.py.
#include <optional>

#include "../../torch/tensor.h"
#include "layer_norm.h"

namespace infini::layer_norm {
namespace {

constexpr Checker kRule("layer_norm");
constexpr Names kNames{"out", "x", "to match the last dimension of x"};

Tensor layer_norm_out(const ExecutionContext &context, const Tensor &x, const std::optional<Tensor> &weight,
                      const std::optional<Tensor> &bias, double eps, Tensor out) {
    Args args;
    args.input = view(context, kRule, "x", x);
    args.output = view(context, kRule, "out", out);
    if (weight) {
        args.weight = view(context, kRule, "weight", *weight);
    }
    if (bias) {
        args.bias = view(context, kRule, "bias", *bias);
    }
    args.eps = eps;
    run(context, args, kNames);
    return out;
}

Tensor layer_norm(const ExecutionContext &context, const Tensor &x, const std::optional<Tensor> &weight,
                  const std::optional<Tensor> &bias, double eps) {
    return layer_norm_out(context, x, weight, bias, eps, empty_like(context, view(context, kRule, "x", x)));
}

void layer_norm_(const ExecutionContext &context, Tensor x, const std::optional<Tensor> &weight,
                 const std::optional<Tensor> &bias, double eps) {
    kRule.writable("x", view(context, kRule, "x", x));
    layer_norm_out(context, x, weight, bias, eps, x);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("layer_norm", INFINI_BOX(layer_norm));
    m.impl("layer_norm.out", INFINI_BOX(layer_norm_out));
    m.impl("layer_norm_", INFINI_BOX(layer_norm_));
}

} // namespace infini::layer_norm
