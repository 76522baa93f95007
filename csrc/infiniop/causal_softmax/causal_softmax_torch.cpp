// torch.ops.infini.causal_softmax, functional, out and in-place; declared in torch_infini/ops/causal_softmax.py.
#include "../../torch/tensor.h"
#include "causal_softmax.h"

namespace infini::causal_softmax {
namespace {

constexpr Checker kSoftmax("causal_softmax");

Tensor causal_softmax_out(const Tensor &x, Tensor out) {
    Args args;
    args.x = view(kSoftmax, "x", x);
    args.y = view(kSoftmax, "out", out);
    run(args);
    return out;
}

Tensor causal_softmax(const Tensor &x) {
    return causal_softmax_out(x, empty_like(view(kSoftmax, "x", x)));
}

void causal_softmax_(Tensor x) {
    kSoftmax.writable("x", view(kSoftmax, "x", x));
    causal_softmax_out(x, x);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("causal_softmax", INFINI_BOX(causal_softmax));
    m.impl("causal_softmax.out", INFINI_BOX(causal_softmax_out));
    m.impl("causal_softmax_", INFINI_BOX(causal_softmax_));
}

} // namespace infini::causal_softmax
