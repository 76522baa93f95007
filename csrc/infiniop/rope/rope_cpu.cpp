// The CPU kernel of rope: one token at a time, its cosines and sines made float once and used by all heads from L1
// (where heads lie apart: by a few). Limit: memory bandwidth, each element read and written once.
#include "parallel.h"
#include "rope.h"
#include "stream.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// So many pairs have their cosines and sines on the stack at a time; a wider head is done in several tiles.
constexpr int64_t kTilePairs = 512;

// Where heads lie farther apart than tokens (a transposed view), so many are walked along all tokens before the next
// ones: up to twice as fast as token by token, which jumps between distant pages.
constexpr int64_t kGroupHeads = 2;

// A head's row is asked for so many bytes before its turn: up to 1.1 (bf16) and 2 (float32) times as fast out of DRAM.
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

    // x, y: the first element of the tile's first pair; its partner lies `half` elements behind.
    template <bool kStream, typename T> void rotate(T *y, const T *x, int64_t half, int64_t n) const {
        for_each_vector(n, [&](int64_t i, auto lanes) {
            const VecF x0 = load_at(x, i, lanes), x1 = load_at(x + half, i, lanes);
            const VecF c = load_at(cos, i, lanes), s = load_at(sin, i, lanes);
            put_at<kStream>(y, i, fma(x0, c, -(x1 * s)), lanes);
            put_at<kStream>(y + half, i, fma(x1, c, x0 * s), lanes);
        });
    }
    static int64_t first_column(int64_t pair) { return pair; }
};

// Each cosine twice and each sine as (-sin, sin): then y = x cos + swap_neighbours(x) sin, without gathering the pairs.
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
            put_at<kStream>(y, i, fma(v, load_at(cos, i, lanes), swap_neighbours(v) * load_at(sin, i, lanes)), lanes);
        });
    }
    static int64_t first_column(int64_t pair) { return 2 * pair; }
};

// Whether y is large enough to be streamed and every vector stored into it is aligned. In place nothing is gained.
template <typename T> bool can_stream(const rope::Args &a) {
    constexpr auto vector = static_cast<int64_t>(kLanes * sizeof(T)), size = static_cast<int64_t>(sizeof(T));
    bool aligned = reinterpret_cast<uintptr_t>(a.y.data) % vector == 0 && a.cos.size(-1) * size % vector == 0;
    for (int dim = 0; dim < 3; ++dim) {
        aligned = aligned && a.y.strides[dim] * size % vector == 0;
    }
    return aligned && a.y.data != a.x.data && a.y.numel() * size >= kStreamBytes;
}

template <typename Tile, typename T, typename C> void rotate_tokens(const rope::Args &a) {
    const int64_t batch = a.x.shape[0], tokens = a.x.shape[1], heads = a.x.shape[2], columns = a.x.shape[3];
    const int64_t half = a.cos.size(-1), passed = columns - 2 * half;
    const bool has_positions = a.positions.dtype != INFINI_DTYPE_INVALID;
    const int64_t group_heads = a.x.strides[2] > a.x.strides[1] ? kGroupHeads : heads;
    const bool streams = can_stream<T>(a);
    const auto bytes = batch * tokens * heads * columns * 2 * static_cast<int64_t>(sizeof(T));
    parallel_for(batch * tokens, bytes, [&](int64_t begin, int64_t end) {
        Tile tile;
        for (int64_t group = 0; group < heads; group += group_heads) {
            const int64_t group_end = heads - group < group_heads ? heads : group + group_heads;
            for (int64_t token = begin; token < end; ++token) {
                const int64_t b = token / tokens, s = token % tokens;
                const T *x = a.x.as<const T>() + b * a.x.strides[0] + s * a.x.strides[1];
                T *y = a.y.as<T>() + b * a.y.strides[0] + s * a.y.strides[1];
                const int64_t row = has_positions ? rope::position(a.positions, b, s) : s;
                const int64_t entry = has_positions ? 0 : b;
                const C *cos = a.cos.as<const C>() + entry * a.cos.strides[0] + row * a.cos.stride(-2);
                const C *sin = a.sin.as<const C>() + entry * a.sin.strides[0] + row * a.sin.stride(-2);
                for (int64_t pair = 0; pair < half; pair += kTilePairs) {
                    const int64_t n = half - pair < kTilePairs ? half - pair : kTilePairs;
                    const int64_t column = Tile::first_column(pair);
                    tile.fill(cos + pair, sin + pair, n);
                    for (int64_t head = group; head < group_end; ++head) {
                        const T *from = x + head * a.x.strides[2] + column;
                        T *to = y + head * a.y.strides[2] + column;
                        prefetch(from, 2 * n * static_cast<int64_t>(sizeof(T)));
                        if (streams) {
                            tile.template rotate<true>(to, from, half, n);
                        } else {
                            tile.template rotate<false>(to, from, half, n);
                        }
                    }
                }
                if (passed > 0 && y != x) {
                    for (int64_t head = group; head < group_end; ++head) {
                        std::memcpy(y + head * a.y.strides[2] + 2 * half, x + head * a.x.strides[2] + 2 * half,
                                    static_cast<size_t>(passed) * sizeof(T));
                    }
                }
            }
        }
        if (streams) {
            stream_fence();
        }
    });
}

template <typename T, typename C> void rotate_tokens(const rope::Args &a) {
    if (a.interleaved) {
        rotate_tokens<NeighboursTile, T, C>(a);
    } else {
        rotate_tokens<HalvesTile, T, C>(a);
    }
}

// float64, for callers who check against it: the same formulas in double.
void rotate_double(const rope::Args &a) {
    const int64_t batch = a.x.shape[0], tokens = a.x.shape[1], heads = a.x.shape[2], columns = a.x.shape[3];
    const int64_t half = a.cos.size(-1), step = a.interleaved ? 2 : 1, partner = a.interleaved ? 1 : half;
    const bool has_positions = a.positions.dtype != INFINI_DTYPE_INVALID;
    parallel_for(batch * tokens, batch * tokens * heads * columns * 16, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t b = token / tokens, s = token % tokens;
            const int64_t row = has_positions ? rope::position(a.positions, b, s) : s;
            const int64_t entry = has_positions ? 0 : b;
            const auto *cos = a.cos.as<const double>() + entry * a.cos.strides[0] + row * a.cos.stride(-2);
            const auto *sin = a.sin.as<const double>() + entry * a.sin.strides[0] + row * a.sin.stride(-2);
            for (int64_t head = 0; head < heads; ++head) {
                const auto *x =
                    a.x.as<const double>() + b * a.x.strides[0] + s * a.x.strides[1] + head * a.x.strides[2];
                auto *y = a.y.as<double>() + b * a.y.strides[0] + s * a.y.strides[1] + head * a.y.strides[2];
                for (int64_t i = 0; i < half; ++i) {
                    const double x0 = x[i * step], x1 = x[i * step + partner];
                    y[i * step] = x0 * cos[i] - x1 * sin[i];
                    y[i * step + partner] = x1 * cos[i] + x0 * sin[i];
                }
                for (int64_t i = 2 * half; i < columns; ++i) {
                    y[i] = x[i];
                }
            }
        }
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::rope::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    if (args.x.dtype == INFINI_DTYPE_F64) {
        return rotate_double(args);
    }
    with_float_type(args.x.dtype, [&](auto x) {
        using T = decltype(x);
        if (args.cos.dtype == args.x.dtype) {
            rotate_tokens<T, T>(args);
        } else {
            rotate_tokens<T, float>(args);
        }
    });
}
