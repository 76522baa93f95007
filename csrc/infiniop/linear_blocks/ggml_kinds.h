// GGML's kinds of blocks, as GGUF files have them: sizes, and the CPU decoders (formulas: torch_infini/ops/_blocks).
#pragma once

#include "cpu_capability.h"
#include "kinds.h"

namespace infini::linear_blocks {

INFINI_CPU_KERNEL(decode_q4_0, DecodeArgs)
INFINI_CPU_KERNEL(dot_q4_0, DotArgs)
INFINI_CPU_KERNEL(decode_q4_1, DecodeArgs)
INFINI_CPU_KERNEL(dot_q4_1, DotArgs)
INFINI_CPU_KERNEL(decode_q5_0, DecodeArgs)
INFINI_CPU_KERNEL(dot_q5_0, DotArgs)
INFINI_CPU_KERNEL(decode_q5_1, DecodeArgs)
INFINI_CPU_KERNEL(dot_q5_1, DotArgs)
INFINI_CPU_KERNEL(decode_q8_0, DecodeArgs)
INFINI_CPU_KERNEL(dot_q8_0, DotArgs)
INFINI_CPU_KERNEL(decode_q4_k, DecodeArgs)
INFINI_CPU_KERNEL(dot_q4_k, DotArgs)
INFINI_CPU_KERNEL(decode_q5_k, DecodeArgs)
INFINI_CPU_KERNEL(dot_q5_k, DotArgs)
INFINI_CPU_KERNEL(decode_q6_k, DecodeArgs)
INFINI_CPU_KERNEL(dot_q6_k, DotArgs)
INFINI_CPU_KERNEL(decode_iq4_nl, DecodeArgs)
INFINI_CPU_KERNEL(dot_iq4_nl, DotArgs)
INFINI_CPU_KERNEL(decode_mxfp4, DecodeArgs)
INFINI_CPU_KERNEL(dot_mxfp4, DotArgs)

} // namespace infini::linear_blocks
