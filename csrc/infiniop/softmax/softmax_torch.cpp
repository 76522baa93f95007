// torch.ops.infini.softmax and log_softmax, functional, out and in-place; declared in torch_infini/ops/softmax.py.
#include "../../torch/tensor.h"
#include "softmax.h"

namespace infini::softmax {
namespace {

template <bool kLog> constexpr Checker kRule(kLog ? "log_softmax" : "softmax");
constexpr Names kNames{"out", "dim"};

template <bool kLog> Tensor softmax_out(const ExecutionContext &context, const Tensor &x, int64_t dim, Tensor out) {
    constexpr const Checker &rule = kRule<kLog>;
    Args args;
    args.x = view(context, rule, "x", x);
    args.y = view(context, rule, "out", out);
    args.axis = static_cast<int>(dim);
    if (args.axis != dim) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "dim", "be a dimension of x", std::to_string(dim));
    }
    args.log = kLog;
    run(context, args, kNames);
    return out;
}

template <bool kLog> Tensor softmax(const ExecutionContext &context, const Tensor &x, int64_t dim) {
    return softmax_out<kLog>(context, x, dim, empty_like(context, view(context, kRule<kLog>, "x", x)));
}

template <bool kLog> void softmax_(const ExecutionContext &context, Tensor x, int64_t dim) {
    kRule<kLog>.writable("x", view(context, kRule<kLog>, "x", x));
    softmax_out<kLog>(context, x, dim, x);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("softmax", INFINI_BOX(softmax<false>));
    m.impl("softmax.out", INFINI_BOX(softmax_out<false>));
    m.impl("softmax_", INFINI_BOX(softmax_<false>));
    m.impl("log_softmax", INFINI_BOX(softmax<true>));
    m.impl("log_softmax.out", INFINI_BOX(softmax_out<true>));
    m.impl("log_softmax_", INFINI_BOX(softmax_<true>));
}

} // namespace infini::softmax
