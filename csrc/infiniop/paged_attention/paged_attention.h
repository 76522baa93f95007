// paged_attention:         out = softmax(cap(scale * q k^T) + alibi) v, one query for each sequence (decode), where
// cap(s) = softcap * tanh(s / softcap), or s without a softcap. With sinks the softmax has one more score, without
// a key.
// paged_attention_prefill: the same for several queries of each sequence, which see no keys after their own.
// With a window W a query sees its own key and the W - 1 before it; keys that no query sees are not read, and blocks
// that hold only such keys may be freed: their entries of the table are not read.
// K and V are in the blocks of a paged cache, which a table for each sequence lists. The kernel is that of attention.
#pragma once

#include "execution_context.h"
#include "tensor_view.h"

namespace infini::paged_attention {

constexpr int64_t kMaxHeadSize = 1024;

struct Args {
    TensorView out;     // as q
    TensorView q;       // [n, H, D], n sequences; with cum_seq_lens_q [all queries, H, D]
    TensorView k_cache; // [blocks, Hkv, block size, D]; query head h reads key head h / (H / Hkv)
    TensorView v_cache; // [blocks, Hkv, block size, D]
    TensorView
        k_scales; // [blocks, Hkv, block size] float32, where the caches are int8: factors of their rows; dtype 0: none
    TensorView v_scales; // [blocks, Hkv, block size]
    TensorView
        block_tables; // [n, max blocks] int64 or int32: key t of a sequence is row t % block size of its t / block size-th
    TensorView seq_lens; // [n] int64 or int32: keys of each sequence, its new ones included
    TensorView
        cum_seq_lens_q; // [n + 1] int64 or int32: where each sequence's queries begin in q; dtype 0: paged_attention
    TensorView alibi_slopes; // [H] float32: slope * (key's position - query's position); dtype 0: none
    TensorView sinks;        // [H] of q's dtype: one more score in each head's softmax, without a key; dtype 0: none
    double scale = 1;
    double softcap = 0;        // 0: none
    int64_t window = 0;        // keys that a query sees at most; 0: no limit
    bool define_all = false;   // out's rows of a sequence without keys become zeros; false: they stay unchanged
    void *workspace = nullptr; // on CUDA: workspace_bytes() of memory, aligned to 16 bytes
};

// Checks everything that does not depend on values in memory. `op`: the name in messages.
void check(const char *op, const Args &args);

// Calls check(), checks lengths and blocks on the CPU (on CUDA the kernel does), and computes out.
void run(const ExecutionContext &context, const char *op, const Args &args);

// The same without check(). Call after check().
void compute(const ExecutionContext &context, const char *op, const Args &args);

// The bytes that run() and compute() need at args.workspace, by the arguments' shapes. Call after check().
size_t workspace_bytes(const ExecutionContext &context, const Args &args);

} // namespace infini::paged_attention
