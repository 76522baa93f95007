// torch.ops.infini.quantize_int8 and quantize_int4, functional and out; declared in torch_infini/ops/quantize.py.
#include "../../torch/tensor.h"
#include "quantize.h"

namespace infini::quantize {
namespace {

constexpr Checker kInt8("quantize_int8"), kInt4("quantize_int4");

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Args args_of(const ExecutionContext &context, const Checker &rule, const Tensor &weight, int64_t group_size = 0) {
    Args args;
    args.weight = view(context, rule, "weight", weight);
    args.group_size = group_size;
    return args;
}

Two into(const ExecutionContext &context, Args args, Tensor q, Tensor scales) {
    args.q = view(context, kInt8, "out0", q);
    args.scales = view(context, kInt8, "out1", scales);
    run_int8(context, args);
    return {q, scales};
}

Three into(const ExecutionContext &context, Args args, Tensor q, Tensor scales, Tensor zeros) {
    args.q = view(context, kInt4, "out0", q);
    args.scales = view(context, kInt4, "out1", scales);
    args.zeros = view(context, kInt4, "out2", zeros);
    run_int4(context, args);
    return {q, scales, zeros};
}

Two quantize_int8(const ExecutionContext &context, const Tensor &weight) {
    const Args args = args_of(context, kInt8, weight);
    check_int8(args);
    return into(context, args, empty_like(context, args.weight, INFINI_DTYPE_I8),
                empty(context, {args.weight.size(0)}, INFINI_DTYPE_F32));
}

Two quantize_int8_out(const ExecutionContext &context, const Tensor &weight, Tensor out0, Tensor out1) {
    return into(context, args_of(context, kInt8, weight), out0, out1);
}

Three quantize_int4(const ExecutionContext &context, const Tensor &weight, int64_t group_size) {
    const Args args = args_of(context, kInt4, weight, group_size);
    check_int4(args);
    const int64_t n = args.weight.size(0), k = args.weight.size(1);
    const auto groups = [&] { return empty(context, {n, k / group_size}, args.weight.dtype); };
    return into(context, args, empty(context, {n, k / 2}, INFINI_DTYPE_U8), groups(), groups());
}

Three quantize_int4_out(const ExecutionContext &context, const Tensor &weight, int64_t group_size, Tensor out0,
                        Tensor out1, Tensor out2) {
    return into(context, args_of(context, kInt4, weight, group_size), out0, out1, out2);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("quantize_int8", INFINI_BOX(quantize_int8));
    m.impl("quantize_int8.out", INFINI_BOX(quantize_int8_out));
    m.impl("quantize_int4", INFINI_BOX(quantize_int4));
    m.impl("quantize_int4.out", INFINI_BOX(quantize_int4_out));
}

} // namespace infini::quantize
