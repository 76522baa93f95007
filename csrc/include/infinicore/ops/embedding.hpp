// embedding: the rows of weight [rows, dim] that input names: out has the shape of input, I32 or I64, with dim behind it.
// input may be on the CPU while weight is on another device: it is copied at each run.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

Tensor embedding(Tensor input, Tensor weight);
void embedding_(Tensor out, Tensor input, Tensor weight);

} // namespace infinicore::op
