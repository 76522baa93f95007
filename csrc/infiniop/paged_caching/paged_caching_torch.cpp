// torch.ops.infini.paged_caching, which writes into its caches; declared in torch_infini/ops/paged_caching.py.
#include <optional>

#include "../../torch/tensor.h"
#include "paged_caching.h"

namespace infini::paged_caching {
namespace {

constexpr Checker kRule("paged_caching");

void paged_caching(const ExecutionContext &context, Tensor k_cache, Tensor v_cache, const Tensor &k, const Tensor &v,
                   const Tensor &slot_mapping, const std::optional<Tensor> &k_scales,
                   const std::optional<Tensor> &v_scales) {
    Args args;
    args.k_cache = view(context, kRule, "k_cache", k_cache);
    args.v_cache = view(context, kRule, "v_cache", v_cache);
    args.k = view(context, kRule, "k", k);
    args.v = view(context, kRule, "v", v);
    args.slot_mapping = view(context, kRule, "slot_mapping", slot_mapping);
    args.k_scales = optional_view(context, kRule, "k_scales", k_scales);
    args.v_scales = optional_view(context, kRule, "v_scales", v_scales);
    Tensor copies;
    if (needs_copies(context, args)) {
        copies = empty(context, {2, args.k.numel()}, args.k.dtype);
        args.copies = copies.data_ptr();
    }
    run(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("paged_caching", INFINI_BOX(paged_caching));
}

} // namespace infini::paged_caching
