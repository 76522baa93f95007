// qkv_rope_cache: what a layer does between its fused q/k/v product and attention over a paged cache, in one pass:
// rotates q into a separate tensor, rotates k into its slots, and copies v into its slots. Bits and rules are those of
// rope and paged_caching.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::qkv_rope_cache {

struct Args {
    TensorView q; // [tokens, H, D]; out
    // Written, as v_cache and the scales are; other rows keep their content.
    TensorView k_cache;      // [blocks, Hkv, block size, D]
    TensorView v_cache;      // [blocks, Hkv, block size, D]
    TensorView k_scales;     // [blocks, Hkv, block size] float32 if the caches are int8; else absent (dtype 0)
    TensorView v_scales;     // [blocks, Hkv, block size]
    TensorView qkv;          // [tokens, (H + 2 Hkv) * D]: the heads of q, then those of k, then those of v
    TensorView cos, sin;     // tables [P, R/2]
    TensorView positions;    // [tokens], integers: the row of cos and sin for each token
    TensorView slot_mapping; // [tokens] int64 or int32; k and v of a token with a negative slot are skipped
    bool interleaved = false;
};

// Checks the arguments, then writes q and the caches. On CUDA the kernel checks positions and slots: a
// position outside the tables gives NaN, a slot outside the caches is skipped.
void run(const ExecutionContext &context, const Args &args);

// Kernels get positions as [1, tokens].
INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::qkv_rope_cache
