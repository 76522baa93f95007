// torch.ops.infini.lp_norm, functional, out and in-place; declared in torch_infini/ops/lp_norm.py.
#include "../../torch/tensor.h"
#include "lp_norm.h"

namespace infini::lp_norm {
namespace {

constexpr Checker kRule("lp_norm");
constexpr Names kNames{"out", "x", "dim"};

Tensor lp_norm_out(const ExecutionContext &context, const Tensor &x, int64_t p, int64_t dim, double eps, Tensor out) {
    Args args;
    args.x = view(context, kRule, "x", x);
    args.y = view(context, kRule, "out", out);
    args.axis = static_cast<int>(dim);
    if (args.axis != dim) {
        kRule.fail(INFINI_STATUS_BAD_PARAM, "dim", "be a dimension of x", std::to_string(dim));
    }
    args.p = p;
    args.eps = eps;
    run(context, args, kNames);
    return out;
}

Tensor lp_norm(const ExecutionContext &context, const Tensor &x, int64_t p, int64_t dim, double eps) {
    return lp_norm_out(context, x, p, dim, eps, empty_like(context, view(context, kRule, "x", x)));
}

void lp_norm_(const ExecutionContext &context, Tensor x, int64_t p, int64_t dim, double eps) {
    kRule.writable("x", view(context, kRule, "x", x));
    lp_norm_out(context, x, p, dim, eps, x);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("lp_norm", INFINI_BOX(lp_norm));
    m.impl("lp_norm.out", INFINI_BOX(lp_norm_out));
    m.impl("lp_norm_", INFINI_BOX(lp_norm_));
}

} // namespace infini::lp_norm
