// torch.ops.infini.rearrange, functional and out; declared in torch_infini/ops/rearrange.py.
#include "../../torch/tensor.h"
#include "rearrange.h"

namespace infini::rearrange {
namespace {

constexpr Checker kRearrange("rearrange");

Tensor rearrange_out(const ExecutionContext &context, const Tensor &x, Tensor out) {
    run(context, {view(context, kRearrange, "out", out), view_of_numbers(context, kRearrange, "x", x)},
        {{"out", "x"}, 1});
    return out;
}

Tensor rearrange(const ExecutionContext &context, const Tensor &x) {
    return rearrange_out(context, x, empty_like(context, view_of_numbers(context, kRearrange, "x", x)));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("rearrange", INFINI_BOX(rearrange));
    m.impl("rearrange.out", INFINI_BOX(rearrange_out));
}

} // namespace infini::rearrange
