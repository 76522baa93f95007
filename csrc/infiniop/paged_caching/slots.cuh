// Which tokens of a block's tile are written to a paged cache on CUDA, and where. A token is skipped if its slot is
// outside the cache, or if a later token has the same slot: the last token wins, as on the CPU, in any order of the
// blocks. For the .cu files of paged_caching and of the ops that fuse it.
#pragma once

#include "cuda/heads.cuh"
#include "indices.h"
#include "paged_caching.h"

namespace infini::paged_caching {

// The number of tokens per tile. Every tile scans all later slots; with this size (up to cuda::kTileTokens) that reads
// less than a tenth of the tokens' own bytes.
inline int64_t tile_of(int64_t tokens) {
    return tokens / 512;
}

// Lives in shared memory.
class Tile {
public:
    // The first slots that a thread of find() needs: of a token of the tile, and of one after the tile's first. Loaded
    // by a call of its own, so that the loads are under way while the thread waits for others.
    struct Loaded {
        int64_t own, later;
    };
    static __device__ __forceinline__ Loaded load(const TensorView &slots, int64_t first, int64_t end, int64_t tokens) {
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
        return {first + thread < end ? Indices(slots)[first + thread] : -1,
                first + 1 + thread < tokens ? Indices(slots)[first + 1 + thread] : -1};
    }

    // Examines tokens [first, end), at most kTileTokens. All threads of the block must call it.
    __device__ __forceinline__ void find(const TensorView &slots, const TensorView &k_cache, const TensorView &v_cache,
                                         int64_t first, int64_t end, int64_t tokens, const Loaded &loaded) {
        const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
        const auto slot_of = [&](int64_t token) { return token < tokens ? Indices(slots)[token] : -1; };
        int64_t later = first + 1 + thread, next = loaded.later;
        for (int i = thread; i < kFilterBits / 32; i += threads) {
            filter_[i] = 0;
        }
        __syncthreads();
        const int count = static_cast<int>(end - first);
        for (int j = thread; j < count; j += threads) {
            const int64_t slot = j == thread ? loaded.own : slot_of(first + j), block_size = k_cache.shape[2];
            const bool inside = slot >= 0 && slot < k_cache.shape[0] * block_size;
            slots_[j] = inside ? slot : -1;
            skipped_[j] = !inside;
            if (inside) {
                k_[j] = row_of(k_cache, slot, 0);
                v_[j] = row_of(v_cache, slot, 0);
                atomicOr(&filter_[bit(slot) / 32], 1u << bit(slot) % 32);
            }
        }
        __syncthreads();
        if (first + 1 >= tokens) {
            return; // no later token, as when one sequence is decoded
        }
        for (; later < tokens; later += threads) {
            const int64_t slot = next;
            next = slot_of(later + threads);
            if ((filter_[bit(slot) / 32] >> bit(slot) % 32 & 1) == 0) {
                continue; // the usual case
            }
            for (int j = 0; j < count; ++j) {
                if (slots_[j] == slot && first + j < later) {
                    skipped_[j] = 1;
                }
            }
        }
        __syncthreads();
    }

    // Whether token j of the tile is written; its slot, and where the row of its first head starts.
    __device__ __forceinline__ bool writes(int j) const { return skipped_[j] == 0; }
    __device__ __forceinline__ int64_t slot(int j) const { return slots_[j]; }
    __device__ __forceinline__ int64_t k(int j) const { return k_[j]; }
    __device__ __forceinline__ int64_t v(int j) const { return v_[j]; }

private:
    static constexpr int kFilterBits = 1024;

    // One bit, chosen by a hash of the slot, so that most other slots have another bit.
    static __device__ __forceinline__ unsigned bit(int64_t slot) {
        return static_cast<unsigned>(slot) * 2654435761u >> 22;
    }

    int64_t slots_[cuda::kTileTokens]; // -1: outside the cache
    int64_t k_[cuda::kTileTokens], v_[cuda::kTileTokens];
    int skipped_[cuda::kTileTokens];
    unsigned filter_[kFilterBits / 32];
};

} // namespace infini::paged_caching
