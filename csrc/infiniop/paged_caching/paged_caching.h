// paged_caching: writes the keys and values of new tokens into the blocks of a paged cache,
// cache[slot / block size, h, slot % block size, :] = k[t, h, :] with slot = slot_mapping[t].
#pragma once

#include "cpu_capability.h"
#include "cuda/kernel.h"
#include "tensor_view.h"

namespace infini {
class Checker;
}

namespace infini::paged_caching {

struct Args {
    TensorView k_cache;      // [blocks, Hkv, block size, D]; out, as v_cache: what is not written stays
    TensorView v_cache;      // [blocks, Hkv, block size, D]
    TensorView k;            // [tokens, Hkv, D]
    TensorView v;            // [tokens, Hkv, D]
    TensorView slot_mapping; // [tokens] int64; below 0: skipped. Of two tokens with one slot the last stays
    void *copies = nullptr;  // on CUDA: room for copies of k and v; if null they may not lie in the caches
};

// Where the row of a head begins in a cache [blocks, Hkv, block size, D], in elements.
INFINI_ALWAYS_INLINE int64_t row_of(const TensorView &cache, int64_t slot, int64_t head) {
    const int64_t block_size = cache.shape[2];
    return slot / block_size * cache.strides[0] + head * cache.strides[1] + slot % block_size * cache.strides[2];
}

// The rules of the two caches, and of the slots' values.
void check_caches(const Checker &rule, const TensorView &k_cache, const TensorView &v_cache);
void check_slots(const Checker &rule, const TensorView &slots, const TensorView &k_cache);

// Checks all that does not depend on values in memory.
void check(const Args &args);

// Whether run needs args.copies: twice the bytes of k.
bool needs_copies(const Args &args);

// Checks that and the slots, then writes. Of k and v what lies in the caches is read before anything is written. On
// CUDA it is the kernel that looks at slots: a token whose slot is outside the caches is skipped.
void run(const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
INFINI_CUDA_KERNEL(cuda_kernel, Args)

} // namespace infini::paged_caching
