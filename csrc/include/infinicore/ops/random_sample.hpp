// random_sample: the index of one of the logits [n], drawn by a given number of [0, 1] after temperature, top-k and
// top-p. It is the largest logit's if random_val, topp or temperature is 0 or topk is 1; topk <= 0 is no limit.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class RandomSample {
public:
    using schema = void (*)(Tensor, Tensor, float, float, int, float);
    static void execute(Tensor indices, Tensor logits, float random_val, float topp, int topk, float temperature);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor random_sample(Tensor logits, float random_val, float topp, int topk, float temperature); // [], I32
void random_sample_(Tensor indices, Tensor logits, float random_val, float topp, int topk, float temperature);

} // namespace infinicore::op
