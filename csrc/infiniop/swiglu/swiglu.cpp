// The rules of silu and swiglu, and the way to their kernel.
// The two halves of a fused product are views of it: from `split` on, nothing else knows of that form.
#include "swiglu.h"

namespace infini::swiglu {

void split(const Checker &rule, Args &args) {
    TensorView &gate = args.gate;
    rule.rank("gate", gate, 1, kMaxDims);
    rule.dtype("gate", gate, INFINI_FLOATS);
    rule.dense_last("gate", gate);
    const int64_t both = gate.size(-1), d = both / 2;
    if (both % 2 != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "gate",
                  "have an even last dimension, gate and up side by side, where up is not given", shape_of(gate));
    }
    gate.shape[gate.ndim - 1] = d;
    args.up = gate;
    if (gate.numel() > 0) {
        args.up.data = gate.as<char>() + d * static_cast<int64_t>(size_of(gate.dtype));
    }
}

void run(const char *op, const Args &args) {
    const Checker rule(op);
    const TensorView &gate = args.gate, &up = args.up, &y = args.y;
    const bool with_up = up.dtype != INFINI_DTYPE_INVALID;
    const char *const name = with_up ? "gate" : "x";
    rule.rank(name, gate, with_up ? 1 : 0, kMaxDims);
    rule.dtype(name, gate, INFINI_FLOATS);
    rule.dense_last(name, gate);
    if (with_up) {
        rule.same_shape("up", up, "gate", gate);
        rule.same_dtype("up", up, "gate", gate);
        rule.dense_last("up", up);
    }
    rule.same_shape("out", y, name, gate);
    rule.same_dtype("out", y, name, gate);
    rule.dense_last("out", y);
    rule.writable("out", y);
    rule.no_partial_overlap("out", y, name, gate);
    if (with_up) {
        rule.no_partial_overlap("out", y, "up", up);
    }
    if (gate.numel() > 0) {
        cpu_kernel(args);
    }
}

} // namespace infini::swiglu
