// embedding: the rows of weight [rows, dim] at the indices input [...], I32 or I64; out is [..., dim].
// input may be on the CPU while weight is on another device: it is copied at each run.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

Tensor embedding(Tensor input, Tensor weight);
void embedding_(Tensor out, Tensor input, Tensor weight);

} // namespace infinicore::op
