// torch.ops.infini.topksoftmax and topkrouter, functional and out; declared in torch_infini/ops/topk.py.
#include "../../torch/tensor.h"
#include "topk.h"

namespace infini::topk {
namespace {

using Outputs = std::tuple<Tensor, Tensor>;

constexpr Checker kSoftmax("topksoftmax"), kRouter("topkrouter");
constexpr Names kNames{"out0", "out1", "k"};

Args softmax_args(const Tensor &x, bool normalize) {
    Args args;
    args.x = view(kSoftmax, "x", x);
    args.normalize = normalize;
    return args;
}

Args router_args(const Tensor &x, const Tensor &correction_bias, double routed_scaling_factor) {
    Args args;
    args.x = view(kRouter, "x", x);
    args.bias = view(kRouter, "correction_bias", correction_bias);
    args.scale = static_cast<float>(routed_scaling_factor);
    return args;
}

size_t at_least_one(const Checker &rule, int64_t k) {
    if (k < 1) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "k", "be at least 1", std::to_string(k));
    }
    return static_cast<size_t>(k);
}

Outputs run_into(const Checker &rule, Args args, int64_t k, Tensor values, Tensor indices) {
    args.topk = at_least_one(rule, k);
    args.values = view(rule, "out0", values);
    args.indices = view(rule, "out1", indices);
    run(args, kNames);
    return {values, indices};
}

Outputs run_new(const Checker &rule, Args args, int64_t k) {
    check(args, kNames); // of x alone, whose shape the outputs' are made of
    set_topk(args, at_least_one(rule, k));
    return run_into(rule, args, k, empty_like(args.values), empty_like(args.indices));
}

Outputs topksoftmax(const Tensor &x, int64_t k, bool normalize) {
    return run_new(kSoftmax, softmax_args(x, normalize), k);
}

Outputs topksoftmax_out(const Tensor &x, int64_t k, bool normalize, Tensor out0, Tensor out1) {
    return run_into(kSoftmax, softmax_args(x, normalize), k, out0, out1);
}

Outputs topkrouter(const Tensor &x, const Tensor &correction_bias, int64_t k, double routed_scaling_factor) {
    return run_new(kRouter, router_args(x, correction_bias, routed_scaling_factor), k);
}

Outputs topkrouter_out(const Tensor &x, const Tensor &correction_bias, int64_t k, double routed_scaling_factor,
                       Tensor out0, Tensor out1) {
    return run_into(kRouter, router_args(x, correction_bias, routed_scaling_factor), k, out0, out1);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("topksoftmax", INFINI_BOX(topksoftmax));
    m.impl("topksoftmax.out", INFINI_BOX(topksoftmax_out));
    m.impl("topkrouter", INFINI_BOX(topkrouter));
    m.impl("topkrouter.out", INFINI_BOX(topkrouter_out));
}

} // namespace infini::topk
