// embedding, by libinfiniop's Embedding.
#include "infinicore/ops/embedding.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateEmbeddingDescriptor, infiniopGetEmbeddingWorkspaceSize, infiniopEmbedding,
                           infiniopDestroyEmbeddingDescriptor>;

} // namespace

void embedding_(Tensor out, Tensor input, Tensor weight) {
    const Tensor ids = present("embedding", "input", input)->to(present("embedding", "weight", weight)->device());
    Operator::call("embedding", {{"out", out, Argument::Write}, {"input", ids}, {"weight", weight}});
}

Tensor embedding(Tensor input, Tensor weight) {
    if (present("embedding", "weight", weight)->ndim() != 2) {
        fail("infinicore::embedding: weight must have 2 dimensions, got ", weight->info());
    }
    Shape shape = present("embedding", "input", input)->shape();
    shape.push_back(weight->size(1));
    Tensor out = new_result("embedding", "weight", weight, shape, weight->dtype());
    embedding_(out, std::move(input), std::move(weight));
    return out;
}

} // namespace infinicore::op
