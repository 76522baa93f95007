// The CPU kernel of qkv_rope_cache: row by row of qkv, with a token's angles computed once for all its heads. For int8
// caches, k is rotated in scratch memory and then quantized.
// Limit: memory bandwidth, each element read and written once. Threads split the heads, so that tokens with equal slots
// are written in order.
#include "level_types.h"
#include "qkv_rope_cache.h"

#include "indices.h"
#include "paged_caching/paged_caching.h"
#include "parallel.h"
#include "quantize_row.h"
#include "rope/rope.h"
#include "rope/rotation.h"

namespace infini::INFINI_LEVEL {
namespace {

// Handles heads begin .. end-1 of every token; a row has q's heads first, then k's, then v's. room: scratch for k's
// heads among them if the caches are int8.
template <typename Tile, typename T, typename C>
void write_heads(const qkv_rope_cache::Args &a, int64_t begin, int64_t end, T *room) {
    const int64_t heads = a.q.shape[1], size = a.q.shape[2], rotated = heads + a.k_cache.shape[1];
    const int64_t half = a.cos.shape[1], passed = size - 2 * half;
    const int64_t rotated_end = end < rotated ? end : rotated, first_k = begin < heads ? heads : begin;
    const bool quantizes = a.k_scales.dtype != INFINI_DTYPE_INVALID;
    Tile tile;
    for (int64_t t = 0; t < a.qkv.shape[0]; ++t) {
        const T *const row = a.qkv.as<const T>() + t * a.qkv.strides[0];
        const int64_t position = rope::position(a.positions, 0, t);
        const int64_t slot = Indices(a.slot_mapping)[t];
        const int64_t last = slot < 0 && heads < rotated_end ? heads : rotated_end;
        const auto to = [&](int64_t head) {
            return head < heads ? a.q.as<T>() + t * a.q.strides[0] + head * a.q.strides[1]
                   : quantizes  ? room + (head - first_k) * size
                                : a.k_cache.as<T>() + paged_caching::row_of(a.k_cache, slot, head - heads);
        };
        const C *const cos = a.cos.as<const C>() + position * a.cos.strides[0];
        const C *const sin = a.sin.as<const C>() + position * a.sin.strides[0];
        for (int64_t pair = 0; pair < half && begin < last; pair += kTilePairs) {
            const int64_t n = half - pair < kTilePairs ? half - pair : kTilePairs;
            const int64_t column = Tile::first_column(pair);
            tile.fill(cos + pair, sin + pair, n);
            for (int64_t head = begin; head < last; ++head) {
                const T *const from = row + head * size + column;
                prefetch(from, 2 * n * static_cast<int64_t>(sizeof(T)));
                tile.template rotate<false>(to(head) + column, from, half, n);
            }
        }
        for (int64_t head = begin; head < last && passed > 0; ++head) {
            std::memcpy(to(head) + 2 * half, row + head * size + 2 * half, static_cast<size_t>(passed) * sizeof(T));
        }
        const int64_t first_v = begin < rotated ? rotated : begin;
        if (quantizes && slot >= 0) {
            const auto put = [&](const TensorView &cache, const TensorView &scales, int64_t head, const T *from) {
                *paged_caching::scale_of(scales, slot, head) =
                    quantize_row(from, size, cache.as<int8_t>() + paged_caching::row_of(cache, slot, head));
            };
            for (int64_t head = first_k; head < last; ++head) {
                put(a.k_cache, a.k_scales, head - heads, to(head));
            }
            for (int64_t head = first_v; head < end; ++head) {
                put(a.v_cache, a.v_scales, head - rotated, row + head * size);
            }
            continue;
        }
        for (int64_t head = first_v; head < end && slot >= 0; ++head) {
            std::memcpy(a.v_cache.as<T>() + paged_caching::row_of(a.v_cache, slot, head - rotated), row + head * size,
                        static_cast<size_t>(size) * sizeof(T));
        }
    }
}

template <typename T, typename C> void write_all(const qkv_rope_cache::Args &a) {
    const int64_t heads = a.q.shape[1] + 2 * a.k_cache.shape[1];
    const auto bytes = 2 * a.qkv.numel() * static_cast<int64_t>(sizeof(T));
    const int64_t room = a.k_scales.dtype ? a.k_cache.shape[1] * a.q.shape[2] * static_cast<int64_t>(sizeof(T)) : 0;
    parallel_for_with_scratch(heads, bytes, room, [&](int64_t begin, int64_t end, char *scratch) {
        auto *const rotated = reinterpret_cast<T *>(scratch);
        if (a.interleaved) {
            write_heads<NeighboursTile, T, C>(a, begin, end, rotated);
        } else {
            write_heads<HalvesTile, T, C>(a, begin, end, rotated);
        }
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::qkv_rope_cache::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.qkv.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel, [&](auto x) {
        using T = decltype(x);
        if (args.cos.dtype == args.qkv.dtype) {
            write_all<T, T>(args);
        } else {
            write_all<T, float>(args);
        }
    });
}
