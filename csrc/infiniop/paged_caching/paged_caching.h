// paged_caching: writes the keys and values of new tokens into the blocks of a paged cache, cache[slot / block size, h,
// slot % block size, :] = k[t, h, :] with slot = slot_mapping[t]. In caches of int8 each row is stored as round(row /
// scale) with its scale, max |row| / 127.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini {
class Checker;
}

namespace infini::paged_caching {

struct Args {
    TensorView k_cache;      // [blocks, Hkv, block size, D]; out, as v_cache and the scales: what is not written stays
    TensorView v_cache;      // [blocks, Hkv, block size, D]
    TensorView k_scales;     // [blocks, Hkv, block size] float32, where the caches are int8; dtype 0: they are not
    TensorView v_scales;     // [blocks, Hkv, block size]
    TensorView k;            // [tokens, Hkv, D]
    TensorView v;            // [tokens, Hkv, D]
    TensorView slot_mapping; // [tokens] int64 or int32; below 0: skipped. Of two tokens with one slot the last stays
    void *copies = nullptr;  // on CUDA: room for copies of k and v; if null they may not lie in the caches
};

// The offset of a head's row in a cache [blocks, Hkv, block size, D], in elements.
INFINI_ALWAYS_INLINE int64_t row_of(const TensorView &cache, int64_t slot, int64_t head) {
    const int64_t block_size = cache.shape[2];
    return slot / block_size * cache.strides[0] + head * cache.strides[1] + slot % block_size * cache.strides[2];
}

// The offset of its scale in [blocks, Hkv, block size].
INFINI_ALWAYS_INLINE float *scale_of(const TensorView &scales, int64_t slot, int64_t head) {
    return scales.as<float>() + row_of(scales, slot, head);
}

// Checks the scales of a cache: present if and only if it is int8.
void check_scales(const Checker &rule, const TensorView &k_cache, const TensorView &k_scales,
                  const TensorView &v_scales);

// Checks the two caches that are written and their scales, and the slots' values.
void check_caches(const Checker &rule, const TensorView &k_cache, const TensorView &v_cache, const TensorView &k_scales,
                  const TensorView &v_scales);
void check_slots(const Checker &rule, const TensorView &slots, const TensorView &k_cache);

// Checks all that does not depend on values in memory.
void check(const Args &args);

// Whether run needs args.copies: twice the bytes of k.
bool needs_copies(const ExecutionContext &context, const Args &args);

// Checks that and the slots, then writes. k and v in the caches are copied first. On CUDA the kernel checks the slots:
// a token with a slot outside the caches is skipped.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::paged_caching
