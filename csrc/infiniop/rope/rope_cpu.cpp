// The CPU kernel of rope: one token at a time. Its cosines and sines are converted to float once for all heads, or once
// per group of heads if heads are far apart. Limit: memory bandwidth, each element read and written once.
#include "level_types.h"
#include "parallel.h"
#include "rope.h"
#include "rotation.h"

namespace infini::INFINI_LEVEL {
namespace {

// If heads are farther apart than tokens (a transposed view), this many heads are processed for all tokens before the
// next ones: up to twice as fast as token by token, which jumps between distant pages.
constexpr int64_t kGroupHeads = 2;

// Whether y is large enough to be streamed and all its vectors are aligned. In place, streaming gains nothing.
template <typename T> bool can_stream(const rope::Args &a) {
    constexpr auto vector = static_cast<int64_t>(kLanes * sizeof(T)), size = static_cast<int64_t>(sizeof(T));
    bool aligned = reinterpret_cast<uintptr_t>(a.y.data) % vector == 0 && a.cos.size(-1) * size % vector == 0;
    for (int dim = 0; dim < 3; ++dim) {
        aligned = aligned && a.y.strides[dim] * size % vector == 0;
    }
    return aligned && a.y.data != a.x.data && worth_streaming(a.y.data, a.y.numel() * size);
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

// float64, for use as a reference: the same formulas in double.
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
    if (!kOnlyBf16 && args.x.dtype == INFINI_DTYPE_F64) {
        return rotate_double(args);
    }
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel, [&](auto x) {
        using T = decltype(x);
        if (args.cos.dtype == args.x.dtype) {
            rotate_tokens<T, T>(args);
        } else {
            rotate_tokens<T, float>(args);
        }
    });
}
