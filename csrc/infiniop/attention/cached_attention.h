// cached_attention: what the C ABI calls Attention: k and v are copied into a contiguous cache, then
// out = softmax(q k^T / sqrt(D) + causal mask) v over all that the cache holds up to there. The kernel is attention's.
#pragma once

#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::cached_attention {

struct Args {
    TensorView out;     // [S, H, D]
    TensorView q;       // [H, S, D]; out may be q itself, its dimensions swapped
    TensorView k;       // [Hkv, S, D]; query head h reads key head h / (H / Hkv)
    TensorView v;       // [Hkv, S, D]
    TensorView k_cache; // [Hkv, rows, D], read and written: k goes to the rows from pos on (and may be these already)
    TensorView v_cache; // [Hkv, rows, D]
    uint64_t pos = 0;   // tokens that are in the cache before
    void *workspace = nullptr; // on CUDA: workspace_bytes() of memory, aligned to 16 bytes
};

// What copies rows into the cache: `to` and `from` are [heads, tokens, D].
struct Copy {
    TensorView to, from;
};
extern KernelTable<Copy> copy_kernels;

void check(const Args &args);

void run(const ExecutionContext &context, const Args &args);

// The bytes that run() needs at args.workspace, by the shapes of arguments that were checked.
size_t workspace_bytes(const ExecutionContext &context, const Args &args);

} // namespace infini::cached_attention
