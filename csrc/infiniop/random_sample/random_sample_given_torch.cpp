// torch.ops.infini.random_sample_given, functional and out; declared in torch_infini/ops/random_sample_given.py.
#include "../../torch/tensor.h"
#include "random_sample.h"

#include <algorithm>

namespace infini::random_sample {
namespace {

Tensor random_sample_given_out(const ExecutionContext &context, const Tensor &logits, double random_val, double topp,
                               int64_t topk, double temperature, Tensor out) {
    const GivenNames &names = kRandomSampleGiven;
    GivenArgs args;
    args.names = &names;
    args.probs = view(context, names.rule, names.logits, logits);
    args.result = view(context, names.rule, names.out, out);
    args.random_val = random_val;
    args.topp = topp;
    args.topk = static_cast<int>(std::clamp<int64_t>(topk, 0, kMaxColumns)); // larger values set no limit
    args.temperature = temperature;
    run(context, args);
    return out;
}

Tensor random_sample_given(const ExecutionContext &context, const Tensor &logits, double random_val, double topp,
                           int64_t topk, double temperature) {
    TensorView scalar = view(context, kRandomSampleGiven.rule, kRandomSampleGiven.logits, logits);
    scalar.ndim = 0;
    return random_sample_given_out(context, logits, random_val, topp, topk, temperature,
                                   empty_like(context, scalar, INFINI_DTYPE_I32));
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("random_sample_given", INFINI_BOX(random_sample_given));
    m.impl("random_sample_given.out", INFINI_BOX(random_sample_given_out));
}

} // namespace infini::random_sample
