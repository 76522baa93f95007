// torch.ops.infini.silu (functional, out, in-place) and swiglu (functional, out): elementwise ops, see ../elementwise.
// Declared in torch_infini/ops/silu.py and swiglu.py. swiglu also takes a fused product, whose halves are views of it.
#include <optional>

#include "../../torch/tensor.h"
#include "elementwise/elementwise.h"

namespace infini::swiglu {
namespace {

using elementwise::Args;
using elementwise::Op;

constexpr Checker kSilu("silu"), kSwiglu("swiglu");
constexpr elementwise::Names kSiluNames{"silu", {"out", "x"}, 1}, kSwigluNames{"swiglu", {"out", "up", "gate"}, 2};

void run_silu(const TensorView &out, const TensorView &x) {
    Args args;
    args.op = Op::silu;
    args.tensors[0] = out;
    args.tensors[1] = x;
    elementwise::run(args, kSiluNames);
}

Tensor silu(const Tensor &x) {
    const TensorView in = view(kSilu, "x", x);
    Tensor y = empty_like(in);
    run_silu(view(kSilu, "out", y), in);
    return y;
}

Tensor silu_out(const Tensor &x, Tensor out) {
    const TensorView in = view(kSilu, "x", x);
    run_silu(view(kSilu, "out", out), in);
    return out;
}

void silu_(Tensor x) {
    const TensorView in = view(kSilu, "x", x);
    kSilu.writable("x", in);
    run_silu(in, in);
}

struct Inputs {
    TensorView gate, up;
};

// The halves of a fused product [..., 2d].
Inputs split(TensorView gate) {
    kSwiglu.rank("gate", gate, 1, kMaxDims);
    const int last = gate.ndim - 1;
    if (gate.shape[last] % 2 != 0) {
        kSwiglu.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "gate",
                     "have an even last dimension, gate and up side by side, where up is not given", shape_of(gate));
    }
    gate.shape[last] /= 2;
    TensorView up = gate;
    if (gate.numel() > 0) {
        up.data = gate.as<char>() + gate.shape[last] * gate.strides[last] * static_cast<int64_t>(size_of(gate.dtype));
    }
    return {gate, up};
}

Inputs swiglu_inputs(const Tensor &gate, const std::optional<Tensor> &up) {
    const TensorView first = view(kSwiglu, "gate", gate);
    return up ? Inputs{first, view(kSwiglu, "up", *up)} : split(first);
}

void run_swiglu(const TensorView &out, const Inputs &inputs) {
    Args args;
    args.op = Op::swiglu;
    args.tensors[0] = out;
    args.tensors[1] = inputs.up;
    args.tensors[2] = inputs.gate;
    elementwise::run(args, kSwigluNames);
}

Tensor swiglu(const Tensor &gate, const std::optional<Tensor> &up) {
    const Inputs inputs = swiglu_inputs(gate, up);
    Tensor y = empty_like(inputs.gate);
    run_swiglu(view(kSwiglu, "out", y), inputs);
    return y;
}

Tensor swiglu_out(const Tensor &gate, const std::optional<Tensor> &up, Tensor out) {
    const Inputs inputs = swiglu_inputs(gate, up);
    run_swiglu(view(kSwiglu, "out", out), inputs);
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
