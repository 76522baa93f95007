// torch.ops.infini.attention, functional and out; declared in torch_infini/ops/attention.py.
#include <cmath>
#include <optional>

#include "../../torch/tensor.h"
#include "attention.h"

namespace infini::attention {
namespace {

constexpr Checker kRule("attention");

Args inputs(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &mask,
            const std::optional<Tensor> &kv_lens, bool causal, std::optional<double> scale, double softcap) {
    Args args;
    args.q = view(kRule, "q", q);
    args.k = view(kRule, "k", k);
    args.v = view(kRule, "v", v);
    if (mask) {
        args.mask = view(kRule, "mask", *mask);
    }
    if (kv_lens) {
        args.kv_lens = view(kRule, "kv_lens", *kv_lens);
    }
    args.causal = causal;
    const int64_t head_size = args.q.ndim > 0 && args.q.size(-1) > 0 ? args.q.size(-1) : 1;
    args.scale = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(head_size));
    args.softcap = softcap;
    return args;
}

// Checked and computed, with memory for partial results where it is needed.
void run(Args &args) {
    check("attention", args);
    const size_t bytes = workspace_bytes(args);
    std::optional<Tensor> workspace;
    if (bytes > 0) {
        workspace = empty({static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace->data_ptr();
    }
    compute(args);
}

Tensor attention(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &mask,
                 const std::optional<Tensor> &kv_lens, bool causal, std::optional<double> scale, double softcap) {
    Args args = inputs(q, k, v, mask, kv_lens, causal, scale, softcap);
    Tensor out = empty_like(args.q);
    args.out = view(kRule, "out", out);
    run(args);
    return out;
}

Tensor attention_out(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &mask,
                     const std::optional<Tensor> &kv_lens, bool causal, std::optional<double> scale, double softcap,
                     Tensor out) {
    Args args = inputs(q, k, v, mask, kv_lens, causal, scale, softcap);
    args.out = view(kRule, "out", out);
    run(args);
    return out;
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("attention", INFINI_BOX(attention));
    m.impl("attention.out", INFINI_BOX(attention_out));
}

} // namespace infini::attention
