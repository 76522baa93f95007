// paged_caching: writes the keys and values of new tokens into the blocks of a paged cache,
// cache[slot / block size, h, slot % block size, :] = k[t, h, :] with slot = slot_mapping[t].
#pragma once

#include "cpu_capability.h"
#include "tensor_view.h"

namespace infini::paged_caching {

struct Args {
    TensorView k_cache; // [blocks, Hkv, block size, D]; out, as v_cache: what is not written stays
    TensorView v_cache; // [blocks, Hkv, block size, D]
    TensorView k;       // [tokens, Hkv, D]
    TensorView v;       // [tokens, Hkv, D]
    TensorView
        slot_mapping; // [tokens] int64; below 0: the token is skipped. Of two tokens with one slot the last stays
};

// Checks all that does not depend on values in memory.
void check(const Args &args);

// Checks that and the slots, then writes.
void run(const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)

} // namespace infini::paged_caching
