// Which calls of the torch operator attention on CUDA go to torch's fused attention (flash, cuDNN): long prefill, where
// it uses the tensor cores better than our kernel. The rule is library_takes() in library.cpp.
#pragma once

#include "attention.h"

namespace infini::attention {

// The least number of queries; until it is set, never. The Python package sets kLibraryQueries if torch's operators
// have the schemas that attention_torch.cpp calls (torch_infini/_attention.py). Not measured: with fewer, a call is
// bound by its launch.
constexpr int64_t kLibraryQueries = 256;
int64_t library_from();
void set_library_from(int64_t queries);

// Whether torch computes the call. Call after check().
bool library_takes(const ExecutionContext &context, const Args &args);

} // namespace infini::attention
