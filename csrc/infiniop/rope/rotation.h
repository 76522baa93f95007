// The rotation of a head on the CPU: a token's cosines and sines as floats, and the rotation of a row by them. Included
// only by *_cpu.cpp files, like vec.h: those of rope and of the ops that fuse it.
#pragma once

#include "streaming_stores.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// Pairs whose cosines and sines fit on the stack at a time; a wider head is processed in several tiles.
constexpr int64_t kTilePairs = 512;

// The prefetch distance in a head's row, in bytes: up to 1.1 (bf16) and 2 (float32) times as fast from DRAM.
constexpr int64_t kAheadBytes = 4096;

inline void prefetch(const void *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(static_cast<const char *>(p) + kAheadBytes + i);
    }
}

typedef uint64_t VecU64 __attribute__((vector_size(kLanes * 4)));

// (x0, x1, x2, x3, ...) -> (x1, x0, x3, x2, ...).
inline VecF swap_neighbours(VecF v) {
    const VecU64 pairs = (VecU64)v;
    return (VecF)((pairs << 32) | (pairs >> 32));
}

template <typename C> void to_float(float *to, const C *from, int64_t n) {
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes), lanes); });
}

// One token's angles for a tile of n pairs.
struct HalvesTile {
    alignas(64) float cos[kTilePairs], sin[kTilePairs];

    template <typename C> void fill(const C *c, const C *s, int64_t n) {
        to_float(cos, c, n);
        to_float(sin, s, n);
    }

    // x, y: the first element of the tile's first pair; its partner lies `half` elements later.
    template <bool kStream, typename T> void rotate(T *y, const T *x, int64_t half, int64_t n) const {
        for_each_vector(n, [&](int64_t i, auto lanes) {
            const VecF x0 = load_at(x, i, lanes), x1 = load_at(x + half, i, lanes);
            const VecF c = load_at(cos, i, lanes), s = load_at(sin, i, lanes);
            store_or_stream_at<kStream>(y, i, fma(x0, c, -(x1 * s)), lanes);
            store_or_stream_at<kStream>(y + half, i, fma(x1, c, x0 * s), lanes);
        });
    }
    static int64_t first_column(int64_t pair) { return pair; }
};

// Holds each cosine twice and each sine as (-sin, sin): then y = x cos + swap_neighbours(x) sin, without gathering
// pairs.
struct NeighboursTile {
    alignas(64) float cos[2 * kTilePairs], sin[2 * kTilePairs];

    template <typename C> void fill(const C *c, const C *s, int64_t n) {
        alignas(64) float once[kTilePairs];
        to_float(once, c, n);
        for (int64_t i = 0; i < n; ++i) {
            cos[2 * i] = cos[2 * i + 1] = once[i];
        }
        to_float(once, s, n);
        for (int64_t i = 0; i < n; ++i) {
            sin[2 * i] = -once[i];
            sin[2 * i + 1] = once[i];
        }
    }

    template <bool kStream, typename T> void rotate(T *y, const T *x, int64_t, int64_t n) const {
        for_each_vector(2 * n, [&](int64_t i, auto lanes) {
            const VecF v = load_at(x, i, lanes);
            store_or_stream_at<kStream>(
                y, i, fma(v, load_at(cos, i, lanes), swap_neighbours(v) * load_at(sin, i, lanes)), lanes);
        });
    }
    static int64_t first_column(int64_t pair) { return 2 * pair; }
};

} // namespace
} // namespace infini::INFINI_LEVEL
