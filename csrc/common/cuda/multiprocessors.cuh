// The number of multiprocessors of a call's device: what a kernel needs that gives each a share of the work. Included by
// *.cu files only.
#pragma once

#include <cuda_runtime.h>

#include "../execution_context.h"
#include "error.cuh"

namespace infini::cuda {

inline int multiprocessors(const ExecutionContext &context) {
    int count = 0;
    check_cuda("cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, context.device_id));
    return count;
}

} // namespace infini::cuda
