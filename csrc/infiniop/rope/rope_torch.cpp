// torch.ops.infini.rope, functional, out and in-place; declared in torch_infini/ops/rope.py.
#include "../../torch/tensor.h"
#include "rope.h"

namespace infini::rope {
namespace {

constexpr Checker kRope("rope");

Args rope_args(const Tensor &x, const Tensor &cos, const Tensor &sin, const std::optional<Tensor> &positions,
               bool interleaved) {
    Args args;
    args.x = view(kRope, "x", x);
    args.cos = view(kRope, "cos", cos);
    args.sin = view(kRope, "sin", sin);
    if (positions) {
        args.positions = view(kRope, "positions", *positions);
    }
    args.interleaved = interleaved;
    return args;
}

Tensor rope_out(const Tensor &x, const Tensor &cos, const Tensor &sin, const std::optional<Tensor> &positions,
                bool interleaved, Tensor out) {
    Args args = rope_args(x, cos, sin, positions, interleaved);
    args.y = view(kRope, "out", out);
    run("rope", args);
    return out;
}

Tensor rope(const Tensor &x, const Tensor &cos, const Tensor &sin, const std::optional<Tensor> &positions,
            bool interleaved) {
    Args args = rope_args(x, cos, sin, positions, interleaved);
    Tensor y = empty_like(args.x);
    args.y = view(kRope, "out", y);
    run("rope", args);
    return y;
}

void rope_(Tensor x, const Tensor &cos, const Tensor &sin, const std::optional<Tensor> &positions, bool interleaved) {
    kRope.writable("x", view(kRope, "x", x));
    rope_out(x, cos, sin, positions, interleaved, x);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("rope", INFINI_BOX(rope));
    m.impl("rope.out", INFINI_BOX(rope_out));
    m.impl("rope_", INFINI_BOX(rope_));
}

} // namespace infini::rope
