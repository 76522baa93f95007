// GGML's kinds of 256 elements with 2 or 3 bits, and with 4 that are indices into a table: Q2_K, Q3_K, IQ4_XS.
#pragma once

#include "cpu_capability.h"
#include "kinds.h"

namespace infini::linear_blocks {

INFINI_CPU_KERNEL(decode_q2_k, DecodeArgs)
INFINI_CPU_KERNEL(dot_q2_k, DotArgs)
INFINI_CPU_KERNEL(decode_q3_k, DecodeArgs)
INFINI_CPU_KERNEL(dot_q3_k, DotArgs)
INFINI_CPU_KERNEL(decode_iq4_xs, DecodeArgs)
INFINI_CPU_KERNEL(dot_iq4_xs, DotArgs)

} // namespace infini::linear_blocks
