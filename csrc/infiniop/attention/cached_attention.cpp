// The argument checks of cached_attention, the copy into the cache, and the call of attention.
#include "cached_attention.h"

#include <cmath>
#include <cstring>

#include "attention.h"
#include "check.h"

namespace infini::cached_attention {

KernelTable<Copy> copy_kernels{"attention"};

namespace {

// The rows of a cache that k or v goes to.
TensorView new_rows(const TensorView &cache, const Args &args) {
    TensorView rows = cache;
    rows.shape[1] = args.q.size(1);
    if (rows.data != nullptr) {
        rows.data = cache.as<char>() +
                    static_cast<int64_t>(args.pos) * cache.strides[1] * static_cast<int64_t>(size_of(cache.dtype));
    }
    return rows;
}

TensorView swapped(const TensorView &view) {
    TensorView result = view;
    result.shape[0] = view.shape[1];
    result.shape[1] = view.shape[0];
    result.strides[0] = view.strides[1];
    result.strides[1] = view.strides[0];
    return result;
}

// [tokens, heads, D] as [1, tokens, heads, D].
TensorView with_batch(const TensorView &view) {
    TensorView result = view;
    result.ndim = 4;
    result.shape[0] = 1;
    result.strides[0] = 0;
    for (int i = 0; i < 3; ++i) {
        result.shape[i + 1] = view.shape[i];
        result.strides[i + 1] = view.strides[i];
    }
    return result;
}

void copy_on_cpu(const ExecutionContext &, const Copy &copy) {
    const TensorView &to = copy.to, &from = copy.from;
    const auto size = static_cast<int64_t>(size_of(to.dtype));
    for (int64_t head = 0; head < to.shape[0]; ++head) {
        for (int64_t row = 0; row < to.shape[1]; ++row) {
            std::memcpy(to.as<char>() + (head * to.strides[0] + row * to.strides[1]) * size,
                        from.as<const char>() + (head * from.strides[0] + row * from.strides[1]) * size,
                        static_cast<size_t>(to.shape[2] * size));
        }
    }
}

const RegisteredKernel<Copy> registered{copy_kernels, INFINI_DEVICE_CPU, copy_on_cpu};

void copy(const ExecutionContext &context, const TensorView &to, const TensorView &from) {
    if (to.data != from.data) { // else k or v is in the cache already: check() allows no other overlap
        copy_kernels.run(context, {to, from});
    }
}

// The arguments of attention over the cache once k and v are in it.
attention::Args attend(const Args &args) {
    attention::Args attend;
    attend.out = with_batch(args.out);
    attend.q = with_batch(swapped(args.q));
    attend.k = with_batch(swapped(args.k_cache));
    attend.v = with_batch(swapped(args.v_cache));
    attend.k.shape[1] = attend.v.shape[1] = static_cast<int64_t>(args.pos) + args.q.size(1);
    attend.scale = 1.0 / std::sqrt(static_cast<double>(args.q.size(2)));
    attend.workspace = args.workspace;
    return attend;
}

} // namespace

void check(const Args &args) {
    constexpr Checker rule("attention");
    const TensorView &q = args.q, &k = args.k, &v = args.v, &k_cache = args.k_cache, &v_cache = args.v_cache;
    rule.rank("q", q, 3);
    rule.dtype("q", q, INFINI_FLOATS);
    rule.dense_last("q", q);
    rule.rank("k", k, 3);
    rule.same_dtype("k", k, "q", q);
    rule.shape("k", k, {k.size(0), q.size(1), q.size(2)}, "to match the tokens and the head size of q");
    rule.dense_last("k", k);
    rule.same_dtype("v", v, "q", q);
    rule.same_shape("v", v, "k", k);
    rule.dense_last("v", v);
    const int64_t heads = q.size(0), kv_heads = k.size(0), tokens = q.size(1);
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "q",
                  message("have a multiple of k's ", kv_heads, " heads in dimension 0"), std::to_string(heads));
    }
    rule.rank("k_cache", k_cache, 3);
    rule.same_dtype("k_cache", k_cache, "q", q);
    rule.shape("k_cache", k_cache, {kv_heads, k_cache.size(1), q.size(2)}, "to match the heads and the head size of k");
    const int64_t room = k_cache.size(1) - tokens;
    if (room < 0 || args.pos > static_cast<uint64_t>(room)) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "k_cache",
                  message("have room for ", tokens, " tokens behind the first ", args.pos),
                  message(k_cache.size(1), " rows (shape ", shape_of(k_cache), ")"));
    }
    rule.dense_last("k_cache", k_cache);
    rule.writable("k_cache", k_cache);
    rule.same_dtype("v_cache", v_cache, "q", q);
    rule.same_shape("v_cache", v_cache, "k_cache", k_cache);
    rule.dense_last("v_cache", v_cache);
    rule.writable("v_cache", v_cache);

    rule.shape("out", args.out, {tokens, heads, q.size(2)}, "to match the tokens and heads of q");
    rule.same_dtype("out", args.out, "q", q);
    rule.dense_last("out", args.out);
    rule.writable("out", args.out);
    rule.no_partial_overlap("out", args.out, "q", swapped(q));
    // The two caches may be interleaved in memory: their spans are not compared.
    const TensorView k_rows = new_rows(k_cache, args), v_rows = new_rows(v_cache, args);
    rule.no_partial_overlap("k_cache", k_rows, "k", k);
    rule.no_partial_overlap("v_cache", v_rows, "v", v);
    const TensorView *const inputs[] = {&k, &v, &k_cache, &v_cache};
    const char *const names[] = {"k", "v", "k_cache", "v_cache"};
    for (int i = 0; i < 4; ++i) {
        rule.no_overlap("out", args.out, names[i], *inputs[i]);
    }
    rule.no_overlap("k_cache", k_rows, "q", q);
    rule.no_overlap("v_cache", v_rows, "q", q);
    if (k_rows.data != k.data) { // k in place may be interleaved with v
        rule.no_overlap("k_cache", k_rows, "v", v);
    }
    if (v_rows.data != v.data) {
        rule.no_overlap("v_cache", v_rows, "k", k);
    }
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (args.k.numel() == 0) {
        return;
    }
    copy(context, new_rows(args.k_cache, args), args.k);
    copy(context, new_rows(args.v_cache, args), args.v);
    attention::compute(context, attend(args));
}

size_t workspace_bytes(const ExecutionContext &context, const Args &args) {
    return attention::workspace_bytes(context, attend(args));
}

} // namespace infini::cached_attention
