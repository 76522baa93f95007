// The rule by which calls on CUDA go to torch's attention.
#include "library.h"

#include <atomic>

#include "check.h"

namespace infini::attention {

namespace {

std::atomic<int64_t> from{INT64_MAX};

// torch's kernels load 16 bytes at once and do not check the alignment.
bool is_aligned(const TensorView &view) {
    bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int i = 0; i < 3; ++i) {
        aligned = aligned && (view.shape[i] <= 1 || view.strides[i] % 8 == 0);
    }
    return aligned;
}

} // namespace

int64_t library_from() {
    return from.load(std::memory_order_relaxed);
}

void set_library_from(int64_t queries) {
    if (queries < 1) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message("infini: the number of queries must be at least 1, got ", queries));
    }
    from.store(queries, std::memory_order_relaxed);
}

bool library_takes(const ExecutionContext &context, const Args &args) {
    const TensorView &q = args.q, &k = args.k;
    if (context.device_type != INFINI_DEVICE_NVIDIA || q.size(1) < library_from() || is_exact()) {
        return false;
    }
    // A plain call: "causal, with as many queries as keys" or "all keys", without other options.
    const bool plain = !args.mask.dtype && !args.kv_lens.dtype && !args.block_tables.dtype && !args.q_starts.dtype &&
                       !args.k_scales.dtype && !args.alibi_slopes.dtype && !args.sinks.dtype && args.window == 0 &&
                       args.softcap == 0;
    constexpr int64_t kMaxBlocks = 65535; // of a grid's second and third dimension: sequences and heads
    const int64_t size = q.size(3), keys = k.size(1);
    return plain && (args.causal ? keys == q.size(1) : keys > 0) && size_of(q.dtype) == 2 && size > 0 && size <= 256 &&
           size % 8 == 0 && q.size(0) > 0 && q.size(0) <= kMaxBlocks && q.size(2) > 0 && q.size(2) <= kMaxBlocks &&
           args.scale > 0 && // torch takes the largest score before scaling
           is_aligned(q) && is_aligned(k) && is_aligned(args.v);
}

} // namespace infini::attention
