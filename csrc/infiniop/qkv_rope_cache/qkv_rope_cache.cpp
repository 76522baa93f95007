// The rules of qkv_rope_cache, most of which are those of rope and paged_caching, and the call of its kernel.
#include "qkv_rope_cache.h"

#include "check.h"
#include "paged_caching/paged_caching.h"
#include "rope/rope.h"

namespace infini::qkv_rope_cache {

KernelTable<Args> kernels{"qkv_rope_cache"};

namespace {
const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_CPU, cpu_kernel};
}

namespace {

constexpr Checker kRule("qkv_rope_cache");

// Compared by division: the product of the sizes could overflow.
void check_width(const Args &args) {
    const int64_t width = args.qkv.size(1), heads = args.q.size(1), size = args.q.size(2);
    const int64_t kv_heads = args.k_cache.size(1), rows = size > 0 ? width / size : 0;
    const bool whole = size > 0 ? width % size == 0 : width == 0;
    if (!whole || (size > 0 && (rows < heads || (rows - heads) % 2 != 0 || (rows - heads) / 2 != kv_heads))) {
        kRule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "qkv",
                   message("hold in each row q's ", heads, " heads and twice k_cache's ", kv_heads, " heads of ", size,
                           " columns"),
                   message(width, " columns (shape ", shape_of(args.qkv), ")"));
    }
}

void check(const Args &args) {
    const TensorView &q = args.q, &k_cache = args.k_cache, &v_cache = args.v_cache, &qkv = args.qkv;
    kRule.rank("qkv", qkv, 2);
    kRule.dtype("qkv", qkv, INFINI_FLOATS);
    kRule.dense_last("qkv", qkv);
    paged_caching::check_caches(kRule, k_cache, v_cache, args.k_scales, args.v_scales);
    if (!args.k_scales.dtype) {
        kRule.same_dtype("k_cache", k_cache, "qkv", qkv);
    }
    kRule.rank("q", q, 3);
    kRule.same_dtype("q", q, "qkv", qkv);
    kRule.shape("q", q, {qkv.size(0), q.size(1), k_cache.size(3)}, "to match the tokens of qkv and columns of k_cache");
    kRule.dense_last("q", q);
    kRule.writable("q", q);
    check_width(args);
    rope::check_tables(kRule, "q", q, args.cos, args.sin, 2);
    rope::check_positions_dtype(kRule, args.positions);
    kRule.shape("positions", args.positions, {qkv.size(0)}, "to match the tokens of qkv");
    kRule.dtype("slot_mapping", args.slot_mapping, INFINI_INDICES);
    kRule.shape("slot_mapping", args.slot_mapping, {qkv.size(0)}, "to match the tokens of qkv");

    const TensorView *const written[] = {&q, &k_cache, &v_cache, &args.k_scales, &args.v_scales};
    const char *const written_names[] = {"q", "k_cache", "v_cache", "k_scales", "v_scales"};
    const int count = args.k_scales.dtype ? 5 : 3;
    const TensorView *const read[] = {&qkv, &args.cos, &args.sin, &args.positions, &args.slot_mapping};
    const char *const read_names[] = {"qkv", "cos", "sin", "positions", "slot_mapping"};
    for (int i = 0; i < count; ++i) {
        for (int j = 0; j < 5; ++j) {
            kRule.no_overlap(written_names[i], *written[i], read_names[j], *read[j]);
        }
    }
    for (int i = 1; i < count; ++i) {
        kRule.no_overlap("q", q, written_names[i], *written[i]);
    }
}

} // namespace

void run(const ExecutionContext &context, const Args &args) {
    check(args);
    if (context.is_cpu()) {
        rope::check_positions(kRule, args.positions, args.cos.shape[0]);
        paged_caching::check_slots(kRule, args.slot_mapping, args.k_cache);
    }
    if (args.qkv.numel() > 0) {
        Args batched = args;
        batched.positions = rope::with_batch(args.positions, 1, 2);
        kernels.run(context, batched);
    }
}

} // namespace infini::qkv_rope_cache
