// torch.ops.infini.<op> for each line of the table in elementwise.h: functional, out and (except for gated ops) in
// place. Declared in torch_infini/ops/elementwise.py, silu.py, swiglu.py and geglu.py.
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../../torch/tensor.h"
#include "elementwise.h"

namespace infini::elementwise {
namespace {

constexpr const char *name_of(Op op) {
    return describe(op).names.op;
}

// The overloads of an op with one input.
template <Op op> struct Unary {
    static constexpr Checker kRule{name_of(op)};

    static TensorView input(const ExecutionContext &context, const Tensor &x) {
        return is_fill(op) ? view_of_numbers(context, kRule, "x", x) : view(context, kRule, "x", x);
    }

    static Tensor write(const ExecutionContext &context, const TensorView &x, const char *out_name, const Tensor &out) {
        run(context, {op, {view(context, kRule, out_name, out), x}}, {name_of(op), {out_name, "x"}, 1});
        return out;
    }

    static Tensor functional(const ExecutionContext &context, const Tensor &x) {
        const TensorView in = input(context, x);
        return write(context, in, "out", empty_like(context, in));
    }

    static Tensor out(const ExecutionContext &context, const Tensor &x, Tensor out) {
        return write(context, input(context, x), "out", out);
    }

    static void in_place(const ExecutionContext &context, Tensor x) { write(context, input(context, x), "x", x); }
};

struct Pair {
    TensorView x, other;
};

// Broadcasts the view to `shape` by stride 0; dimensions are aligned at the last.
TensorView stretch(const TensorView &view, const TensorView &shape) {
    TensorView wide = shape;
    wide.data = view.data;
    wide.dtype = view.dtype;
    for (int dim = 0; dim < shape.ndim; ++dim) {
        const int from = dim - (shape.ndim - view.ndim);
        wide.strides[dim] = from >= 0 && view.shape[from] == shape.shape[dim] ? view.strides[from] : 0;
    }
    return wide;
}

// Broadcasts both inputs to their common shape, by torch's rules.
Pair broadcast(const ExecutionContext &context, const Checker &rule, const Tensor &x_tensor,
               const Tensor &other_tensor) {
    const TensorView x = view(context, rule, "x", x_tensor), other = view(context, rule, "other", other_tensor);
    TensorView shape;
    shape.ndim = x.ndim > other.ndim ? x.ndim : other.ndim;
    for (int i = 1; i <= shape.ndim; ++i) {
        const int64_t a = i <= x.ndim ? x.size(-i) : 1, b = i <= other.ndim ? other.size(-i) : 1;
        if (a != b && a != 1 && b != 1) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "other", "broadcast with x, of shape " + shape_of(x),
                      shape_of(other));
        }
        shape.shape[shape.ndim - i] = a == 1 ? b : a;
    }
    return {stretch(x, shape), stretch(other, shape)};
}

// The overloads of an op with two inputs.
template <Op op> struct Binary {
    static constexpr Checker kRule{name_of(op)};

    static Tensor write(const ExecutionContext &context, const Pair &in, const char *out_name, const Tensor &out) {
        const TensorView y = view(context, kRule, out_name, out);
        kRule.same_shape(out_name, y, "x and other broadcast together", in.x);
        run(context, {op, {y, in.x, in.other}}, {name_of(op), {out_name, "x", "other"}, 1});
        return out;
    }

    static Tensor functional(const ExecutionContext &context, const Tensor &x, const Tensor &other) {
        const Pair in = broadcast(context, kRule, x, other);
        return write(context, in, "out", empty_like(context, in.x));
    }

    static Tensor out(const ExecutionContext &context, const Tensor &x, const Tensor &other, Tensor out) {
        return write(context, broadcast(context, kRule, x, other), "out", out);
    }

    static void in_place(const ExecutionContext &context, Tensor x, const Tensor &other) {
        write(context, broadcast(context, kRule, x, other), "x", x);
    }
};

// The overloads of clip with numbers as bounds. Follows torch.clip if a bound is missing or NaN, and if low > high.
struct Clip {
    static constexpr Checker kRule{name_of(Op::clip)};
    using Bound = std::optional<double>;

    // The number as a view broadcast to `like`, rounded to its dtype. check() rejects unsupported dtypes.
    static TensorView number(const TensorView &like, double value, uint64_t &memory) {
        const auto single = static_cast<float>(value);
        if (like.dtype == INFINI_DTYPE_F64) {
            std::memcpy(&memory, &value, sizeof(value));
        } else if (like.dtype == INFINI_DTYPE_F32) {
            std::memcpy(&memory, &single, sizeof(single));
        } else if (like.dtype == INFINI_DTYPE_BF16) {
            memory = torch::headeronly::BFloat16(single).x;
        } else if (like.dtype == INFINI_DTYPE_F16) {
            memory = torch::headeronly::Half(single).x;
        }
        TensorView view = like;
        view.data = &memory;
        for (int64_t &stride : view.strides) {
            stride = 0;
        }
        return view;
    }

    static Tensor write(const ExecutionContext &context, const TensorView &x, Bound min, Bound max,
                        const char *out_name, const Tensor &out) {
        constexpr double infinity = std::numeric_limits<double>::infinity();
        const double low = min.value_or(-infinity), high = max.value_or(infinity);
        const bool nan = std::isnan(low) || std::isnan(high);
        uint64_t memory[3] = {};
        run(context,
            {Op::clip,
             {view(context, kRule, out_name, out), nan ? number(x, std::nan(""), memory[0]) : x,
              number(x, low < high ? low : high, memory[1]), number(x, high, memory[2])},
             nan ? 3 : 2},
            {name_of(Op::clip), {out_name, "x", "min", "max"}, 1});
        return out;
    }

    static Tensor functional(const ExecutionContext &context, const Tensor &x, Bound min, Bound max) {
        const TensorView in = view(context, kRule, "x", x);
        return write(context, in, min, max, "out", empty_like(context, in));
    }

    static Tensor out(const ExecutionContext &context, const Tensor &x, Bound min, Bound max, Tensor out) {
        return write(context, view(context, kRule, "x", x), min, max, "out", out);
    }

    static void in_place(const ExecutionContext &context, Tensor x, Bound min, Bound max) {
        write(context, view(context, kRule, "x", x), min, max, "x", x);
    }
};

constexpr bool is_gated(Op op) {
    return op == Op::swiglu || op == Op::geglu;
}

// The overloads of a gated op: two tensors of equal shape, or a fused product [..., 2 d], whose halves are the inputs.
template <Op op> struct Gated {
    static constexpr Checker kRule{name_of(op)};

    struct Inputs {
        TensorView gate, up;
    };

    static Inputs split(TensorView gate) {
        kRule.rank("gate", gate, 1, kMaxDims);
        const int last = gate.ndim - 1;
        if (gate.shape[last] % 2 != 0) {
            kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "gate",
                       "have an even last dimension, gate and up side by side, where up is not given", shape_of(gate));
        }
        gate.shape[last] /= 2;
        TensorView up = gate;
        if (gate.numel() > 0) {
            up.data =
                gate.as<char>() + gate.shape[last] * gate.strides[last] * static_cast<int64_t>(size_of(gate.dtype));
        }
        return {gate, up};
    }

    static Inputs inputs(const ExecutionContext &context, const Tensor &gate, const std::optional<Tensor> &up) {
        const TensorView first = view(context, kRule, "gate", gate);
        return up ? Inputs{first, view(context, kRule, "up", *up)} : split(first);
    }

    static Tensor write(const ExecutionContext &context, const Inputs &in, const Tensor &out) {
        run(context, {op, {view(context, kRule, "out", out), in.up, in.gate}}, {name_of(op), {"out", "up", "gate"}, 2});
        return out;
    }

    static Tensor functional(const ExecutionContext &context, const Tensor &gate, const std::optional<Tensor> &up) {
        const Inputs in = inputs(context, gate, up);
        return write(context, in, empty_like(context, in.gate));
    }

    static Tensor out(const ExecutionContext &context, const Tensor &gate, const std::optional<Tensor> &up,
                      Tensor out) {
        return write(context, inputs(context, gate, up), out);
    }
};

template <Op op, int inputs>
using Forms = std::conditional_t<
    is_gated(op), Gated<op>,
    std::conditional_t<op == Op::clip, Clip, std::conditional_t<inputs == 2, Binary<op>, Unary<op>>>>;

template <Op op, typename F, typename Library>
void add_forms(Library &m, const char *functional, const char *out, const char *in_place) {
    m.impl(functional, INFINI_BOX(F::functional));
    m.impl(out, INFINI_BOX(F::out));
    if constexpr (!is_gated(op)) {
        m.impl(in_place, INFINI_BOX(F::in_place));
    }
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
#define INFINI_OP(Name, name, inputs, ...)                                                                             \
    add_forms<Op::name, Forms<Op::name, inputs>>(m, #name, #name ".out", #name "_");
    INFINI_ELEMENTWISE_OPS(INFINI_OP)
#undef INFINI_OP
}

} // namespace infini::elementwise
