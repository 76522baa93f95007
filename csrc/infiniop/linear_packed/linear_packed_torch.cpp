// torch.ops.infini.linear_packed, functional and out, and pack_linear, which writes into its argument; declared in
// torch_infini/ops/linear_packed.py and pack_linear.py.
#include "../../torch/tensor.h"
#include "check.h"
#include "linear_packed.h"

#include <optional>

namespace infini::linear_packed {
namespace {

constexpr Checker kLinear("linear_packed"), kPack("pack_linear");

Args linear_args(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t n,
                 const std::optional<Tensor> &bias) {
    Args args;
    args.x = view(context, kLinear, "x", x);
    args.weight = view(context, kLinear, "weight", weight);
    args.bias = optional_view(context, kLinear, "bias", bias);
    args.n = n;
    check_inputs(args);
    return args;
}

Tensor linear_packed(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t n,
                     const std::optional<Tensor> &bias) {
    Args args = linear_args(context, x, weight, n, bias);
    args.y = args.x;
    args.y.shape[args.x.ndim - 1] = n;
    Tensor y = empty_like(context, args.y);
    args.y = view(context, kLinear, "out", y);
    run(context, args);
    return y;
}

Tensor linear_packed_out(const ExecutionContext &context, const Tensor &x, const Tensor &weight, int64_t n,
                         const std::optional<Tensor> &bias, Tensor out) {
    Args args = linear_args(context, x, weight, n, bias);
    args.y = view(context, kLinear, "out", out);
    check_output(args);
    run(context, args);
    return out;
}

void pack_linear(const ExecutionContext &context, Tensor packed, const Tensor &weight, int64_t first_row) {
    PackArgs args;
    args.packed = view(context, kPack, "packed", packed);
    args.weight = view(context, kPack, "weight", weight);
    args.first_row = first_row;
    run_pack(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY_CPU(m) {
    m.impl("linear_packed", INFINI_BOX(linear_packed));
    m.impl("linear_packed.out", INFINI_BOX(linear_packed_out));
    m.impl("pack_linear", INFINI_BOX(pack_linear));
}

} // namespace infini::linear_packed
