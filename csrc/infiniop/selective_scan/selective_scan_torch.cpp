// torch.ops.infini.selective_scan, which writes out and state; declared in torch_infini/ops/selective_scan.py.
#include <optional>

#include "../../torch/tensor.h"
#include "selective_scan.h"

namespace infini::selective_scan {
namespace {

constexpr Checker kRule("selective_scan");

void selective_scan(const ExecutionContext &context, Tensor out, const Tensor &x, const Tensor &dt, const Tensor &a,
                    const Tensor &b, const Tensor &c, const std::optional<Tensor> &d,
                    const std::optional<Tensor> &dt_bias, const std::optional<Tensor> &z,
                    const std::optional<Tensor> &state, const std::optional<Tensor> &offsets,
                    const std::optional<Tensor> &slots, bool dt_softplus) {
    Args args;
    args.y = view(context, kRule, "out", out);
    args.x = view(context, kRule, "x", x);
    args.dt = view(context, kRule, "dt", dt);
    args.a = view(context, kRule, "a", a);
    args.b = view(context, kRule, "b", b);
    args.c = view(context, kRule, "c", c);
    args.d = optional_view(context, kRule, "d", d);
    args.dt_bias = optional_view(context, kRule, "dt_bias", dt_bias);
    args.z = optional_view(context, kRule, "z", z);
    args.state = optional_view(context, kRule, "state", state);
    args.sequences.offsets = optional_view(context, kRule, "offsets", offsets);
    args.sequences.slots = optional_view(context, kRule, "slots", slots);
    args.dt_softplus = dt_softplus;
    run(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("selective_scan", INFINI_BOX(selective_scan));
}

} // namespace infini::selective_scan
