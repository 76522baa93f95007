// The CPU kernel of gated_delta_rule. A few tokens are taken one by one: two passes over the state, the second from the
// cache. Limit: memory bandwidth, the state read and written once. Longer sequences are taken in chunks of 64 tokens:
// the corrections u of a chunk solve a triangular system, (1 + L) u = beta (v - decay k S), after which y and S are
// matrix products. Limit: the vector units, 2 * (3 Dk Dv + 64 (Dk + Dv)) operations a token and head.
#include "gated_delta_rule.h"

#include "chunk_product.h"
#include "parallel.h"
#include "sum_over.h"
#include "vec.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kChunk = 64;

// From this many tokens on the chunks are used.
constexpr int64_t kDeltaChunkTokens = 16;

// ---- a head of a sequence ----

struct DeltaSizes {
    int64_t dk, dv, wide; // wide: dv in whole vectors

    explicit DeltaSizes(const gated_delta_rule::Args &a) : dk(a.q.size(-1)), dv(a.v.size(-1)), wide(padded(dv)) {}

    // In floats: S, u, y [chunk, wide]; q, k, k transposed; two [chunk, chunk]; four [chunk].
    int64_t scratch() const {
        return dk * wide + 2 * kChunk * wide + 2 * kChunk * padded(dk) + padded(dk) * kChunk + 3 * kChunk * kChunk +
               4 * kChunk;
    }
};

template <typename T> struct DeltaHead {
    const T *q, *k, *v;
    T *y;
    int64_t q_step, k_step, v_step, y_step;
    const void *g, *beta;
    int64_t g_step, beta_step;
    bool g_wide, beta_wide; // float, not T
    int64_t length;
    float scale;
    bool l2norm;

    float decay(int64_t t) const { return exp(splat(gate(g, g_wide, t * g_step)))[0]; }
    float rate(int64_t t) const { return gate(beta, beta_wide, t * beta_step); }

private:
    static float gate(const void *from, bool wide, int64_t at) {
        return wide ? static_cast<const float *>(from)[at] : widen(static_cast<const T *>(from)[at]);
    }
};

// Tokens between the row that is read and the one that is prefetched.
constexpr int64_t kDeltaAhead = 4;

template <typename T> void prefetch_delta_row(const T *row, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(row + i);
    }
}

// Reads a row of q or k as floats, multiplied by `factor` and, if asked for, normalized.
template <typename T> void read_delta_row(float *to, const T *from, int64_t n, bool l2norm, float factor) {
    if (l2norm) {
        const float squares = sum_over(n, [&](int64_t i, auto lanes, VecF s) {
            const VecF x = load_at(from, i, lanes);
            return fma(x, x, s);
        });
        factor /= std::sqrt(squares + 1e-6f);
    }
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes) * splat(factor), lanes); });
}

// kVectors vectors of columns from c on, the last one of `lanes` lanes, of one token.
template <int kVectors, typename T, typename Lanes>
void delta_step(float *state, int64_t pitch, int64_t dk, const float *q, const float *k, const T *v, T *y, float decay,
                float rate, int64_t c, Lanes lanes) {
    state += c;
    VecF seen[kVectors] = {}, out[kVectors] = {};
    for (int64_t i = 0; i < dk; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            seen[j] = fma(splat(k[i]), load_at(state + i * pitch, j * kLanes, lanes), seen[j]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
        seen[j] = splat(rate) * (load_at(v + c, j * kLanes, lanes) - splat(decay) * seen[j]);
    }
    for (int64_t i = 0; i < dk; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            const VecF s = fma(splat(k[i]), seen[j], splat(decay) * load_at(state + i * pitch, j * kLanes, lanes));
            store_at(state + i * pitch, j * kLanes, s, lanes);
            out[j] = fma(splat(q[i]), s, out[j]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
        store_at(y + c, j * kLanes, out[j], lanes);
    }
}

// Token by token, on the state as it lies.
template <typename T>
void delta_steps(const DeltaHead<T> &head, const DeltaSizes &sizes, float *state, int64_t pitch, float *scratch) {
    float *const q = scratch, *const k = q + padded(sizes.dk);
    for (int64_t t = 0; t < head.length; ++t) {
        read_delta_row(q, head.q + t * head.q_step, sizes.dk, head.l2norm, head.scale);
        read_delta_row(k, head.k + t * head.k_step, sizes.dk, head.l2norm, 1.0f);
        const T *const v = head.v + t * head.v_step;
        T *const y = head.y + t * head.y_step;
        const float decay = head.decay(t), rate = head.rate(t);
        int64_t c = 0;
        for (; c + 4 * kLanes <= sizes.dv; c += 4 * kLanes) {
            delta_step<4>(state, pitch, sizes.dk, q, k, v, y, decay, rate, c, Full{});
        }
        for (; c + kLanes <= sizes.dv; c += kLanes) {
            delta_step<1>(state, pitch, sizes.dk, q, k, v, y, decay, rate, c, Full{});
        }
        if (c < sizes.dv) {
            delta_step<1>(state, pitch, sizes.dk, q, k, v, y, decay, rate, c, static_cast<int>(sizes.dv - c));
        }
    }
}

// Tokens [first, first + n) of a head, n <= kChunk; state [dk, wide].
template <typename T>
void delta_chunk(const DeltaHead<T> &head, const DeltaSizes &sizes, int64_t first, int64_t n, float *state,
                 float *scratch) {
    const int64_t dk = sizes.dk, wide = sizes.wide, row = padded(dk);
    float *const u = scratch, *const y = u + kChunk * wide, *const q = y + kChunk * wide;
    float *const k = q + kChunk * row, *const k_columns = k + kChunk * row, *const lower = k_columns + row * kChunk;
    float *const scores = lower + kChunk * kChunk, *const decays = scores + kChunk * kChunk;
    float *const since = decays + kChunk * kChunk, *const rate = since + kChunk;

    // decays[t, j]: what remains at t of what was written at j, as a product, because a difference of sums of g would
    // lose the digits that the sums have in common; since[t]: of what the chunk began with.
    for (int64_t t = 0; t < n; ++t) {
        if (t + kDeltaAhead < n) { // rows are pages apart, which the hardware does not prefetch
            const int64_t next = first + t + kDeltaAhead;
            prefetch_delta_row(head.q + next * head.q_step, dk);
            prefetch_delta_row(head.k + next * head.k_step, dk);
            prefetch_delta_row(head.v + next * head.v_step, sizes.dv);
        }
        const float decay = head.decay(first + t);
        float *const at = decays + t * kChunk;
        for (int64_t j = 0; j < kChunk; ++j) {
            at[j] = t == 0 || j >= t ? 0.0f : decays[(t - 1) * kChunk + j] * decay;
        }
        at[t] = 1.0f;
        since[t] = t == 0 ? decay : since[t - 1] * decay;
        rate[t] = head.rate(first + t);
        read_delta_row(q + t * row, head.q + (first + t) * head.q_step, dk, head.l2norm, head.scale);
        read_delta_row(k + t * row, head.k + (first + t) * head.k_step, dk, head.l2norm, 1.0f);
        const T *const v = head.v + (first + t) * head.v_step;
        for (int64_t c = sizes.dv / kLanes * kLanes; c < wide; c += kLanes) {
            store(u + t * wide + c, splat(0.0f));
        }
        for_each_vector(sizes.dv,
                        [&](int64_t i, auto lanes) { store_at(u + t * wide, i, load_at(v, i, lanes), lanes); });
    }
    for (int64_t i = 0; i < dk; i += 8) { // eight rows of the transposed matrix at a time, for the cache
        const int64_t end = i + 8 < dk ? i + 8 : dk;
        for (int64_t t = 0; t < kChunk; ++t) {
            for (int64_t j = i; j < end; ++j) {
                k_columns[j * kChunk + t] = t < n ? k[t * row + j] : 0.0f;
            }
        }
    }

    const auto zero = [](int64_t, int64_t) { return splat(0.0f); };
    // The decay is 0 above the diagonal, and `lower` has 0 on it.
    for (int64_t t = 0; t < n; t += kChunkRows) {
        const int64_t end = t + kChunkRows < n ? t + kChunkRows : n, columns = padded(end);
        chunk_product(t, end, columns, {k, row, 1}, k_columns, kChunk, dk, zero, [&](int64_t r, int64_t c, VecF sum) {
            store(lower + r * kChunk + c, splat(-rate[r]) * load(decays + r * kChunk + c) * sum);
        });
        chunk_product(t, end, columns, {q, row, 1}, k_columns, kChunk, dk, zero, [&](int64_t r, int64_t c, VecF sum) {
            store(scores + r * kChunk + c, load(decays + r * kChunk + c) * sum);
        });
    }

    chunk_product(0, n, wide, {k, row, 1}, state, wide, dk, zero, [&](int64_t r, int64_t c, VecF sum) {
        float *const at = u + r * wide + c;
        store(at, splat(rate[r]) * (load(at) - splat(since[r]) * sum));
    });
    const auto own = [&](int64_t r, int64_t c) { return load(u + r * wide + c); };
    const auto write = [&](int64_t r, int64_t c, VecF sum) { store(u + r * wide + c, sum); };
    for (int64_t t = 0; t < n; t += kChunkRows) {
        const int64_t end = t + kChunkRows < n ? t + kChunkRows : n;
        if (t > 0) {
            chunk_product(t, end, wide, {lower, kChunk, 1}, u, wide, t, own, write);
        }
        for (int64_t r = t + 1; r < end; ++r) {
            chunk_product(r, r + 1, wide, {lower + t, kChunk, 1}, u + t * wide, wide, r - t, own, write);
        }
    }

    chunk_product(0, n, wide, {q, row, 1}, state, wide, dk, zero,
                  [&](int64_t r, int64_t c, VecF sum) { store(y + r * wide + c, splat(since[r]) * sum); });
    for (int64_t t = 0; t < n; t += kChunkRows) {
        const int64_t end = t + kChunkRows < n ? t + kChunkRows : n;
        chunk_product(
            t, end, wide, {scores, kChunk, 1}, u, wide, end,
            [&](int64_t r, int64_t c) { return load(y + r * wide + c); },
            [&](int64_t r, int64_t c, VecF sum) { store(y + r * wide + c, sum); });
    }
    for (int64_t t = 0; t < n; ++t) {
        T *const out = head.y + (first + t) * head.y_step;
        for_each_vector(sizes.dv, [&](int64_t i, auto lanes) {
            store_at(out, i, load_at(y + t * wide, i, lanes), lanes);
            store_at(u + t * wide, i, load_at(u + t * wide, i, lanes) * splat(decays[(n - 1) * kChunk + t]), lanes);
        });
    }

    const float left = since[n - 1];
    chunk_product(
        0, dk, wide, {k_columns, kChunk, 1}, u, wide, n,
        [&](int64_t r, int64_t c) { return splat(left) * load(state + r * wide + c); },
        [&](int64_t r, int64_t c, VecF sum) { store(state + r * wide + c, sum); });
}

template <typename T>
void delta_head(const gated_delta_rule::Args &a, const DeltaSizes &sizes, int64_t s, int64_t h, float *scratch) {
    const auto at = [&](const TensorView &x, int64_t from, int dim) {
        return a.sequences.start(x, 2, s) + from * x.stride(dim);
    };
    const auto gate_at = [&](const TensorView &x) { return a.sequences.start(x, 1, s) + h * x.stride(-1); };
    const auto bytes_of = [](const TensorView &x, int64_t from) {
        return static_cast<const void *>(x.as<const char>() + from * static_cast<int64_t>(size_of(x.dtype)));
    };
    const int64_t of_k = h / (a.v.size(-2) / a.q.size(-2));
    const DeltaHead<T> head{a.q.as<const T>() + at(a.q, of_k, -2),
                            a.k.as<const T>() + at(a.k, of_k, -2),
                            a.v.as<const T>() + at(a.v, h, -2),
                            a.y.as<T>() + at(a.y, h, -2),
                            token_stride(a.q, 2),
                            token_stride(a.k, 2),
                            token_stride(a.v, 2),
                            token_stride(a.y, 2),
                            bytes_of(a.g, gate_at(a.g)),
                            bytes_of(a.beta, gate_at(a.beta)),
                            token_stride(a.g, 1),
                            token_stride(a.beta, 1),
                            a.g.dtype == INFINI_DTYPE_F32,
                            a.beta.dtype == INFINI_DTYPE_F32,
                            a.sequences.length(a.q, 2, s),
                            static_cast<float>(a.scale),
                            a.l2norm};
    if (head.length == 0) {
        return; // the state stays
    }
    const int64_t slot = a.state.dtype ? a.sequences.slot(s) : -1;
    float *const kept = slot < 0 ? nullptr : a.state.as<float>() + slot * a.state.strides[0] + h * a.state.strides[1];
    const int64_t pitch = a.state.strides[2], wide = sizes.wide;
    float *const state = scratch, *const rest = scratch + sizes.dk * wide;
    const bool in_chunks = head.length >= kDeltaChunkTokens;
    if (kept != nullptr && !in_chunks) {
        return delta_steps(head, sizes, kept, pitch, rest);
    }
    for (int64_t i = 0; i < sizes.dk; ++i) {
        for (int64_t c = 0; c < wide; c += kLanes) {
            store(state + i * wide + c, splat(0.0f));
        }
        if (kept != nullptr) {
            for_each_vector(sizes.dv, [&](int64_t c, auto lanes) {
                store_at(state + i * wide, c, load_at(kept + i * pitch, c, lanes), lanes);
            });
        }
    }
    if (!in_chunks) {
        return delta_steps(head, sizes, state, wide, rest);
    }
    for (int64_t t = 0; t < head.length; t += kChunk) {
        const int64_t left = head.length - t;
        delta_chunk(head, sizes, t, left < kChunk ? left : kChunk, state, rest);
    }
    for (int64_t i = 0; kept != nullptr && i < sizes.dk; ++i) {
        for_each_vector(sizes.dv, [&](int64_t c, auto lanes) {
            store_at(kept + i * pitch, c, load_at(state + i * wide, c, lanes), lanes);
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::gated_delta_rule::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    const DeltaSizes sizes(args);
    const int64_t heads = args.v.size(-2), count = args.sequences.count(args.q, 2) * heads;
    // The traffic of the state, which the first cache has in chunks.
    const int64_t bytes = args.v.numel() / sizes.dv * sizes.dk * sizes.dv * 8;
    with_float_type(args.q.dtype, [&](auto x) {
        using T = decltype(x);
        parallel_for_with_scratch(count, bytes, sizes.scratch() * static_cast<int64_t>(sizeof(float)),
                                  [&](int64_t begin, int64_t end, char *scratch) {
                                      for (int64_t i = begin; i < end; ++i) {
                                          delta_head<T>(args, sizes, i / heads, i % heads,
                                                        reinterpret_cast<float *>(scratch));
                                      }
                                  });
    });
}
