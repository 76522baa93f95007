// torch.ops.infini.all_reduce_add_rms_norm: the sum over the ranks, the residual addition and the norm in one call.
// Declared in torch_infini/ops/all_reduce_add_rms_norm.py. The sum goes through memory: normalizing its rows as they
// arrive was not measurably faster between two ranks, from 1 row of 2,048 to 512 (tried by hand).
#include <optional>
#include <tuple>

#include "collectives.h"
#include "rms_norm/rms_norm.h"

namespace infini::collectives {
namespace {

constexpr const char *kOp = "all_reduce_add_rms_norm";
constexpr Checker kRule(kOp);

std::tuple<Tensor, Tensor> all_reduce_add_rms_norm_out(const ExecutionContext &context, const Tensor &x,
                                                       const Tensor &residual, const Tensor &weight, double eps,
                                                       int64_t rounding, int64_t group, Tensor out0, Tensor out1) {
    rms_norm::Args args;
    args.x = view(context, kRule, "x", x);
    args.residual = view(context, kRule, "residual", residual);
    args.weight = view(context, kRule, "weight", weight);
    args.eps = eps;
    args.rounding = static_cast<rms_norm::Rounding>(rounding);
    args.y = view(context, kRule, "out0", out0);
    args.h = view(context, kRule, "out1", out1);
    rms_norm::check(kOp, args); // checked before the other ranks wait for this one
    const std::shared_ptr<const Group> ranks = group_of(kRule, group);
    std::optional<Tensor> between;
    if (ranks->size > 1) {
        // The sum is stored in h until it is added, unless h holds the residual.
        const TensorView sum = overlap(args.h, args.residual)
                                   ? view(context, kRule, "x", between.emplace(empty_like(context, args.x)))
                                   : args.h;
        run(context, *ranks, {Collective::all_reduce, sum.numel(), INFINICCL_SUM}, args.x, sum);
        args.x = sum;
    }
    rms_norm::run(context, kOp, args);
    return {out0, out1};
}

std::tuple<Tensor, Tensor> all_reduce_add_rms_norm(const ExecutionContext &context, const Tensor &x,
                                                   const Tensor &residual, const Tensor &weight, double eps,
                                                   int64_t rounding, int64_t group) {
    const TensorView from = view(context, kRule, "x", x), by = view(context, kRule, "weight", weight);
    const infiniDtype_t dtype = rms_norm::output_dtype(from.dtype, by.dtype, static_cast<rms_norm::Rounding>(rounding));
    return all_reduce_add_rms_norm_out(context, x, residual, weight, eps, rounding, group,
                                       empty_like(context, from, dtype), empty_like(context, from));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("all_reduce_add_rms_norm", INFINI_BOX(all_reduce_add_rms_norm));
    m.impl("all_reduce_add_rms_norm.out", INFINI_BOX(all_reduce_add_rms_norm_out));
}

} // namespace infini::collectives
