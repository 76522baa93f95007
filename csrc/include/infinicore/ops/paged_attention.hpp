// paged_attention: one query of each sequence, q [n, H, dim], over the first cache_lens[i] keys of its blocks in the caches
// [blocks, Hkv, block size, dim]; block_tables [n, max blocks] and cache_lens [n] are I64 or I32, alibi_slopes [H] F32.
// A sequence without keys gets zeros from paged_attention; paged_attention_ leaves its row of out as it is.
#pragma once

#include <optional>

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class PagedAttention {
public:
    using schema = void (*)(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, float);
    static void execute(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cache_lens,
                        std::optional<Tensor> alibi_slopes, float scale);
    static common::OpDispatcher<schema> &dispatcher();
};

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cache_lens,
                       std::optional<Tensor> alibi_slopes, float scale);
void paged_attention_(Tensor out, Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor cache_lens,
                      std::optional<Tensor> alibi_slopes, float scale);

} // namespace infinicore::op
