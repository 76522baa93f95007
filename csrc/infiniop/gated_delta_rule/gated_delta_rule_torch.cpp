// torch.ops.infini.gated_delta_rule, which writes out and state; declared in torch_infini/ops/gated_delta_rule.py.
#include <optional>

#include "../../torch/tensor.h"
#include "gated_delta_rule.h"

#include <cmath>

namespace infini::gated_delta_rule {
namespace {

constexpr Checker kRule("gated_delta_rule");

void gated_delta_rule(const ExecutionContext &context, Tensor out, const Tensor &q, const Tensor &k, const Tensor &v,
                      const Tensor &g, const Tensor &beta, const std::optional<Tensor> &state,
                      const std::optional<Tensor> &offsets, const std::optional<Tensor> &slots,
                      std::optional<double> scale, bool l2norm) {
    Args args;
    args.y = view(context, kRule, "out", out);
    args.q = view(context, kRule, "q", q);
    args.k = view(context, kRule, "k", k);
    args.v = view(context, kRule, "v", v);
    args.g = view(context, kRule, "g", g);
    args.beta = view(context, kRule, "beta", beta);
    args.state = optional_view(context, kRule, "state", state);
    args.sequences.offsets = optional_view(context, kRule, "offsets", offsets);
    args.sequences.slots = optional_view(context, kRule, "slots", slots);
    const int64_t columns = args.q.ndim > 0 ? args.q.size(-1) : 1;
    args.scale = scale ? *scale : 1 / std::sqrt(static_cast<double>(columns > 0 ? columns : 1));
    args.l2norm = l2norm;
    run(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("gated_delta_rule", INFINI_BOX(gated_delta_rule));
}

} // namespace infini::gated_delta_rule
