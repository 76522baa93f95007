// torch.ops.infini.causal_softmax, functional, out and in-place; declared in torch_infini/ops/causal_softmax.py.
#include "../../torch/tensor.h"
#include "causal_softmax.h"

namespace infini::causal_softmax {
namespace {

constexpr Checker kSoftmax("causal_softmax");

Tensor causal_softmax_out(const ExecutionContext &context, const Tensor &x, Tensor out) {
    Args args;
    args.x = view(context, kSoftmax, "x", x);
    args.y = view(context, kSoftmax, "out", out);
    run(context, args);
    return out;
}

Tensor causal_softmax(const ExecutionContext &context, const Tensor &x) {
    return causal_softmax_out(context, x, empty_like(context, view(context, kSoftmax, "x", x)));
}

void causal_softmax_(const ExecutionContext &context, Tensor x) {
    kSoftmax.writable("x", view(context, kSoftmax, "x", x));
    causal_softmax_out(context, x, x);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("causal_softmax", INFINI_BOX(causal_softmax));
    m.impl("causal_softmax.out", INFINI_BOX(causal_softmax_out));
    m.impl("causal_softmax_", INFINI_BOX(causal_softmax_));
}

} // namespace infini::causal_softmax
