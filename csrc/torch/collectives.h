// What the ops that communicate have in common: the group that a number stands for, and one call between its ranks.
// collectives_torch.cpp has it, and the plain collectives; all_reduce_add_rms_norm_torch.cpp is one of them and more.
#pragma once

#include <memory>

#include "groups.h"
#include "tensor.h"

namespace infini::collectives {

// One call; `count` as infiniccl.h has it.
struct Call {
    Collective kind;
    int64_t count;
    int32_t parameter;
};

bool is_contiguous(const TensorView &view);

// Throws where the number stands for no group.
std::shared_ptr<const Group> group_of(const Checker &rule, int64_t number);

// out = the collective of x, between the ranks of a group of several; both contiguous. On CUDA it is queued.
void communicate(const Group &group, const Call &call, const TensorView &x, const TensorView &out);

// Throws what a function of the C interface has said.
void must(infiniStatus_t status);

} // namespace infini::collectives
