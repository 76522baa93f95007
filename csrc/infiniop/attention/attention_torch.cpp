// torch.ops.infini.attention, functional and out; declared in torch_infini/ops/attention.py.
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "../../torch/tensor.h"
#include "guard.h"
#include "library.h"

#include <torch/csrc/stable/ops.h>

namespace infini::attention {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

constexpr Checker kRule("attention");

Args inputs(const ExecutionContext &context, const Tensor &q, const Tensor &k, const Tensor &v,
            const std::optional<Tensor> &mask, const std::optional<Tensor> &kv_lens, bool causal,
            std::optional<double> scale, double softcap, const std::optional<Tensor> &sinks) {
    Args args;
    args.q = view(context, kRule, "q", q);
    args.k = view(context, kRule, "k", k);
    args.v = view(context, kRule, "v", v);
    if (mask) {
        args.mask = view(context, kRule, "mask", *mask);
    }
    if (kv_lens) {
        args.kv_lens = view(context, kRule, "kv_lens", *kv_lens);
    }
    if (sinks) {
        args.sinks = view(context, kRule, "sinks", *sinks);
    }
    args.causal = causal;
    const int64_t head_size = args.q.ndim > 0 && args.q.size(-1) > 0 ? args.q.size(-1) : 1;
    args.scale = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(head_size));
    args.softcap = softcap;
    return args;
}

// [B, T, heads, D] as torch's attention takes it, [B, heads, T, D]: a tensor of the same memory.
Tensor heads_first(const ExecutionContext &context, TensorView x) {
    std::swap(x.shape[1], x.shape[2]);
    std::swap(x.strides[1], x.strides[2]);
    return tensor_of(context, x);
}

// The backend that torch's scaled_dot_product_attention would choose, which torch's sdpa_kernel context restricts.
enum class Backend : int64_t { kFlash = 1, kCudnn = 3 };

// The result [B, S, H, D] of a call that library_takes() accepts; none where torch would choose neither flash nor cuDNN
// attention, or where autocast is to another type: then our kernel computes. The flash and cuDNN operators cannot be
// called directly: torch_call_dispatcher mistakes the types of results that are not all tensors.
std::optional<Tensor> attend_by_torch(const ExecutionContext &context, const Args &args) {
    const Tensor q = heads_first(context, args.q), k = heads_first(context, args.k), v = heads_first(context, args.v);
    const auto call = [&](const char *name) {
        std::array stack{from(q),
                         from(k),
                         from(v),
                         from(std::nullopt), // mask
                         from(0.0),          // dropout
                         from(args.causal),
                         from(std::optional<double>(args.scale)),
                         from(q.size(1) != k.size(1))}; // enable_gqa
        TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
        return stack[0];
    };
    const auto backend = static_cast<Backend>(to<int64_t>(call("aten::_fused_sdp_choice")));
    if (backend != Backend::kFlash && backend != Backend::kCudnn) {
        return std::nullopt;
    }
    const auto y = to<Tensor>(call("aten::scaled_dot_product_attention"));
    if (y.scalar_type() != q.scalar_type()) {
        return std::nullopt;
    }
    return torch::stable::transpose(y, 1, 2);
}

// Checks and computes, with memory for partial results where it is needed. is_new: the caller does not hold out yet, so
// torch's result may be returned instead.
Tensor run(const ExecutionContext &context, Args args, Tensor out, bool is_new) {
    args.out = view(context, kRule, "out", out);
    check(context, "attention", args);
    if (library_takes(context, args)) {
        if (const std::optional<Tensor> y = attend_by_torch(context, args)) {
            if (is_new && y->is_contiguous()) {
                return *y;
            }
            Tensor to = tensor_of(context, args.out);
            torch::stable::copy_(to, *y);
            return out;
        }
    }
    const size_t bytes = workspace_bytes(context, args);
    std::optional<Tensor> workspace;
    if (bytes > 0) {
        workspace = empty(context, {static_cast<int64_t>(bytes)}, INFINI_DTYPE_U8);
        args.workspace = workspace->data_ptr();
    }
    compute(context, args);
    return out;
}

Tensor attention(const ExecutionContext &context, const Tensor &q, const Tensor &k, const Tensor &v,
                 const std::optional<Tensor> &mask, const std::optional<Tensor> &kv_lens, bool causal,
                 std::optional<double> scale, double softcap, const std::optional<Tensor> &sinks) {
    const Args args = inputs(context, q, k, v, mask, kv_lens, causal, scale, softcap, sinks);
    return run(context, args, empty_like(context, args.q), true);
}

Tensor attention_out(const ExecutionContext &context, const Tensor &q, const Tensor &k, const Tensor &v,
                     const std::optional<Tensor> &mask, const std::optional<Tensor> &kv_lens, bool causal,
                     std::optional<double> scale, double softcap, const std::optional<Tensor> &sinks, Tensor out) {
    return run(context, inputs(context, q, k, v, mask, kv_lens, causal, scale, softcap, sinks), out, false);
}

} // namespace

INFINI_TORCH_LIBRARY(m) {
    m.impl("attention", INFINI_BOX(attention));
    m.impl("attention.out", INFINI_BOX(attention_out));
}

} // namespace infini::attention

extern "C" {

// The least number of queries for which torch's own attention computes a plain call on CUDA; INT64_MAX: never.
INFINI_API int64_t infiniTorchAttentionFrom(void) {
    return infini::attention::library_from();
}

INFINI_API int64_t infiniTorchAttentionQueries(void) {
    return infini::attention::kLibraryQueries;
}

INFINI_API infiniStatus_t infiniTorchSetAttentionFrom(int64_t queries) {
    return infini::guarded([&] { infini::attention::set_library_from(queries); });
}
}
