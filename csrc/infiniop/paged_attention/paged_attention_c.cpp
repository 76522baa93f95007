// infiniopPagedAttention and infiniopPagedAttentionPrefill.
#include "attention/attention.h"
#include "c_api.h"
#include "paged_attention.h"

namespace {

using namespace infini;
using paged_attention::Args;

constexpr c_api::COp<Args> kDecode(
    "PagedAttention", attention::kernels, [](const Args &args) { paged_attention::check("paged_attention", args); },
    [](const ExecutionContext &context, const Args &args) { paged_attention::run(context, "paged_attention", args); },
    paged_attention::workspace_bytes);

constexpr c_api::COp<Args> kPrefill(
    "PagedAttentionPrefill", attention::kernels,
    [](const Args &args) { paged_attention::check("paged_attention_prefill", args); },
    [](const ExecutionContext &context, const Args &args) {
        paged_attention::run(context, "paged_attention_prefill", args);
    },
    paged_attention::workspace_bytes);

} // namespace

infiniStatus_t infiniopCreatePagedAttentionDescriptor(
    infiniopHandle_t handle, infiniopPagedAttentionDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t q_desc, infiniopTensorDescriptor_t k_cache_desc, infiniopTensorDescriptor_t v_cache_desc,
    infiniopTensorDescriptor_t block_tables_desc, infiniopTensorDescriptor_t seq_lens_desc,
    infiniopTensorDescriptor_t alibi_slopes_desc, float scale) {
    return kDecode.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.out = tensor("out_desc", out_desc);
        args.q = tensor("q_desc", q_desc);
        args.k_cache = tensor("k_cache_desc", k_cache_desc);
        args.v_cache = tensor("v_cache_desc", v_cache_desc);
        args.block_tables = tensor("block_tables_desc", block_tables_desc);
        args.seq_lens = tensor("seq_lens_desc", seq_lens_desc);
        args.alibi_slopes = tensor.optional("alibi_slopes_desc", alibi_slopes_desc);
        args.scale = scale;
    });
}

INFINIOP_WORKSPACE_SIZE(PagedAttention, kDecode)

infiniStatus_t infiniopPagedAttention(infiniopPagedAttentionDescriptor_t desc, void *workspace, size_t workspace_size,
                                      void *out, const void *q, const void *k_cache, const void *v_cache,
                                      const void *block_tables, const void *seq_lens, const void *alibi_slopes,
                                      void *stream) {
    return kDecode.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.out, "out", out);
        memory(args.q, "q", q);
        memory(args.k_cache, "k_cache", k_cache);
        memory(args.v_cache, "v_cache", v_cache);
        memory(args.block_tables, "block_tables", block_tables);
        memory(args.seq_lens, "seq_lens", seq_lens);
        memory(args.alibi_slopes, "alibi_slopes", alibi_slopes);
    });
}

INFINIOP_DESTROY(PagedAttention, kDecode)

infiniStatus_t infiniopCreatePagedAttentionPrefillDescriptor(
    infiniopHandle_t handle, infiniopPagedAttentionPrefillDescriptor_t *desc_ptr, infiniopTensorDescriptor_t out_desc,
    infiniopTensorDescriptor_t q_desc, infiniopTensorDescriptor_t k_cache_desc, infiniopTensorDescriptor_t v_cache_desc,
    infiniopTensorDescriptor_t block_tables_desc, infiniopTensorDescriptor_t seq_lens_desc,
    infiniopTensorDescriptor_t cum_seq_lens_q_desc, infiniopTensorDescriptor_t alibi_slopes_desc, float scale) {
    return kPrefill.create(handle, desc_ptr, [&](Args &args, const c_api::Tensors &tensor) {
        args.out = tensor("out_desc", out_desc);
        args.q = tensor("q_desc", q_desc);
        args.k_cache = tensor("k_cache_desc", k_cache_desc);
        args.v_cache = tensor("v_cache_desc", v_cache_desc);
        args.block_tables = tensor("block_tables_desc", block_tables_desc);
        args.seq_lens = tensor("seq_lens_desc", seq_lens_desc);
        args.cum_seq_lens_q = tensor("cum_seq_lens_q_desc", cum_seq_lens_q_desc);
        args.alibi_slopes = tensor.optional("alibi_slopes_desc", alibi_slopes_desc);
        args.scale = scale;
    });
}

INFINIOP_WORKSPACE_SIZE(PagedAttentionPrefill, kPrefill)

infiniStatus_t infiniopPagedAttentionPrefill(infiniopPagedAttentionPrefillDescriptor_t desc, void *workspace,
                                             size_t workspace_size, void *out, const void *q, const void *k_cache,
                                             const void *v_cache, const void *block_tables, const void *seq_lens,
                                             const void *cum_seq_lens_q, const void *alibi_slopes, void *stream) {
    return kPrefill.launch(desc, workspace, workspace_size, stream, [&](Args &args, const c_api::Memory &memory) {
        memory(args.out, "out", out);
        memory(args.q, "q", q);
        memory(args.k_cache, "k_cache", k_cache);
        memory(args.v_cache, "v_cache", v_cache);
        memory(args.block_tables, "block_tables", block_tables);
        memory(args.seq_lens, "seq_lens", seq_lens);
        memory(args.cum_seq_lens_q, "cum_seq_lens_q", cum_seq_lens_q);
        memory(args.alibi_slopes, "alibi_slopes", alibi_slopes);
    });
}

INFINIOP_DESTROY(PagedAttentionPrefill, kPrefill)
