// paged_caching: writes the keys and values of new tokens into the blocks of a paged cache: cache[slot / block size, h,
// slot % block size, :] = k[t, h, :] with slot = slot_mapping[t]. int8 caches store each row as round(row / scale),
// with its scale, max |row| / 127.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini {
class Checker;
}

namespace infini::paged_caching {

struct Args {
    // Written, as v_cache and the scales are; other rows keep their content.
    TensorView k_cache;  // [blocks, Hkv, block size, D]
    TensorView v_cache;  // [blocks, Hkv, block size, D]
    TensorView k_scales; // [blocks, Hkv, block size] float32 if the caches are int8; else absent (dtype 0)
    TensorView v_scales; // [blocks, Hkv, block size]
    TensorView k;        // [tokens, Hkv, D]
    TensorView v;        // [tokens, Hkv, D]
    // A token with a negative slot is skipped; of tokens with equal slots the last one wins.
    TensorView slot_mapping; // [tokens] int64 or int32
    void *copies = nullptr;  // CUDA: room for copies of k and v; nullptr: they must not lie in the caches
};

// The offset of a head's row in a cache [blocks, Hkv, block size, D], in elements.
INFINI_ALWAYS_INLINE int64_t row_of(const TensorView &cache, int64_t slot, int64_t head) {
    const int64_t block_size = cache.shape[2];
    return slot / block_size * cache.strides[0] + head * cache.strides[1] + slot % block_size * cache.strides[2];
}

// Where the scale of that row is in [blocks, Hkv, block size].
INFINI_ALWAYS_INLINE float *scale_of(const TensorView &scales, int64_t slot, int64_t head) {
    return scales.as<float>() + row_of(scales, slot, head);
}

// Checks the scales of a cache: present if and only if the cache is int8.
void check_scales(const Checker &rule, const TensorView &k_cache, const TensorView &k_scales,
                  const TensorView &v_scales);

// Checks both caches, their scales, and the values of the slots.
void check_caches(const Checker &rule, const TensorView &k_cache, const TensorView &v_cache, const TensorView &k_scales,
                  const TensorView &v_scales);
void check_slots(const Checker &rule, const TensorView &slots, const TensorView &k_cache);

// Checks everything that does not depend on values in memory.
void check(const Args &args);

// Whether run needs args.copies, twice the bytes of k.
bool needs_copies(const ExecutionContext &context, const Args &args);

// Checks everything, also the slots' values, then writes. If k and v lie in the caches, they are copied first. On CUDA
// the kernel checks the slots and skips a token whose slot is outside the caches.
void run(const ExecutionContext &context, const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

} // namespace infini::paged_caching
