// AllReduce: the sum over a communicator's ranks, in place, as an op that graphs record.
#pragma once

#include <infiniccl.h>

#include "infinicore/graph/graph.hpp"

namespace infinicore::nn {

INFINICORE_GRAPH_OP_CLASS(AllReduce, Tensor, infinicclComm_t);

// x, contiguous, becomes the sum of all ranks' x; every rank has to call it.
void all_reduce_(Tensor x, infinicclComm_t communicator);

} // namespace infinicore::nn
