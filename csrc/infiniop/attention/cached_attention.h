// cached_attention (Attention in the C ABI): copies k and v into a contiguous cache, then computes
// out = softmax(q k^T / sqrt(D) + causal mask) v over the cache up to the new tokens, by attention's kernel.
#pragma once

#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::cached_attention {

struct Args {
    TensorView out;            // [S, H, D]
    TensorView q;              // [H, S, D]; out may be q itself, its dimensions swapped
    TensorView k;              // [Hkv, S, D]; query head h reads key head h / (H / Hkv)
    TensorView v;              // [Hkv, S, D]
    TensorView k_cache;        // [Hkv, rows, D], read and written: k goes to the rows from pos on, unless already there
    TensorView v_cache;        // [Hkv, rows, D]
    uint64_t pos = 0;          // tokens already in the cache
    void *workspace = nullptr; // on CUDA: workspace_bytes() of memory, aligned to 16 bytes
};

// The arguments of the copy into the cache: `to` and `from` are [heads, tokens, D].
struct Copy {
    TensorView to, from;
};
extern KernelTable<Copy> copy_kernels;

void check(const Args &args);

void run(const ExecutionContext &context, const Args &args);

// The bytes that run() needs at args.workspace, by the arguments' shapes. Call after check().
size_t workspace_bytes(const ExecutionContext &context, const Args &args);

} // namespace infini::cached_attention
