// The rules of paged_caching, and the call of its kernel.
#include "paged_caching.h"

#include "check.h"
#include "indices.h"
#include "rearrange/rearrange.h"
#include "scratch.h"

namespace infini::paged_caching {

KernelTable<Args> kernels{"paged_caching"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

void check_scales(const Checker &rule, const TensorView &k_cache, const TensorView &k_scales,
                  const TensorView &v_scales) {
    const TensorView *const scales[] = {&k_scales, &v_scales};
    const char *const names[] = {"k_scales", "v_scales"};
    for (int i = 0; i < 2; ++i) {
        const bool given = scales[i]->dtype != INFINI_DTYPE_INVALID;
        if (given != (k_cache.dtype == INFINI_DTYPE_I8)) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_DTYPE, names[i], "be given if and only if k_cache is int8",
                      message(given ? "some" : "none", " for ", name_of(k_cache.dtype)));
        }
        if (given) {
            rule.dtype(names[i], *scales[i], {INFINI_DTYPE_F32});
            rule.shape(names[i], *scales[i], {k_cache.size(0), k_cache.size(1), k_cache.size(2)},
                       "to match the blocks, heads and rows of k_cache");
        }
    }
}

void check_caches(const Checker &rule, const TensorView &k_cache, const TensorView &v_cache, const TensorView &k_scales,
                  const TensorView &v_scales) {
    rule.rank("k_cache", k_cache, 4);
    check_scales(rule, k_cache, k_scales, v_scales);
    const bool scaled = k_scales.dtype != INFINI_DTYPE_INVALID;
    if (!scaled) {
        rule.dtype("k_cache", k_cache, INFINI_FLOATS);
    }
    rule.dense_last("k_cache", k_cache);
    rule.writable("k_cache", k_cache);
    rule.same_dtype("v_cache", v_cache, "k_cache", k_cache);
    rule.same_shape("v_cache", v_cache, "k_cache", k_cache);
    rule.dense_last("v_cache", v_cache);
    rule.writable("v_cache", v_cache);
    if (scaled) {
        rule.writable("k_scales", k_scales);
        rule.writable("v_scales", v_scales);
        const TensorView *const caches[] = {&k_cache, &v_cache};
        const char *const names[] = {"k_cache", "v_cache"};
        for (int i = 0; i < 2; ++i) {
            rule.no_overlap("k_scales", k_scales, names[i], *caches[i]);
            rule.no_overlap("v_scales", v_scales, names[i], *caches[i]);
        }
    }
    // k_cache and v_cache may be interleaved in one allocation, so their spans are not compared. The same for the
    // scales.
}

void check_slots(const Checker &rule, const TensorView &slots, const TensorView &k_cache) {
    const int64_t blocks = k_cache.size(0), block_size = k_cache.size(2);
    for (int64_t t = 0; t < slots.size(0); ++t) {
        const int64_t slot = Indices(slots)[t];
        if (slot >= 0 && (block_size == 0 || slot / block_size >= blocks)) {
            rule.fail(INFINI_STATUS_BAD_PARAM, "slot_mapping",
                      message("be below 0 or less than ", blocks, " blocks of ", block_size, " slots"),
                      message(slot, " for token ", t));
        }
    }
}

namespace {

// Torch's compiler may pass a slice of a cache where the caller passed a clone of it (pytorch issue 198031).
bool in_caches(const Args &args, const TensorView &rows) {
    const bool in_scales = args.k_scales.dtype && (overlap(args.k_scales, rows) || overlap(args.v_scales, rows));
    return in_scales || overlap(args.k_cache, rows) || overlap(args.v_cache, rows);
}

// Copies the rows [tokens, Hkv, D] to `memory`.
TensorView copy(const ExecutionContext &context, const TensorView &rows, void *memory) {
    TensorView copied = rows;
    copied.data = memory;
    copied.strides[0] = rows.shape[1] * rows.shape[2];
    copied.strides[1] = rows.shape[2];
    copied.strides[2] = 1;
    rearrange::run(context, {copied, rows});
    return copied;
}

constexpr Checker kRule("paged_caching");

} // namespace

bool needs_copies(const ExecutionContext &context, const Args &args) {
    return !context.is_cpu() && args.k.numel() > 0 && (in_caches(args, args.k) || in_caches(args, args.v));
}

void check(const Args &args) {
    constexpr Checker rule = kRule;
    const TensorView &k_cache = args.k_cache, &v_cache = args.v_cache, &k = args.k, &v = args.v;
    check_caches(rule, k_cache, v_cache, args.k_scales, args.v_scales);
    rule.rank("k", k, 3);
    if (args.k_scales.dtype) {
        rule.dtype("k", k, INFINI_FLOATS);
    } else {
        rule.same_dtype("k", k, "k_cache", k_cache);
    }
    rule.shape("k", k, {k.size(0), k_cache.size(1), k_cache.size(3)}, "to match the heads and columns of k_cache");
    rule.dense_last("k", k);
    if (args.k_scales.dtype) {
        rule.same_dtype("v", v, "k", k);
    } else {
        rule.same_dtype("v", v, "k_cache", k_cache);
    }
    rule.same_shape("v", v, "k", k);
    rule.dense_last("v", v);
    rule.dtype("slot_mapping", args.slot_mapping, INFINI_INDICES);
    rule.shape("slot_mapping", args.slot_mapping, {k.size(0)}, "to match the tokens of k");
    const TensorView *const written[] = {&k_cache, &v_cache, &args.k_scales, &args.v_scales};
    const char *const names[] = {"k_cache", "v_cache", "k_scales", "v_scales"};
    for (int i = 0; i < (args.k_scales.dtype ? 4 : 2); ++i) {
        rule.no_overlap(names[i], *written[i], "slot_mapping", args.slot_mapping);
    }
}

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (context.is_cpu()) {
        check_slots(kRule, args.slot_mapping, args.k_cache);
    }
    if (args.k.numel() == 0) {
        return;
    }
    Args apart = args;
    const bool copies_k = in_caches(args, args.k), copies_v = in_caches(args, args.v);
    if (copies_k || copies_v) {
        const auto bytes = args.k.numel() * static_cast<int64_t>(size_of(args.k.dtype));
        auto *const scratch =
            static_cast<char *>(context.is_cpu() ? cpu::scratch(static_cast<size_t>(2 * bytes)) : args.copies);
        if (scratch == nullptr) {
            kRule.fail(INFINI_STATUS_BAD_PARAM, copies_k ? "k" : "v", "share no memory with the caches",
                       "one whose span of memory overlaps theirs");
        }
        apart.k = copies_k ? copy(context, args.k, scratch) : args.k;
        apart.v = copies_v ? copy(context, args.v, scratch + bytes) : args.v;
    }
    kernels.run(context, apart);
}

} // namespace infini::paged_caching
