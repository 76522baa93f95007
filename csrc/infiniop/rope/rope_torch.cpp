// torch.ops.infini.rope, functional, out and in-place; declared in torch_infini/ops/rope.py.
#include "../../torch/tensor.h"
#include "rope.h"

namespace infini::rope {
namespace {

constexpr Checker kRope("rope");

Args rope_args(const ExecutionContext &context, const Tensor &x, const Tensor &cos, const Tensor &sin,
               const std::optional<Tensor> &positions, bool interleaved) {
    Args args;
    args.x = view(context, kRope, "x", x);
    args.cos = view(context, kRope, "cos", cos);
    args.sin = view(context, kRope, "sin", sin);
    if (positions) {
        args.positions = view(context, kRope, "positions", *positions);
    }
    args.interleaved = interleaved;
    return args;
}

Tensor rope_out(const ExecutionContext &context, const Tensor &x, const Tensor &cos, const Tensor &sin,
                const std::optional<Tensor> &positions, bool interleaved, Tensor out) {
    Args args = rope_args(context, x, cos, sin, positions, interleaved);
    args.y = view(context, kRope, "out", out);
    run(context, "rope", args);
    return out;
}

Tensor rope(const ExecutionContext &context, const Tensor &x, const Tensor &cos, const Tensor &sin,
            const std::optional<Tensor> &positions, bool interleaved) {
    Args args = rope_args(context, x, cos, sin, positions, interleaved);
    Tensor y = empty_like(context, args.x);
    args.y = view(context, kRope, "out", y);
    run(context, "rope", args);
    return y;
}

void rope_(const ExecutionContext &context, Tensor x, const Tensor &cos, const Tensor &sin,
           const std::optional<Tensor> &positions, bool interleaved) {
    kRope.writable("x", view(context, kRope, "x", x));
    rope_out(context, x, cos, sin, positions, interleaved, x);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("rope", INFINI_BOX(rope));
    m.impl("rope.out", INFINI_BOX(rope_out));
    m.impl("rope_", INFINI_BOX(rope_));
}

} // namespace infini::rope
