// torch.ops.infini.dequantize_awq, functional and out; declared in torch_infini/ops/dequantize_awq.py.
#include "../../torch/tensor.h"
#include "dequantize_awq.h"

namespace infini::dequantize_awq {
namespace {

constexpr Checker kRule("dequantize_awq");

Tensor dequantize_awq_out(const Tensor &qweight, const Tensor &scales, const Tensor &zeros, Tensor out) {
    Args args;
    args.out = view(kRule, "out", out);
    args.qweight = view(kRule, "qweight", qweight);
    args.scales = view(kRule, "scales", scales);
    args.zeros = view(kRule, "zeros", zeros);
    run(args);
    return out;
}

Tensor dequantize_awq(const Tensor &qweight, const Tensor &scales, const Tensor &zeros) {
    const TensorView words = view(kRule, "qweight", qweight);
    // What the shape of out is made of.
    kRule.rank("qweight", words, 2);
    kRule.dense_last("qweight", words);
    return dequantize_awq_out(qweight, scales, zeros, empty({words.size(0), 8 * words.size(1)}, INFINI_DTYPE_F16));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("dequantize_awq", INFINI_BOX(dequantize_awq));
    m.impl("dequantize_awq.out", INFINI_BOX(dequantize_awq_out));
}

} // namespace infini::dequantize_awq
