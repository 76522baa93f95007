// NVFP4 in blocks of our own: a float32 factor, eight scales of E4M3, and the FP4 codes of 128 elements, 16 to a scale.
#pragma once

#include "cpu_capability.h"
#include "kinds.h"

namespace infini::linear_blocks {

INFINI_CPU_KERNEL(decode_nvfp4, DecodeArgs)
INFINI_CPU_KERNEL(dot_nvfp4, DotArgs)

} // namespace infini::linear_blocks
