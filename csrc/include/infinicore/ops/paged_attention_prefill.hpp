// paged_attention_prefill: paged_attention for several queries of each sequence, which see no keys after their own.
// Sequence i has the queries cum_seqlens_q[i] to cum_seqlens_q[i + 1] - 1 of q and total_kv_lens[i] keys, the new ones
// included; both I64 or I32.
#pragma once

#include <optional>

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class PagedAttentionPrefill {
public:
    using schema = void (*)(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, float);
    static void execute(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor total_kv_lens,
                        Tensor cum_seqlens_q, std::optional<Tensor> alibi_slopes, float scale);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor paged_attention_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor total_kv_lens,
                               Tensor cum_seqlens_q, std::optional<Tensor> alibi_slopes, float scale);
void paged_attention_prefill_(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables,
                              Tensor total_kv_lens, Tensor cum_seqlens_q, std::optional<Tensor> alibi_slopes,
                              float scale);

} // namespace infinicore::op
