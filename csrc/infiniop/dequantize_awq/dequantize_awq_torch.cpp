// torch.ops.infini.dequantize_awq, functional and out; declared in torch_infini/ops/dequantize_awq.py.
#include "../../torch/tensor.h"
#include "dequantize_awq.h"

namespace infini::dequantize_awq {
namespace {

constexpr Checker kRule("dequantize_awq");

Tensor dequantize_awq_out(const ExecutionContext &context, const Tensor &qweight, const Tensor &scales,
                          const Tensor &zeros, Tensor out) {
    Args args;
    args.out = view(context, kRule, "out", out);
    args.qweight = view(context, kRule, "qweight", qweight);
    args.scales = view(context, kRule, "scales", scales);
    args.zeros = view(context, kRule, "zeros", zeros);
    run(context, args);
    return out;
}

Tensor dequantize_awq(const ExecutionContext &context, const Tensor &qweight, const Tensor &scales,
                      const Tensor &zeros) {
    const TensorView words = view(context, kRule, "qweight", qweight);
    // The shape of out.
    kRule.rank("qweight", words, 2);
    kRule.dense_last("qweight", words);
    return dequantize_awq_out(context, qweight, scales, zeros,
                              empty(context, {words.size(0), 8 * words.size(1)}, INFINI_DTYPE_F16));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("dequantize_awq", INFINI_BOX(dequantize_awq));
    m.impl("dequantize_awq.out", INFINI_BOX(dequantize_awq_out));
}

} // namespace infini::dequantize_awq
