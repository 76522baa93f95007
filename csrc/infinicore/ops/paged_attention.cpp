// paged_attention, by libinfiniop's PagedAttention.
#include "infinicore/ops/paged_attention.hpp"

#include "call.h"
#include "zeros.h"

namespace infinicore::op {

namespace {

const Tensor none;

using Operator = COperator<infiniopCreatePagedAttentionDescriptor, infiniopGetPagedAttentionWorkspaceSize,
                           infiniopPagedAttention, infiniopDestroyPagedAttentionDescriptor>;

void compute(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cache_lens,
             std::optional<Tensor> alibi_slopes, float scale) {
    Operator::call("paged_attention",
                   {{"out", out, Argument::Write},
                    {"q", q},
                    {"k_cache", k_cache},
                    {"v_cache", v_cache},
                    {"block_tables", block_tables},
                    {"cache_lens", cache_lens},
                    {"alibi_slopes", alibi_slopes ? *alibi_slopes : none, Argument::Read, true}},
                   std::tuple{scale});
}

} // namespace

common::OpDispatcher<PagedAttention::schema> &PagedAttention::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("paged_attention", compute);
    return *dispatcher;
}

void PagedAttention::execute(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables,
                             Tensor cache_lens, std::optional<Tensor> alibi_slopes, float scale) {
    dispatch(dispatcher(), compute, "paged_attention", out, std::move(out), std::move(q), std::move(k_cache),
             std::move(v_cache), std::move(block_tables), std::move(cache_lens), std::move(alibi_slopes),
             std::move(scale));
}

void paged_attention_(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cache_lens,
                      std::optional<Tensor> alibi_slopes, float scale) {
    PagedAttention::execute(std::move(out), std::move(q), std::move(k_cache), std::move(v_cache),
                            std::move(block_tables), std::move(cache_lens), std::move(alibi_slopes), scale);
}

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cache_lens,
                       std::optional<Tensor> alibi_slopes, float scale) {
    Tensor out = result_like("paged_attention", "q", q);
    zeros_(out); // the operator does not write the rows of sequences without keys
    paged_attention_(out, std::move(q), std::move(k_cache), std::move(v_cache), std::move(block_tables),
                     std::move(cache_lens), std::move(alibi_slopes), scale);
    return out;
}

} // namespace infinicore::op
