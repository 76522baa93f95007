// Quantizes rows of k and v into int8 caches on CUDA: a warp handles a head of a token, finds its largest magnitude,
// then reads it again (from the L1 cache) and writes integers and scale. For the .cu files of paged_caching and of the
// ops that fuse it.
#pragma once

#include "cuda/launch.cuh"
#include "cuda/quantize_row.cuh"
#include "cuda/reduce.cuh"
#include "slots.cuh"

namespace infini::paged_caching {

constexpr int kQuantizeWarps = 4;

struct QuantizedCaches {
    TensorView k_cache, v_cache, k_scales, v_scales, slot_mapping;
    int64_t tokens;
    int tile; // tokens per block
};

// Source: slices(is_k) is the number of slices of a row; read(is_k, head, token, i, vectors) reads slice i and returns
// its Slice.
template <typename T, typename Source>
__global__ void __launch_bounds__(kQuantizeWarps *cuda::kWarp, 4) // else 80 registers, and for sm_100 a spill
    quantize_heads(const __grid_constant__ QuantizedCaches a, const __grid_constant__ Source source) {
    cuda::grid_dependency_sync();
    INFINI_SHARED(tile, Tile);
    const int64_t heads = a.k_cache.shape[1], first = static_cast<int64_t>(blockIdx.x) * a.tile;
    const int64_t end = first + a.tile < a.tokens ? first + a.tile : a.tokens;
    tile.find(a.slot_mapping, a.k_cache, a.v_cache, first, end, a.tokens,
              Tile::load(a.slot_mapping, first, end, a.tokens));
    const int lane = threadIdx.x;
    // The rows of K's heads and then V's are assigned to warps across tokens without a division, which is a call on the
    // GPU.
    static_assert((kQuantizeWarps & (kQuantizeWarps - 1)) == 0);
    for (int j = 0; j < static_cast<int>(end - first); ++j) {
        if (!tile.writes(j)) {
            continue;
        }
        const int64_t before = j * 2 * heads;
        for (int64_t i = (threadIdx.y - before) & (kQuantizeWarps - 1); i < 2 * heads; i += kQuantizeWarps) {
            const bool is_k = i < heads;
            const int64_t head = is_k ? i : i - heads;
            cuda::Vector<T> vectors[2];
            float largest = 0;
            for (int slice = lane; slice < source.slices(is_k); slice += cuda::kWarp) {
                const cuda::Slice<T> at = source.read(is_k, head, first + j, slice, vectors);
#pragma unroll
                for (int e = 0; e < 2 * cuda::kWidth<T>; ++e) {
                    const int k = e / cuda::kWidth<T>, of_vector = e % cuda::kWidth<T>;
                    if (of_vector < at.count[k]) {
                        largest = cuda::Max::join(largest, fabsf(cuda::widen(vectors[k].values[of_vector])));
                    }
                }
            }
            const cuda::RowScale scale(cuda::warp_reduce<cuda::Max>(largest));
            const TensorView &cache = is_k ? a.k_cache : a.v_cache, &scales = is_k ? a.k_scales : a.v_scales;
            int8_t *const row = cache.as<int8_t>() + (is_k ? tile.k(j) : tile.v(j)) + head * cache.strides[1];
            for (int slice = lane; slice < source.slices(is_k); slice += cuda::kWarp) {
                const cuda::Slice<T> at = source.read(is_k, head, first + j, slice, vectors);
#pragma unroll
                for (int e = 0; e < 2 * cuda::kWidth<T>; ++e) {
                    const int k = e / cuda::kWidth<T>, of_vector = e % cuda::kWidth<T>;
                    if (of_vector < at.count[k]) {
                        row[at.at[k] + of_vector] = scale.quantize(cuda::widen(vectors[k].values[of_vector]));
                    }
                }
            }
            if (lane == 0) {
                *scale_of(scales, tile.slot(j), head) = scale.scale();
            }
        }
    }
}

template <typename T, typename Source>
void launch_quantize(const ExecutionContext &context, QuantizedCaches caches, const Source &source) {
    const int64_t wanted = tile_of(caches.tokens);
    caches.tile = static_cast<int>(wanted < 1 ? 1 : wanted < cuda::kTileTokens ? wanted : cuda::kTileTokens);
    const int64_t blocks = (caches.tokens + caches.tile - 1) / caches.tile;
    cuda::launch(context, quantize_heads<T, Source>, cuda::grid_x(blocks), dim3(cuda::kWarp, kQuantizeWarps), 0, caches,
                 source);
}

} // namespace infini::paged_caching
