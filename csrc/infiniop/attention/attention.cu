// The CUDA kernels of attention: the choice of the kernel, and the split of the work among blocks.
// Limits: decode reads K and V once (memory bandwidth), prefill does 4 flops for each visible (row, key, column).
#include "attention.h"

#include <cmath>

#include "core_kernel.cuh"
#include "cuda/multiprocessors.cuh"
#include "kernels.cuh"

namespace infini::attention::nvidia {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Values that depend on a call's shapes alone.
struct Sizes {
    int64_t batch, queries, keys, kv_heads, group, window;
    bool many;         // q_starts: sequences have different numbers of queries
    int64_t row_limit; // the most rows of a sequence whose keys are split; 0: none is split
    Splits splits;     // of the keys that a sequence's rows see

    Sizes(const ExecutionContext &context, const Args &a) {
        many = a.q_starts.dtype != INFINI_DTYPE_INVALID;
        batch = many ? a.q_starts.size(0) - 1 : a.q.size(0);
        queries = a.q.size(1);
        keys = a.block_tables.dtype ? a.block_tables.size(1) * a.k.size(1) : a.k.size(1);
        kv_heads = a.k.size(2);
        group = a.q.size(2) / kv_heads;
        const int64_t rows = queries * group;
        row_limit = many ? kSplitRowsOfMany : rows <= kSplitRows ? rows : 0;
        window = a.window > 0 ? a.window : INT64_MAX;
        splits = {1, 1};
        if (row_limit > 0) {
            splits = plan_splits(window < keys ? window : keys, kv_heads, cuda::multiprocessors(context));
            // With a window, all rows of a sequence together see a few more keys than one row: less than a split.
            static_assert(kSplitRows <= kMinSplitKeys && kSplitRowsOfMany <= kMinSplitKeys);
            const int64_t most_queries = many ? kSplitRowsOfMany : queries;
            const int64_t most_keys = window > keys - most_queries ? keys : window + most_queries - 1;
            splits.count = most_keys <= kMinSplitKeys ? 1 : splits.count + (window < keys && most_queries > 1);
        }
    }

    int64_t partial_rows() const { return splits.count > 1 ? batch * kv_heads * row_limit * splits.count : 0; }
};

template <typename T, typename E> Problem<T, E> problem_of(const Args &a, const Sizes &sizes) {
    Problem<T, E> p{};
    p.out = a.out.as<T>(), p.q = a.q.as<const T>(), p.k = a.k.as<const E>(), p.v = a.v.as<const E>();
    p.k_scales = a.k_scales.as<const float>(), p.v_scales = a.v_scales.as<const float>();
    for (int i = 0; i < 3; ++i) {
        p.out_strides[i] = a.out.strides[i], p.q_strides[i] = a.q.strides[i];
        p.k_strides[i] = a.k.strides[i], p.v_strides[i] = a.v.strides[i];
        p.k_scale_strides[i] = a.k_scales.strides[i], p.v_scale_strides[i] = a.v_scales.strides[i];
    }
    p.mask = a.mask.data, p.mask_dtype = a.mask.dtype;
    for (int i = 0; i < 4; ++i) {
        p.mask_strides[i] = a.mask.shape[i] == 1 ? 0 : a.mask.strides[i];
    }
    if (a.kv_lens.dtype) {
        p.lens = Indices(a.kv_lens);
    }
    if (a.block_tables.dtype) {
        p.tables = Indices(a.block_tables), p.table_stride = a.block_tables.strides[1];
        p.block_size = a.k.size(1), p.blocks = a.k.size(0);
    }
    if (sizes.many) {
        p.starts = Indices(a.q_starts);
    }
    if (a.alibi_slopes.dtype) {
        p.slopes = a.alibi_slopes.as<const float>(), p.slopes_stride = a.alibi_slopes.strides[0];
    }
    if (a.sinks.dtype) {
        p.sinks = a.sinks.as<const T>(), p.sinks_stride = a.sinks.strides[0];
    }
    p.batch = sizes.batch, p.queries = sizes.queries, p.keys = sizes.keys;
    const auto divider = [](int64_t by) { return cuda::IntDivider<uint64_t>(by < 1 ? 1 : static_cast<uint64_t>(by)); };
    p.by_group = divider(sizes.group), p.by_block_size = divider(p.block_size);
    p.kv_heads = sizes.kv_heads, p.group = sizes.group, p.size = static_cast<int>(a.q.size(3));
    p.causal = a.causal, p.capped = a.softcap > 0, p.keeps_empty = a.keeps_empty;
    p.window = sizes.window;
    constexpr int kWidth = cuda::kWidth<T>;
    p.whole_q = cuda::vectors_fit(a.q) && p.size % kWidth == 0;
    p.whole_kv = cuda::vectors_fit(a.k, a.v) && p.size % kWidth == 0;
    p.whole_out = cuda::vectors_fit(a.out) && p.size % kWidth == 0;
    p.scale = static_cast<float>(a.scale), p.softcap = static_cast<float>(a.softcap);
    p.cap_factor = cap_factor(a);
    constexpr float kLog2E = 1.44269504f;
    p.plain = !a.mask.dtype && !a.alibi_slopes.dtype && !p.capped && p.scale > 0 && std::isfinite(p.scale * kLog2E);
    p.exp2_unit = p.plain ? p.scale * kLog2E : kLog2E;
    p.partial_sums = static_cast<float2 *>(a.workspace);
    p.partial_out = static_cast<float *>(a.workspace) + (2 * sizes.partial_rows() + 3) / 4 * 4;
    return p;
}

template <typename T, typename E> Kernels<T, E> kernels_for(int64_t size) {
    if constexpr (sizeof(T) == 2) {
        if (size <= 256) {
            return tensor_core_kernels<T, E>(size);
        }
    }
    const typename Kernels<T, E>::Choice all{attend_by_cores<T, E>, kCoreRows, sizeof(CoreShared<T, E>)};
    return {all, all, all, all, ceil_div(size, kCoreColumns)};
}

template <typename T, typename E> void launch(const ExecutionContext &context, const Args &args) {
    const Sizes sizes(context, args);
    Problem<T, E> p = problem_of<T, E>(args, sizes);
    const Kernels<T, E> kernels = kernels_for<T, E>(p.size);
    const auto &many = is_exact() ? kernels.exact : kernels.many;
    const auto start = [&](const auto &choice, int64_t blocks) {
        const dim3 grid(cuda::grid_x(blocks), static_cast<unsigned>(kernels.column_blocks));
        cuda::launch(context, choice.kernel, grid, dim3(kThreads), choice.shared, p);
    };
    const int64_t lines = sizes.batch * sizes.kv_heads;
    const auto start_split = [&](const auto &choice, int64_t rows) {
        p.tile_rows = choice.rows;
        p.row_tiles = ceil_div(rows, p.tile_rows);
        p.splits = sizes.splits;
        p.row_limit = sizes.row_limit;
        start(choice, lines * p.splits.count * p.row_tiles);
        if (p.splits.count > 1) {
            cuda::launch(context, combine<T, E>, cuda::grid_x(lines * p.row_limit), dim3(kThreads), 0, p);
        }
    };
    if (!sizes.many) {
        const int64_t rows = sizes.queries * sizes.group;
        start_split(rows <= kernels.few.rows ? kernels.few : rows <= kernels.more.rows ? kernels.more : many, rows);
        return;
    }
    // Sequences of few rows first, then the others: that launch also marks an invalid q_starts.
    if (lines > 0) {
        p.small = true;
        start_split(kernels.more, kSplitRowsOfMany);
    }
    p.small = false;
    p.splits = {1, 1};
    p.tile_rows = many.rows;
    // Each sequence may have one tile that is not full.
    const int64_t tiles = ceil_div(sizes.queries * sizes.group, p.tile_rows) + sizes.batch;
    start(many, tiles * sizes.kv_heads);
}

size_t workspace_on_cuda(const ExecutionContext &context, const Args &args) {
    const Sizes sizes(context, args);
    const int64_t rows = sizes.partial_rows();
    return static_cast<size_t>(((2 * rows + 3) / 4 * 4 + rows * args.q.size(3)) * 4);
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    infini::cuda::with_float_type(args.q.dtype, [&](auto q) {
        using T = decltype(q);
        if constexpr (!std::is_same_v<T, double>) { // refused by the check
            args.k_scales.dtype ? launch<T, int8_t>(context, args) : launch<T, T>(context, args);
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda, workspace_on_cuda};

} // namespace
} // namespace infini::attention::nvidia
