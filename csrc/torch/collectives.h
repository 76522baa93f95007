// Shared by ops that communicate: the lookup of a group by its number, and a collective of its ranks.
// collectives_torch.cpp implements both, and the collective ops.
#pragma once

#include <memory>

#include "groups.h"
#include "tensor.h"

namespace infini::collectives {

// One call; `count` as in infiniccl.h.
struct Call {
    Collective kind;
    int64_t count;
    int32_t parameter;
};

// Throws if the number names no group.
std::shared_ptr<const Group> group_of(const Checker &rule, int64_t number);

// out = the collective of x. Both, with their shapes, must have been checked. On CUDA the call is queued.
void run(const ExecutionContext &context, const Group &group, const Call &call, const TensorView &x,
         const TensorView &out);

} // namespace infini::collectives
