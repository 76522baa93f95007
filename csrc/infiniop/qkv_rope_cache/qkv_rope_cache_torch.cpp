// torch.ops.infini.qkv_rope_cache, which writes into q and the caches; declared in torch_infini/ops/qkv_rope_cache.py.
#include "qkv_rope_cache.h"

#include <optional>

#include "../../torch/tensor.h"

namespace infini::qkv_rope_cache {
namespace {

constexpr Checker kRule("qkv_rope_cache");

void qkv_rope_cache(const ExecutionContext &context, Tensor q, Tensor k_cache, Tensor v_cache, const Tensor &qkv,
                    const Tensor &cos, const Tensor &sin, const Tensor &positions, const Tensor &slot_mapping,
                    bool interleaved, const std::optional<Tensor> &k_scales, const std::optional<Tensor> &v_scales) {
    Args args;
    args.q = view(context, kRule, "q", q);
    args.k_cache = view(context, kRule, "k_cache", k_cache);
    args.v_cache = view(context, kRule, "v_cache", v_cache);
    args.qkv = view(context, kRule, "qkv", qkv);
    args.cos = view(context, kRule, "cos", cos);
    args.sin = view(context, kRule, "sin", sin);
    args.positions = view(context, kRule, "positions", positions);
    args.slot_mapping = view(context, kRule, "slot_mapping", slot_mapping);
    args.k_scales = optional_view(context, kRule, "k_scales", k_scales);
    args.v_scales = optional_view(context, kRule, "v_scales", v_scales);
    args.interleaved = interleaved;
    run(context, args);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("qkv_rope_cache", INFINI_BOX(qkv_rope_cache));
}

} // namespace infini::qkv_rope_cache
