// torch.ops.infini.paged_attention and paged_attention_prefill, functional and out; declared in
// torch_infini/ops/paged_attention.py.
#include <cmath>
#include <optional>

#include "../../torch/tensor.h"
#include "paged_attention.h"

namespace infini::paged_attention {
namespace {

constexpr Checker kDecode("paged_attention"), kPrefill("paged_attention_prefill");

Args inputs(const ExecutionContext &context, const Checker &rule, const Tensor &q, const Tensor &k_cache,
            const Tensor &v_cache, const Tensor &block_tables, const Tensor &seq_lens,
            const std::optional<Tensor> &alibi_slopes, std::optional<double> scale, int64_t window,
            const std::optional<Tensor> &k_scales, const std::optional<Tensor> &v_scales, double softcap,
            const std::optional<Tensor> &sinks) {
    Args args;
    args.q = view(context, rule, "q", q);
    args.k_cache = view(context, rule, "k_cache", k_cache);
    args.v_cache = view(context, rule, "v_cache", v_cache);
    args.block_tables = view(context, rule, "block_tables", block_tables);
    args.seq_lens = view(context, rule, "seq_lens", seq_lens);
    args.alibi_slopes = optional_view(context, rule, "alibi_slopes", alibi_slopes);
    args.k_scales = optional_view(context, rule, "k_scales", k_scales);
    args.v_scales = optional_view(context, rule, "v_scales", v_scales);
    const int64_t head_size = args.q.ndim > 0 && args.q.size(-1) > 0 ? args.q.size(-1) : 1;
    args.scale = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(head_size));
    args.softcap = softcap;
    args.sinks = optional_view(context, rule, "sinks", sinks);
    args.window = window;
    args.define_all = true;
    return args;
}

// Checks and computes, with memory for partial results if it is needed.
void run_with_workspace(const ExecutionContext &context, const char *op, Args &args) {
    check(op, args);
    const size_t bytes = workspace_bytes(context, args);
    std::optional<Tensor> workspace;
    if (bytes > 0) {
        workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace->data_ptr();
    }
    compute(context, op, args);
}

Tensor decode(const ExecutionContext &context, const Tensor &q, const Tensor &k_cache, const Tensor &v_cache,
              const Tensor &block_tables, const Tensor &seq_lens, const std::optional<Tensor> &alibi_slopes,
              std::optional<double> scale, int64_t window, const std::optional<Tensor> &k_scales,
              const std::optional<Tensor> &v_scales, double softcap, const std::optional<Tensor> &sinks) {
    Args args = inputs(context, kDecode, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, scale, window,
                       k_scales, v_scales, softcap, sinks);
    Tensor out = empty_like(context, args.q);
    args.out = view(context, kDecode, "out", out);
    run_with_workspace(context, "paged_attention", args);
    return out;
}

Tensor decode_out(const ExecutionContext &context, const Tensor &q, const Tensor &k_cache, const Tensor &v_cache,
                  const Tensor &block_tables, const Tensor &seq_lens, const std::optional<Tensor> &alibi_slopes,
                  std::optional<double> scale, int64_t window, const std::optional<Tensor> &k_scales,
                  const std::optional<Tensor> &v_scales, double softcap, const std::optional<Tensor> &sinks,
                  Tensor out) {
    Args args = inputs(context, kDecode, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, scale, window,
                       k_scales, v_scales, softcap, sinks);
    args.out = view(context, kDecode, "out", out);
    run_with_workspace(context, "paged_attention", args);
    return out;
}

Tensor prefill(const ExecutionContext &context, const Tensor &q, const Tensor &k_cache, const Tensor &v_cache,
               const Tensor &block_tables, const Tensor &seq_lens, const Tensor &cum_seq_lens_q,
               const std::optional<Tensor> &alibi_slopes, std::optional<double> scale, int64_t window,
               const std::optional<Tensor> &k_scales, const std::optional<Tensor> &v_scales, double softcap,
               const std::optional<Tensor> &sinks) {
    Args args = inputs(context, kPrefill, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, scale, window,
                       k_scales, v_scales, softcap, sinks);
    args.cum_seq_lens_q = view(context, kPrefill, "cum_seq_lens_q", cum_seq_lens_q);
    Tensor out = empty_like(context, args.q);
    args.out = view(context, kPrefill, "out", out);
    run_with_workspace(context, "paged_attention_prefill", args);
    return out;
}

Tensor prefill_out(const ExecutionContext &context, const Tensor &q, const Tensor &k_cache, const Tensor &v_cache,
                   const Tensor &block_tables, const Tensor &seq_lens, const Tensor &cum_seq_lens_q,
                   const std::optional<Tensor> &alibi_slopes, std::optional<double> scale, int64_t window,
                   const std::optional<Tensor> &k_scales, const std::optional<Tensor> &v_scales, double softcap,
                   const std::optional<Tensor> &sinks, Tensor out) {
    Args args = inputs(context, kPrefill, q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, scale, window,
                       k_scales, v_scales, softcap, sinks);
    args.cum_seq_lens_q = view(context, kPrefill, "cum_seq_lens_q", cum_seq_lens_q);
    args.out = view(context, kPrefill, "out", out);
    run_with_workspace(context, "paged_attention_prefill", args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("paged_attention", INFINI_BOX(decode));
    m.impl("paged_attention.out", INFINI_BOX(decode_out));
    m.impl("paged_attention_prefill", INFINI_BOX(prefill));
    m.impl("paged_attention_prefill.out", INFINI_BOX(prefill_out));
}

} // namespace infini::paged_attention
