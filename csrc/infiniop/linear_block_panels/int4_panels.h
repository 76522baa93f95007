// Blocks of 4-bit codes with a scale and a zero point, as AWQ's and GPTQ's groups, in panels.
#pragma once

#include "cpu_capability.h"
#include "panel_kinds.h"

namespace infini::linear_block_panels {

INFINI_CPU_KERNEL(dot_int4_32, DotArgs)
INFINI_CPU_KERNEL(decode_int4_32, DecodeArgs)
INFINI_CPU_KERNEL(dot_int4_64, DotArgs)
INFINI_CPU_KERNEL(decode_int4_64, DecodeArgs)
INFINI_CPU_KERNEL(dot_int4_128, DotArgs)
INFINI_CPU_KERNEL(decode_int4_128, DecodeArgs)

} // namespace infini::linear_block_panels
