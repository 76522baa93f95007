// Group: the ranks of a collective op. Ops take its number, because a schema has no better type.
// torch_infini/distributed registers groups through ctypes; collectives_torch.cpp looks them up.
#pragma once

#include <cstdint>
#include <memory>

#include "infiniccl.h"

namespace infini {

enum class Collective : int32_t { all_reduce, broadcast, all_gather, reduce_scatter };

// Makes one collective call if libinfiniccl cannot connect the ranks. `parameter` is the reduction or the root; the
// other arguments are as in infiniccl.h. On failure it has called infinirtSetLastErrorMessage().
using CollectiveFunction = infiniStatus_t (*)(Collective kind, void *send, void *recv, int64_t count,
                                              infiniDtype_t dtype, int32_t parameter);

struct Group {
    int64_t size = 1;
    infinicclComm_t comm = nullptr;        // owned by the caller
    CollectiveFunction function = nullptr; // replaces comm
};

// The group of the calling process alone: always defined, on every device.
constexpr int64_t kSelf = 0;

// Returns nullptr if no group has the number.
std::shared_ptr<const Group> find_group(int64_t number);

} // namespace infini

extern "C" {

// Returns a number for a communicator, or for a function that replaces it; numbers are never reused.
INFINI_API int64_t infiniTorchGroupAdd(int64_t size, infinicclComm_t comm, infini::CollectiveFunction function);
// Invalidates the number; calls in progress keep their group.
INFINI_API void infiniTorchGroupRemove(int64_t number);
}
