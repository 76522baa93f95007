// Kinds of blocks of our own numbers, for checkpoints whose scales lie apart from their elements: FP8 (E4M3) with a
// float32 scale before each 128 elements, and NF4 with one before each 64.
#pragma once

#include "cpu_capability.h"
#include "kinds.h"

namespace infini::linear_blocks {

INFINI_CPU_KERNEL(decode_fp8, DecodeArgs)
INFINI_CPU_KERNEL(dot_fp8, DotArgs)
INFINI_CPU_KERNEL(decode_nf4, DecodeArgs)
INFINI_CPU_KERNEL(dot_nf4, DotArgs)

// NormalFloat4's levels: quantiles of a normal distribution (Dettmers et al., QLoRA, 2023, appendix E).
constexpr float kNf4[16] = {-1.0f,
                            -0.6961928009986877f,
                            -0.5250730514526367f,
                            -0.39491748809814453f,
                            -0.28444138169288635f,
                            -0.18477343022823334f,
                            -0.09105003625154495f,
                            0.0f,
                            0.07958029955625534f,
                            0.16093020141124725f,
                            0.24611230194568634f,
                            0.33791524171829224f,
                            0.44070982933044434f,
                            0.5626170039176941f,
                            0.7229568362236023f,
                            1.0f};

} // namespace infini::linear_blocks
