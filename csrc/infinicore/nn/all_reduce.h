// AllReduce: the in-place sum over a communicator's ranks, as an op that graphs can record.
#pragma once

#include <infiniccl.h>

#include "infinicore/graph/graph.hpp"

namespace infinicore::nn {

INFINICORE_GRAPH_OP_CLASS(AllReduce, Tensor, infinicclComm_t);

// Replaces x, which must be contiguous, by the sum of all ranks' x. Every rank must call it.
void all_reduce_(Tensor x, infinicclComm_t communicator);

} // namespace infinicore::nn
