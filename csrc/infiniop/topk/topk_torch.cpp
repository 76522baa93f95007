// torch.ops.infini.topksoftmax and topkrouter, functional and out; declared in torch_infini/ops/topk.py.
#include "../../torch/tensor.h"
#include "topk.h"

namespace infini::topk {
namespace {

using Outputs = std::tuple<Tensor, Tensor>;

constexpr Checker kSoftmax("topksoftmax"), kRouter("topkrouter");
constexpr Names kNames{"out0", "out1", "k"};

Args softmax_args(const ExecutionContext &context, const Tensor &x, bool normalize) {
    Args args;
    args.x = view(context, kSoftmax, "x", x);
    args.normalize = normalize;
    return args;
}

Args router_args(const ExecutionContext &context, const Tensor &x, const Tensor &correction_bias,
                 double routed_scaling_factor) {
    Args args;
    args.x = view(context, kRouter, "x", x);
    args.bias = view(context, kRouter, "correction_bias", correction_bias);
    args.scale = static_cast<float>(routed_scaling_factor);
    return args;
}

size_t at_least_one(const Checker &rule, int64_t k) {
    if (k < 1) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "k", "be at least 1", std::to_string(k));
    }
    return static_cast<size_t>(k);
}

Outputs run_into(const ExecutionContext &context, const Checker &rule, Args args, int64_t k, Tensor values,
                 Tensor indices) {
    args.topk = at_least_one(rule, k);
    args.values = view(context, rule, "out0", values);
    args.indices = view(context, rule, "out1", indices);
    run(context, args, kNames);
    return {values, indices};
}

Outputs run_new(const ExecutionContext &context, const Checker &rule, Args args, int64_t k) {
    check(args, kNames); // checks x only, because the outputs' shapes follow from it
    set_topk(args, at_least_one(rule, k));
    return run_into(context, rule, args, k, empty_like(context, args.values), empty_like(context, args.indices));
}

Outputs topksoftmax(const ExecutionContext &context, const Tensor &x, int64_t k, bool normalize) {
    return run_new(context, kSoftmax, softmax_args(context, x, normalize), k);
}

Outputs topksoftmax_out(const ExecutionContext &context, const Tensor &x, int64_t k, bool normalize, Tensor out0,
                        Tensor out1) {
    return run_into(context, kSoftmax, softmax_args(context, x, normalize), k, out0, out1);
}

Outputs topkrouter(const ExecutionContext &context, const Tensor &x, const Tensor &correction_bias, int64_t k,
                   double routed_scaling_factor) {
    return run_new(context, kRouter, router_args(context, x, correction_bias, routed_scaling_factor), k);
}

Outputs topkrouter_out(const ExecutionContext &context, const Tensor &x, const Tensor &correction_bias, int64_t k,
                       double routed_scaling_factor, Tensor out0, Tensor out1) {
    return run_into(context, kRouter, router_args(context, x, correction_bias, routed_scaling_factor), k, out0, out1);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("topksoftmax", INFINI_BOX(topksoftmax));
    m.impl("topksoftmax.out", INFINI_BOX(topksoftmax_out));
    m.impl("topkrouter", INFINI_BOX(topkrouter));
    m.impl("topkrouter.out", INFINI_BOX(topkrouter_out));
}

} // namespace infini::topk
