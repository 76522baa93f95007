// The CUDA kernel of qkv_rope_cache, one launch (two for int8 caches): each thread handles one slice of one or two
// heads of a row, rotates it if it belongs to q or k, and writes it to q or to its slot. Limit: memory bandwidth, each
// element read and written once (8192 tokens of 32 + 2 x 8 heads x 128 bf16 at 4.3 TB/s: 47 us); for a few tokens the
// latency of reading position, angles and row.
// SASS: write_heads: LDG.E.128 STG.E.128
#include "cuda/heads.cuh"
#include "paged_caching/quantized.cuh"
#include "paged_caching/slots.cuh"
#include "qkv_rope_cache.h"
#include "rope/rotation.cuh"

namespace infini::qkv_rope_cache {
namespace {

using cuda::HeadPlan;
using cuda::kThreadHeads;
using cuda::Slice;

template <typename T, typename A> struct Problem {
    TensorView q, k_cache, v_cache, qkv, slot_mapping;
    rope::Rotation<T, A> rotation;
    HeadPlan plan; // its heads are those of q, k and v
    bool aligned;
};

template <typename T, typename A>
__global__ void __launch_bounds__(cuda::kHeadThreads, 5) write_heads(const __grid_constant__ Problem<T, A> a) {
    cuda::grid_dependency_sync();
    INFINI_SHARED(tile, paged_caching::Tile);
    const int64_t heads = a.q.shape[1], rotated = heads + a.k_cache.shape[1], head = a.plan.head();
    const int64_t first = a.plan.first_token(), end = a.plan.end_token();
    const int columns = a.rotation.columns, number = a.plan.slice();
    const Slice<T> turned = a.rotation.slice(number, a.aligned);
    const Slice<T> copied(0, columns, cuda::slices_of(columns, cuda::kWidth<T>) * cuda::kWidth<T>, number, a.aligned);
    int64_t token = first + threadIdx.y;
    cuda::Vector<T> v[kThreadHeads][2];
    rope::SliceRotation<T> turn;
    const auto fetch = [&] {
        if (!a.plan.has_slice() || token >= end) {
            return;
        }
        const T *row = a.qkv.template as<const T>() + token * a.qkv.strides[0] + head * columns;
#pragma unroll
        for (int i = 0; i < kThreadHeads; ++i) {
            if (a.plan.owns(head, i)) {
                if (head + i < rotated) {
                    turned.read(v[i], row + i * columns);
                } else {
                    copied.read(v[i], row + i * columns);
                }
            }
        }
        turn.fetch(a.rotation, turned, head < rotated && number < a.rotation.turning, 0, token);
    };

    using paged_caching::Tile;
    const bool writes_caches = a.plan.end_head() > heads;
    const Tile::Loaded slots = writes_caches ? Tile::load(a.slot_mapping, first, end, a.plan.tokens) : Tile::Loaded{};
    fetch(); // overlaps with the loads of the slots; it waits for the position
    if (writes_caches) {
        tile.find(a.slot_mapping, a.k_cache, a.v_cache, first, end, a.plan.tokens, slots);
    }
    if (!a.plan.has_slice()) {
        return;
    }
    while (token < end) {
        const int j = static_cast<int>(token - first);
#pragma unroll
        for (int i = 0; i < kThreadHeads; ++i) {
            const int64_t row = head + i;
            if (!a.plan.owns(head, i) || (row >= heads && !tile.writes(j))) {
                continue;
            }
            if (row >= rotated) {
                copied.write(a.v_cache.template as<T>() + tile.v(j) + (row - rotated) * a.v_cache.strides[1], v[i]);
                continue;
            }
            turn(v[i]);
            turned.write(row < heads ? a.q.template as<T>() + token * a.q.strides[0] + row * a.q.strides[1]
                                     : a.k_cache.template as<T>() + tile.k(j) + (row - heads) * a.k_cache.strides[1],
                         v[i]);
        }
        token += blockDim.y;
        fetch();
    }
}

// For int8 caches: the rotated rows of k, and the rows of v.
template <typename T, typename A> struct Rows {
    TensorView rows; // [tokens, heads of q, k and v, D]
    int64_t heads, kv_heads;
    rope::Rotation<T, A> rotation;
    bool aligned;

    __device__ __forceinline__ int slices(bool is_k) const {
        return is_k ? rotation.turning + rotation.passing : cuda::slices_of(rotation.columns, cuda::kWidth<T>);
    }
    __device__ __forceinline__ Slice<T> read(bool is_k, int64_t head, int64_t token, int i,
                                             cuda::Vector<T> (&vectors)[2]) const {
        const int64_t row = heads + (is_k ? 0 : kv_heads) + head;
        const Slice<T> slice = is_k ? rotation.slice(i, aligned)
                                    : Slice<T>(0, rotation.columns, slices(false) * cuda::kWidth<T>, i, aligned);
        slice.read(vectors, rows.as<const T>() + token * rows.strides[0] + row * rows.strides[1]);
        rope::SliceRotation<T> turn;
        turn.fetch(rotation, slice, is_k && i < rotation.turning, 0, token);
        turn(vectors);
        return slice;
    }
};

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    rope::with_types(args.qkv.dtype, args.cos.dtype, [&](auto x, auto angle) {
        using T = decltype(x);
        using A = decltype(angle);
        if constexpr (!std::is_same_v<T, double>) {
            const int64_t tokens = args.qkv.shape[0], columns = args.q.shape[2];
            const rope::Rotation<T, A> rotation(args.cos, args.sin, args.positions, columns, args.interleaved);
            TensorView rows = args.qkv; // [tokens, heads of q, k and v, D]
            rows.ndim = 3;
            rows.shape[1] = args.q.shape[1] + 2 * args.k_cache.shape[1];
            rows.strides[1] = columns;
            rows.shape[2] = columns;
            rows.strides[2] = 1;
            const auto write = [&](int64_t heads) { // writes the first `heads` heads of each row
                const HeadPlan plan(tokens, heads, rotation.turning + rotation.passing, paged_caching::tile_of(tokens));
                const Problem<T, A> problem{args.q,
                                            args.k_cache,
                                            args.v_cache,
                                            rows,
                                            args.slot_mapping,
                                            rotation,
                                            plan,
                                            cuda::vectors_fit(rows, args.q, args.k_cache, args.v_cache)};
                cuda::launch(context, write_heads<T, A>, cuda::grid_x(plan.blocks), plan.threads, 0, problem);
            };
            if (args.k_scales.dtype == INFINI_DTYPE_INVALID) {
                write(rows.shape[1]);
                return;
            }
            const int64_t heads = args.q.shape[1], kv_heads = args.k_cache.shape[1];
            if (heads > 0) {
                write(heads);
            }
            if (kv_heads > 0) {
                paged_caching::launch_quantize<T>(
                    context, {args.k_cache, args.v_cache, args.k_scales, args.v_scales, args.slot_mapping, tokens, 0},
                    Rows<T, A>{rows, heads, kv_heads, rotation, cuda::vectors_fit(rows)});
            }
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::qkv_rope_cache
