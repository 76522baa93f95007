// torch.ops.infini.random_sample, functional and out; declared in torch_infini/ops/random_sample.py.
#include "../../torch/tensor.h"
#include "random_sample.h"

namespace infini::random_sample {
namespace {

constexpr Checker kRule("random_sample");

Tensor random_sample_out(const ExecutionContext &context, const Tensor &logits, const Tensor &temperature,
                         const Tensor &top_k, const Tensor &top_p, const Tensor &seed, const Tensor &offset,
                         Tensor out) {
    Args args;
    args.logits = view(context, kRule, "logits", logits);
    args.temperature = view(context, kRule, "temperature", temperature);
    args.top_k = view(context, kRule, "top_k", top_k);
    args.top_p = view(context, kRule, "top_p", top_p);
    args.seed = view(context, kRule, "seed", seed);
    args.offset = view(context, kRule, "offset", offset);
    args.out = view(context, kRule, "out", out);
    run(context, "random_sample", args);
    return out;
}

Tensor random_sample(const ExecutionContext &context, const Tensor &logits, const Tensor &temperature,
                     const Tensor &top_k, const Tensor &top_p, const Tensor &seed, const Tensor &offset) {
    TensorView rows = view(context, kRule, "logits", logits); // without its last dimension it has the result's shape
    kRule.rank("logits", rows, 1, 2);
    --rows.ndim;
    return random_sample_out(context, logits, temperature, top_k, top_p, seed, offset,
                             empty_like(context, rows, INFINI_DTYPE_I64));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("random_sample", INFINI_BOX(random_sample));
    m.impl("random_sample.out", INFINI_BOX(random_sample_out));
}

} // namespace infini::random_sample
