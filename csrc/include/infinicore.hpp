// The whole of infinicore:: for C++17: tensors, memory and streams of a device, ops, graphs that are recorded and replayed,
// and modules of neural networks. Link with libinfinicore_cpp_api (pkg-config infinicore, or CMake's find_package).
#pragma once

#include "infiniccl.h"
#include "infiniop.h"
#include "infinirt.h"

#include "infinicore/context/context.hpp"
#include "infinicore/device.hpp"
#include "infinicore/device_event.hpp"
#include "infinicore/dtype.hpp"
#include "infinicore/graph/graph.hpp"
#include "infinicore/memory.hpp"
#include "infinicore/nn.hpp"
#include "infinicore/ops.hpp"
#include "infinicore/tensor.hpp"
