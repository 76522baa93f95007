// torch.ops.infini.silu (functional, out, in-place) and swiglu (functional, out).
// Declared in torch_infini/ops/silu.py and swiglu.py.
#include <optional>

#include "../../torch/tensor.h"
#include "swiglu.h"

namespace infini::swiglu {
namespace {

constexpr Checker kSilu("silu"), kSwiglu("swiglu");

Tensor silu(const Tensor &x) {
    Args args;
    args.gate = view(kSilu, "x", x);
    Tensor y = empty_like(args.gate);
    args.y = view(kSilu, "out", y);
    run("silu", args);
    return y;
}

Tensor silu_out(const Tensor &x, Tensor out) {
    Args args;
    args.gate = view(kSilu, "x", x);
    args.y = view(kSilu, "out", out);
    run("silu", args);
    return out;
}

void silu_(Tensor x) {
    Args args;
    args.gate = args.y = view(kSilu, "x", x);
    kSilu.writable("x", args.gate);
    run("silu", args);
}

Args swiglu_args(const Tensor &gate, const std::optional<Tensor> &up) {
    Args args;
    args.gate = view(kSwiglu, "gate", gate);
    if (up) {
        args.up = view(kSwiglu, "up", *up);
    } else {
        split(kSwiglu, args);
    }
    return args;
}

Tensor swiglu(const Tensor &gate, const std::optional<Tensor> &up) {
    Args args = swiglu_args(gate, up);
    Tensor y = empty_like(args.gate);
    args.y = view(kSwiglu, "out", y);
    run("swiglu", args);
    return y;
}

Tensor swiglu_out(const Tensor &gate, const std::optional<Tensor> &up, Tensor out) {
    Args args = swiglu_args(gate, up);
    args.y = view(kSwiglu, "out", out);
    run("swiglu", args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("silu", TORCH_BOX(&silu));
    m.impl("silu.out", TORCH_BOX(&silu_out));
    m.impl("silu_", TORCH_BOX(&silu_));
    m.impl("swiglu", TORCH_BOX(&swiglu));
    m.impl("swiglu.out", TORCH_BOX(&swiglu_out));
}

} // namespace infini::swiglu
