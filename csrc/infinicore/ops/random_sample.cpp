// random_sample, by libinfiniop's RandomSample.
#include "infinicore/ops/random_sample.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreateRandomSampleDescriptor, infiniopGetRandomSampleWorkspaceSize,
                           infiniopRandomSample, infiniopDestroyRandomSampleDescriptor>;

void compute(Tensor indices, Tensor logits, float random_val, float topp, int topk, float temperature) {
    Operator::call("random_sample", {{"indices", indices, Argument::Write}, {"logits", logits}}, std::tuple{},
                   std::tuple{random_val, topp, topk, temperature});
}

} // namespace

common::OpDispatcher<RandomSample::schema> &RandomSample::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("random_sample", compute);
    return *dispatcher;
}

void RandomSample::execute(Tensor indices, Tensor logits, float random_val, float topp, int topk, float temperature) {
    dispatch(dispatcher(), compute, "random_sample", indices, std::move(indices), std::move(logits),
             std::move(random_val), std::move(topp), std::move(topk), std::move(temperature));
}

void random_sample_(Tensor indices, Tensor logits, float random_val, float topp, int topk, float temperature) {
    RandomSample::execute(std::move(indices), std::move(logits), random_val, topp, topk, temperature);
}

Tensor random_sample(Tensor logits, float random_val, float topp, int topk, float temperature) {
    Tensor indices = new_result("random_sample", "logits", logits, {}, DataType::I32);
    random_sample_(indices, std::move(logits), random_val, topp, topk, temperature);
    return indices;
}

} // namespace infinicore::op
