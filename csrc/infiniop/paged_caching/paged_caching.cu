// The CUDA kernel of paged_caching: each thread copies one slice of one or two heads of k or v, token by token of its
// block's tile. Limit: memory bandwidth, each element read and written once (8192 tokens x 8 heads x 128 bf16 at 4.3
// TB/s: 16 us); for a few tokens the latency of reading slot and row.
// SASS: write_heads: LDG.E.128 STG.E.128
#include "cuda/heads.cuh"
#include "paged_caching.h"
#include "quantized.cuh"
#include "slots.cuh"

namespace infini::paged_caching {
namespace {

using cuda::HeadPlan;

struct Problem {
    Args args;
    HeadPlan plan; // its heads are those of k, then those of v
    bool aligned;
};

// T: any type of the size of an element.
template <typename T>
__global__ void __launch_bounds__(cuda::kHeadThreads) write_heads(const __grid_constant__ Problem a) {
    cuda::grid_dependency_sync();
    INFINI_SHARED(tile, Tile);
    const TensorView &k = a.args.k, &v = a.args.v, &k_cache = a.args.k_cache, &v_cache = a.args.v_cache;
    const int64_t first = a.plan.first_token(), end = a.plan.end_token();
    const int64_t heads = k.shape[1], head = a.plan.head();
    const int columns = static_cast<int>(k.shape[2]), slices = static_cast<int>(a.plan.slices);
    const cuda::Slice<T> slice(0, columns, slices * cuda::kWidth<T>, a.plan.slice(), a.aligned);
    int64_t token = first + threadIdx.y;
    cuda::Vector<T> vectors[cuda::kThreadHeads][2];
    const auto fetch = [&] {
#pragma unroll
        for (int i = 0; i < cuda::kThreadHeads; ++i) {
            if (a.plan.has_slice() && token < end && a.plan.owns(head, i)) {
                const bool is_k = head + i < heads;
                const TensorView &rows = is_k ? k : v;
                const int64_t row = is_k ? head + i : head + i - heads;
                slice.read(vectors[i], rows.as<const T>() + token * rows.strides[0] + row * rows.strides[1]);
            }
        }
    };

    const Tile::Loaded slots = Tile::load(a.args.slot_mapping, first, end, a.plan.tokens);
    fetch(); // overlaps with the loads of the slots
    tile.find(a.args.slot_mapping, k_cache, v_cache, first, end, a.plan.tokens, slots);
    if (!a.plan.has_slice()) {
        return;
    }
    while (token < end) {
        const int j = static_cast<int>(token - first);
        if (tile.writes(j)) {
#pragma unroll
            for (int i = 0; i < cuda::kThreadHeads; ++i) {
                if (a.plan.owns(head, i)) {
                    const bool is_k = head + i < heads;
                    const TensorView &cache = is_k ? k_cache : v_cache;
                    const int64_t row = is_k ? head + i : head + i - heads;
                    slice.write(cache.as<T>() + (is_k ? tile.k(j) : tile.v(j)) + row * cache.strides[1], vectors[i]);
                }
            }
        }
        token += blockDim.y;
        fetch();
    }
}

template <typename T> void launch(const ExecutionContext &context, const Args &args) {
    const int64_t tokens = args.k.shape[0];
    const HeadPlan plan(tokens, 2 * args.k.shape[1],
                        cuda::slices_of(cuda::checked_columns(args.k.shape[2]), cuda::kWidth<T>), tile_of(tokens));
    const Problem problem{args, plan, cuda::vectors_fit(args.k, args.v, args.k_cache, args.v_cache)};
    cuda::launch(context, write_heads<T>, cuda::grid_x(plan.blocks), plan.threads, 0, problem);
}

// The rows of k and v for int8 caches.
template <typename T> struct Rows {
    TensorView k, v;
    int columns;
    bool aligned;

    __device__ __forceinline__ int slices(bool) const { return cuda::slices_of(columns, cuda::kWidth<T>); }
    __device__ __forceinline__ cuda::Slice<T> read(bool is_k, int64_t head, int64_t token, int i,
                                                   cuda::Vector<T> (&vectors)[2]) const {
        const TensorView &rows = is_k ? k : v;
        const cuda::Slice<T> slice(0, columns, slices(is_k) * cuda::kWidth<T>, i, aligned);
        slice.read(vectors, rows.as<const T>() + token * rows.strides[0] + head * rows.strides[1]);
        return slice;
    }
};

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    if (args.k_scales.dtype) {
        cuda::with_float_type(args.k.dtype, [&](auto x) {
            using T = decltype(x);
            if constexpr (!std::is_same_v<T, double>) {
                launch_quantize<T>(
                    context,
                    {args.k_cache, args.v_cache, args.k_scales, args.v_scales, args.slot_mapping, args.k.shape[0], 0},
                    Rows<T>{args.k, args.v, cuda::checked_columns(args.k.shape[2]), cuda::vectors_fit(args.k, args.v)});
            }
        });
        return;
    }
    size_of(args.k.dtype) == 2 ? launch<uint16_t>(context, args) : launch<uint32_t>(context, args);
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::paged_caching
