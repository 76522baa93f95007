// paged_caching_: writes k and v, [tokens, Hkv, dim], to the slots of slot_mapping [tokens], I64 or I32, of the caches
// [blocks, Hkv, block size, dim]; a slot below 0 is skipped.
#pragma once

#include "../tensor.hpp"
#include "common/dispatcher.hpp"

namespace infinicore::op {

class PagedCaching {
public:
    using schema = void (*)(Tensor, Tensor, Tensor, Tensor, Tensor);
    static void execute(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slot_mapping);
    static common::OpDispatcher<schema> &dispatcher();
};

void paged_caching_(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slot_mapping);

} // namespace infinicore::op
