// torch.ops.infini.embedding, functional and out; declared in torch_infini/ops/embedding.py. The output's shape follows
// from the arguments, so their ranks are checked before it is allocated.
#include "../../torch/tensor.h"
#include "embedding.h"

#include <optional>

namespace infini::embedding {
namespace {

constexpr Checker kRule("embedding");

Args embedding_args(const ExecutionContext &context, const Tensor &ids, const Tensor &weight, int64_t first,
                    std::optional<int64_t> total) {
    Args args;
    args.ids = view(context, kRule, "ids", ids);
    args.weight = view(context, kRule, "weight", weight);
    args.first = first;
    args.total = total.value_or(args.weight.ndim > 0 ? args.weight.shape[0] : 0);
    return args;
}

Tensor embedding(const ExecutionContext &context, const Tensor &ids, const Tensor &weight, int64_t first,
                 std::optional<int64_t> total) {
    Args args = embedding_args(context, ids, weight, first, total);
    kRule.rank("ids", args.ids, 0, kMaxDims - 1);
    kRule.rank("weight", args.weight, 2);
    TensorView like = args.ids;
    like.shape[like.ndim++] = args.weight.shape[1];
    Tensor out = empty_like(context, like, args.weight.dtype);
    args.out = view(context, kRule, "out", out);
    run(context, args);
    return out;
}

Tensor embedding_out(const ExecutionContext &context, const Tensor &ids, const Tensor &weight, int64_t first,
                     std::optional<int64_t> total, Tensor out) {
    Args args = embedding_args(context, ids, weight, first, total);
    args.out = view(context, kRule, "out", out);
    run(context, args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("embedding", INFINI_BOX(embedding));
    m.impl("embedding.out", INFINI_BOX(embedding_out));
}

} // namespace infini::embedding
