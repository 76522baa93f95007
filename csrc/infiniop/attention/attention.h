// attention: out = softmax(softcap * tanh(scale * q k^T / softcap) + mask) v for each head, over the keys that a query
// may see; softcap 0: softmax(scale * q k^T + mask) v. Prefill, and decode over a cache, in float32 with one rounding.
// Tensors are token-major, [batch, tokens, heads, head size], as in fused q/k/v products and caches.
#pragma once

#include "cpu_capability.h"
#include "kernel_table.h"
#include "tensor_view.h"

namespace infini::attention {

struct Args {
    TensorView out;     // [B, S, H, D]
    TensorView q;       // [B, S, H, D]
    TensorView k;       // [B, T, Hkv, D]; query head h reads key head h / (H / Hkv)
    TensorView v;       // [B, T, Hkv, D]
    TensorView mask;    // [B or 1, H or 1, S or 1, T or 1], bool (true: visible) or added to the scores; dtype 0: none
    TensorView kv_lens; // [B], how many of the T keys each sequence has; dtype 0: all of them
    TensorView sinks;   // [H] of q's dtype: one more score in each head's softmax, without a key; dtype 0: none
    // Additional arguments of paged_attention and paged_attention_prefill, which check them:
    TensorView
        block_tables; // [B, max blocks] int64 or int32: k and v are [blocks, block size, Hkv, D], and key t of sequence b
                      // is row t % block size of block_tables[b, t / block size]; dtype 0: none
    TensorView
        q_starts; // [B + 1] int64 or int32: sequence b has the queries from q_starts[b] to q_starts[b + 1] of q and
                  // out [1, all queries, H, D]; dtype 0: none
    TensorView k_scales;     // [blocks, block size, Hkv] float32, if k and v are int8: the factor of each row of k;
    TensorView v_scales;     // likewise of v. dtype 0: k and v have the dtype of q
    TensorView alibi_slopes; // [H] float32: slope * (key's position - query's position) joins the scores; dtype 0: none
    bool causal = true;      // query t sees the keys up to L - S + t, where L is the sequence's number of keys
    int64_t window = 0;      // how many of these, the newest; earlier ones are not read; 0: all. Causal only
    double scale = 1;
    double softcap = 0;        // 0: none
    bool keeps_empty = false;  // out's rows of a sequence without keys stay unchanged; false: they become zeros
    void *workspace = nullptr; // on CUDA: workspace_bytes() of memory, aligned to 16 bytes
};

// Checks the arguments against the rules above. `op`: the name in messages.
void check(const ExecutionContext &context, const char *op, const Args &args);

// Computes out. Call after check(). A query that sees no key gets zeros.
void compute(const ExecutionContext &context, const Args &args);

// The setting INFINI_EXACT_ATTENTION=1, for CUDA: prefill of half types rounds only its result, at half the speed.
bool is_exact();

// scale / softcap, clamped to float's range, because a score of 0 times infinity would be NaN.
float cap_factor(const Args &args);

INFINI_CPU_KERNEL(cpu_kernel, Args)
extern KernelTable<Args> kernels;

// The bytes that compute() needs at args.workspace, by the arguments' shapes. Call after check().
inline size_t workspace_bytes(const ExecutionContext &context, const Args &args) {
    return args.out.numel() > 0 ? kernels.workspace_bytes(context, args) : 0;
}

} // namespace infini::attention
