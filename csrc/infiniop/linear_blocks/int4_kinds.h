// Kinds of blocks of our own numbers for 4-bit codes with a scale and a zero point, as AWQ's and GPTQ's groups have them:
// both in float16, then the codes of each 64 elements (int4_32: of 32), the first half in the lower nibbles.
#pragma once

#include "cpu_capability.h"
#include "kinds.h"

namespace infini::linear_blocks {

INFINI_CPU_KERNEL(decode_int4_32, DecodeArgs)
INFINI_CPU_KERNEL(dot_int4_32, DotArgs)
INFINI_CPU_KERNEL(decode_int4_64, DecodeArgs)
INFINI_CPU_KERNEL(dot_int4_64, DotArgs)
INFINI_CPU_KERNEL(decode_int4_128, DecodeArgs)
INFINI_CPU_KERNEL(dot_int4_128, DotArgs)

} // namespace infini::linear_blocks
