// The argument checks of paged_attention and paged_attention_prefill, and the call of attention's kernel.
// On the CPU, lengths and blocks are checked here, before anything is computed, and the kernel relies on that. On CUDA
// they are in the GPU's memory, and the kernel checks them.
#include "paged_attention.h"

#include <limits>

#include "attention/attention.h"
#include "check.h"
#include "indices.h"
#include "paged_caching/paged_caching.h"

namespace infini::paged_attention {

namespace {

int64_t sequences(const Args &args) {
    return args.cum_seq_lens_q.dtype ? args.cum_seq_lens_q.size(0) - 1 : args.q.size(0);
}

// Checks that the number of queries of each sequence is at least 0, and that together they are all of q.
void check_queries(const Checker &rule, const Args &args) {
    const char *const name = "cum_seq_lens_q";
    const Indices starts(args.cum_seq_lens_q);
    const int64_t n = sequences(args), total = args.q.size(0);
    if (starts[0] != 0) {
        rule.fail(INFINI_STATUS_BAD_PARAM, name, "begin with 0", std::to_string(starts[0]));
    }
    for (int64_t b = 0; b < n; ++b) {
        if (starts[b + 1] < starts[b]) {
            rule.fail(INFINI_STATUS_BAD_PARAM, name, "not decrease",
                      message(starts[b + 1], " after ", starts[b], " at position ", b + 1));
        }
    }
    if (starts[n] != total) {
        rule.fail(INFINI_STATUS_BAD_PARAM, name, message("end with ", total, ", the number of queries in q"),
                  std::to_string(starts[n]));
    }
}

void check_sequences(const Checker &rule, const Args &args) {
    const TensorView &tables = args.block_tables;
    const Indices lengths(args.seq_lens), starts(args.cum_seq_lens_q), entries(tables);
    const int64_t blocks = args.k_cache.size(0), block_size = args.k_cache.size(2), max_blocks = tables.size(1);
    for (int64_t b = 0; b < sequences(args); ++b) {
        const int64_t length = lengths[b];
        // Compared by division: the product of the two sizes could overflow.
        const int64_t needed = length <= 0 || block_size == 0 ? 0 : (length - 1) / block_size + 1;
        if (length < 0 || needed > max_blocks || (block_size == 0 && length > 0)) {
            rule.fail(INFINI_STATUS_BAD_PARAM, "seq_lens",
                      message("be at least 0 and fit into ", max_blocks, " blocks of ", block_size),
                      message(length, " for sequence ", b));
        }
        int64_t queries = 1;
        if (args.cum_seq_lens_q.dtype) {
            queries = starts[b + 1] - starts[b];
            if (queries > length) {
                rule.fail(INFINI_STATUS_BAD_PARAM, "seq_lens", "count a sequence's queries among its keys",
                          message(length, " keys for the ", queries, " queries of sequence ", b));
            }
        }
        // The first query sees the keys before this one, the newest `window` of them.
        const int64_t seen = length - queries + 1;
        const int64_t first =
            needed > 0 && args.window > 0 && seen > args.window ? (seen - args.window) / block_size : 0;
        for (int64_t i = first; i < needed; ++i) {
            const int64_t block = entries.at(b * tables.strides[0] + i * tables.strides[1]);
            if (block < 0 || block >= blocks) {
                rule.fail(INFINI_STATUS_BAD_PARAM, "block_tables",
                          message("name blocks from 0 to less than ", blocks, ", the blocks of k_cache"),
                          message(block, " at [", b, ", ", i, "]"));
            }
        }
    }
}

// [n, heads, size] as [n, 1, heads, size], or [1, n, heads, size].
TensorView with_queries(const TensorView &view, bool several) {
    TensorView result = view;
    result.ndim = 4;
    result.shape[0] = several ? 1 : view.shape[0];
    result.shape[1] = several ? view.shape[0] : 1;
    result.strides[0] = several ? 0 : view.strides[0];
    result.strides[1] = several ? view.strides[0] : 0;
    for (int i = 1; i < 3; ++i) {
        result.shape[i + 1] = view.shape[i];
        result.strides[i + 1] = view.strides[i];
    }
    return result;
}

// [blocks, heads, block size, size] as [blocks, block size, heads, size], and scales without the last dimension.
TensorView token_major(const TensorView &cache) {
    TensorView result = cache;
    result.shape[1] = cache.shape[2];
    result.shape[2] = cache.shape[1];
    result.strides[1] = cache.strides[2];
    result.strides[2] = cache.strides[1];
    return result;
}

attention::Args attend(const Args &args) {
    const bool several = args.cum_seq_lens_q.dtype != INFINI_DTYPE_INVALID;
    attention::Args paged;
    paged.out = with_queries(args.out, several);
    paged.q = with_queries(args.q, several);
    paged.k = token_major(args.k_cache);
    paged.v = token_major(args.v_cache);
    paged.k_scales = token_major(args.k_scales);
    paged.v_scales = token_major(args.v_scales);
    paged.kv_lens = args.seq_lens;
    paged.block_tables = args.block_tables;
    paged.q_starts = args.cum_seq_lens_q;
    paged.alibi_slopes = args.alibi_slopes;
    paged.sinks = args.sinks;
    paged.scale = args.scale;
    paged.softcap = args.softcap;
    paged.window = args.window;
    paged.keeps_empty = !args.define_all;
    paged.workspace = args.workspace;
    return paged;
}

} // namespace

void check(const char *op, const Args &args) {
    const Checker rule(op);
    const TensorView &q = args.q, &k = args.k_cache, &v = args.v_cache, &out = args.out;
    rule.rank("q", q, 3);
    rule.dtype("q", q, INFINI_FLOATS);
    rule.dense_last("q", q);
    const int64_t heads = q.size(1), head_size = q.size(2);
    if (head_size > kMaxHeadSize) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "q", message("have a head size of at most ", kMaxHeadSize),
                  message(head_size, " (shape ", shape_of(q), ")"));
    }
    rule.rank("k_cache", k, 4);
    paged_caching::check_scales(rule, k, args.k_scales, args.v_scales);
    const bool scaled = args.k_scales.dtype != INFINI_DTYPE_INVALID;
    if (!scaled) {
        rule.same_dtype("k_cache", k, "q", q);
    }
    rule.shape("k_cache", k, {k.size(0), k.size(1), k.size(2), head_size}, "to match the head size of q");
    rule.dense_last("k_cache", k);
    rule.same_dtype("v_cache", v, scaled ? "k_cache" : "q", scaled ? k : q);
    rule.same_shape("v_cache", v, "k_cache", k);
    rule.dense_last("v_cache", v);
    const int64_t kv_heads = k.size(1);
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "q",
                  message("have a multiple of k_cache's ", kv_heads, " heads in dimension 1"), std::to_string(heads));
    }
    if (args.cum_seq_lens_q.dtype) {
        rule.dtype("cum_seq_lens_q", args.cum_seq_lens_q, INFINI_INDICES);
        if (args.cum_seq_lens_q.ndim != 1 || args.cum_seq_lens_q.size(0) == 0) {
            rule.fail(INFINI_STATUS_BAD_PARAM, "cum_seq_lens_q",
                      "have one dimension, of one more than there are sequences", shape_of(args.cum_seq_lens_q));
        }
    }
    const int64_t n = sequences(args);
    const char *const reason =
        args.cum_seq_lens_q.dtype ? "to match the sequences of cum_seq_lens_q" : "to match the sequences of q";
    rule.dtype("block_tables", args.block_tables, INFINI_INDICES);
    rule.rank("block_tables", args.block_tables, 2);
    rule.shape("block_tables", args.block_tables, {n, args.block_tables.size(1)}, reason);
    rule.dtype("seq_lens", args.seq_lens, INFINI_INDICES);
    rule.shape("seq_lens", args.seq_lens, {n}, reason);
    if (args.alibi_slopes.dtype) {
        rule.dtype("alibi_slopes", args.alibi_slopes, {INFINI_DTYPE_F32});
        rule.shape("alibi_slopes", args.alibi_slopes, {heads}, "to match the heads of q");
    }
    if (args.sinks.dtype) {
        rule.same_dtype("sinks", args.sinks, "q", q);
        rule.shape("sinks", args.sinks, {heads}, "to match the heads of q");
    }
    constexpr double limit = std::numeric_limits<float>::max();
    rule.range("scale", args.scale, -limit, limit, "be finite in float32");
    rule.range("softcap", args.softcap, 0, limit, "be 0 (no cap), or positive and finite in float32");
    if (args.window < 0) {
        rule.fail(INFINI_STATUS_BAD_PARAM, "window", "be 0 (no limit) or positive", std::to_string(args.window));
    }

    rule.same_shape("out", out, "q", q);
    rule.same_dtype("out", out, "q", q);
    rule.dense_last("out", out);
    rule.writable("out", out);
    rule.no_partial_overlap("out", out, "q", q);
    const TensorView *const others[] = {&k,
                                        &v,
                                        &args.block_tables,
                                        &args.seq_lens,
                                        &args.cum_seq_lens_q,
                                        &args.alibi_slopes,
                                        &args.k_scales,
                                        &args.v_scales,
                                        &args.sinks};
    const char *const names[] = {"k_cache",      "v_cache",  "block_tables", "seq_lens", "cum_seq_lens_q",
                                 "alibi_slopes", "k_scales", "v_scales",     "sinks"};
    for (int i = 0; i < 9; ++i) {
        if (others[i]->dtype) {
            rule.no_overlap("out", out, names[i], *others[i]);
        }
    }
}

void run(const ExecutionContext &context, const char *op, const Args &args) {
    check(op, args);
    compute(context, op, args);
}

void compute(const ExecutionContext &context, const char *op, const Args &args) {
    const Checker rule(op);
    if (context.is_cpu()) {
        if (args.cum_seq_lens_q.dtype) {
            check_queries(rule, args);
        }
        check_sequences(rule, args);
    }
    attention::compute(context, attend(args));
}

size_t workspace_bytes(const ExecutionContext &context, const Args &args) {
    return attention::workspace_bytes(context, attend(args));
}

} // namespace infini::paged_attention
