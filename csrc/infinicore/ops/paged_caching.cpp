// paged_caching, by libinfiniop's PagedCaching.
#include "infinicore/ops/paged_caching.hpp"

#include "call.h"

namespace infinicore::op {

namespace {

using Operator = COperator<infiniopCreatePagedCachingDescriptor, infiniopGetPagedCachingWorkspaceSize,
                           infiniopPagedCaching, infiniopDestroyPagedCachingDescriptor>;

void compute(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slot_mapping) {
    Operator::call("paged_caching", {{"k_cache", k_cache, Argument::ReadWrite},
                                     {"v_cache", v_cache, Argument::ReadWrite},
                                     {"k", k},
                                     {"v", v},
                                     {"slot_mapping", slot_mapping}});
}

} // namespace

common::OpDispatcher<PagedCaching::schema> &PagedCaching::dispatcher() {
    static auto *const dispatcher = new common::OpDispatcher<schema>("paged_caching", compute);
    return *dispatcher;
}

void PagedCaching::execute(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slot_mapping) {
    dispatch(dispatcher(), compute, "paged_caching", k_cache, std::move(k_cache), std::move(v_cache), std::move(k),
             std::move(v), std::move(slot_mapping));
}

void paged_caching_(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor slot_mapping) {
    PagedCaching::execute(std::move(k_cache), std::move(v_cache), std::move(k), std::move(v), std::move(slot_mapping));
}

} // namespace infinicore::op
