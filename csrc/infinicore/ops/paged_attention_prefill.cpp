// paged_attention_prefill, by libinfiniop's PagedAttentionPrefill.
#include "infinicore/ops/paged_attention_prefill.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

const Tensor none;

using Operator = COperator<infiniopCreatePagedAttentionPrefillDescriptor, infiniopGetPagedAttentionPrefillWorkspaceSize,
                           infiniopPagedAttentionPrefill, infiniopDestroyPagedAttentionPrefillDescriptor>;

void compute(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor total_kv_lens,
             Tensor cum_seqlens_q, std::optional<Tensor> alibi_slopes, float scale) {
    Operator::call("paged_attention_prefill",
                   {{"out", out, Argument::Write},
                    {"q", q},
                    {"k_cache", k_cache},
                    {"v_cache", v_cache},
                    {"block_tables", block_tables},
                    {"total_kv_lens", total_kv_lens},
                    {"cum_seqlens_q", cum_seqlens_q},
                    {"alibi_slopes", alibi_slopes ? *alibi_slopes : none, Argument::Read, true}},
                   std::tuple{scale});
}

} // namespace

common::OpDispatcher<PagedAttentionPrefill::schema> &PagedAttentionPrefill::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("paged_attention_prefill", compute);
    return *dispatcher;
}

void PagedAttentionPrefill::execute(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables,
                                    Tensor total_kv_lens, Tensor cum_seqlens_q, std::optional<Tensor> alibi_slopes,
                                    float scale) {
    dispatch(dispatcher(), compute, "paged_attention_prefill", out, std::move(out), std::move(q), std::move(k_cache),
             std::move(v_cache), std::move(block_tables), std::move(total_kv_lens), std::move(cum_seqlens_q),
             std::move(alibi_slopes), std::move(scale));
}

void paged_attention_prefill_(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables,
                              Tensor total_kv_lens, Tensor cum_seqlens_q, std::optional<Tensor> alibi_slopes,
                              float scale) {
    PagedAttentionPrefill::execute(std::move(out), std::move(q), std::move(k_cache), std::move(v_cache),
                                   std::move(block_tables), std::move(total_kv_lens), std::move(cum_seqlens_q),
                                   std::move(alibi_slopes), scale);
}

Tensor paged_attention_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor total_kv_lens,
                               Tensor cum_seqlens_q, std::optional<Tensor> alibi_slopes, float scale) {
    Tensor out = result_like("paged_attention_prefill", "q", q);
    paged_attention_prefill_(out, std::move(q), std::move(k_cache), std::move(v_cache), std::move(block_tables),
                             std::move(total_kv_lens), std::move(cum_seqlens_q), std::move(alibi_slopes), scale);
    return out;
}

} // namespace infinicore::op
