// The CPU kernel of gated_delta_rule. A few tokens are taken one by one: two passes over the state, the second from the
// cache. Limit: memory bandwidth, the state read and written once. Longer sequences are taken in chunks of 64 tokens:
// the corrections u of a chunk solve a triangular system, (1 + L) u = beta (v - decay k S), after which y and S are
// matrix products. Limit: the vector units, 2 * (3 Dk Dv + 64 (Dk + Dv)) operations a token and head.
#include "gated_delta_rule.h"

#include "parallel.h"
#include "sequence_states/chunk_product.h"
#include "sequence_states/converted_rows.h"
#include "sum_over.h"
#include "vec.h"

#include <cmath>

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kChunk = 64;

// From this many tokens on the chunks are used.
constexpr int64_t kDeltaChunkTokens = 16;

// Tokens between the row that is read and the one that is prefetched.
constexpr int64_t kDeltaAhead = 4;

// ---- a head of a sequence ----

struct DeltaSizes {
    int64_t dk, dv, row, wide; // row, wide: dk and dv in whole vectors

    explicit DeltaSizes(const gated_delta_rule::Args &a)
        : dk(a.q.size(-1)), dv(a.v.size(-1)), row(padded(dk)), wide(padded(dv)) {}

    // In floats: S, u, y [chunk, wide]; q, k, k transposed; two [chunk, chunk]; four [chunk].
    int64_t scratch() const {
        return dk * wide + 2 * kChunk * wide + 2 * kChunk * row + row * kChunk + 3 * kChunk * kChunk + 4 * kChunk;
    }
};

// Reads a row of q or k, multiplied by `factor` and, if asked for, normalized.
template <typename T> void read_delta_row(float *to, const void *data, int64_t n, bool l2norm, float factor) {
    const T *const from = static_cast<const T *>(data);
    if (l2norm) {
        const float squares = sum_over(n, [&](int64_t i, auto lanes, VecF s) {
            const VecF x = load_at(from, i, lanes);
            return fma(x, x, s);
        });
        factor /= std::sqrt(squares + 1e-6f);
    }
    for_each_vector(n, [&](int64_t i, auto lanes) { store_at(to, i, load_at(from, i, lanes) * splat(factor), lanes); });
}

struct DeltaHead {
    ConvertedRows q, k, v, y, g, beta;
    int64_t length;
    float scale;
    bool l2norm;
    void (*read_row)(float *, const void *, int64_t, bool, float); // of q and k

    float decay(int64_t t) const { return exp(splat(g.number(t, 0)))[0]; }
    float rate(int64_t t) const { return beta.number(t, 0); }
    void read_q(float *to, int64_t t, int64_t n) const { read_row(to, q.at(t, 0), n, l2norm, scale); }
    void read_k(float *to, int64_t t, int64_t n) const { read_row(to, k.at(t, 0), n, l2norm, 1.0f); }
};

// kVectors vectors of columns from c on, of one token; all rows are of whole vectors but the state's last one, which has
// `lanes` lanes.
template <int kVectors, typename Lanes>
void delta_step(float *state, int64_t pitch, int64_t dk, const float *q, const float *k, const float *v, float *y,
                float decay, float rate, int64_t c, Lanes lanes) {
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
        seen[j] = splat(rate) * (load(v + c + j * kLanes) - splat(decay) * seen[j]);
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
        store(y + c + j * kLanes, out[j]);
    }
}

// Token by token, on the state as it lies.
inline void delta_steps(const DeltaHead &head, const DeltaSizes &sizes, float *state, int64_t pitch, float *scratch) {
    float *const q = scratch, *const k = q + sizes.row, *const v = k + sizes.row, *const y = v + sizes.wide;
    for (int64_t t = 0; t < head.length; ++t) {
        head.read_q(q, t, sizes.dk);
        head.read_k(k, t, sizes.dk);
        head.v.read(v, t, 0, sizes.dv);
        const float decay = head.decay(t), rate = head.rate(t);
        int64_t c = 0;
        for (; c + 4 * kLanes <= sizes.dv; c += 4 * kLanes) {
            delta_step<4>(state, pitch, sizes.dk, q, k, v, y, decay, rate, c, Full{});
        }
        for (; c < sizes.dv; c += kLanes) {
            const int64_t left = sizes.dv - c;
            delta_step<1>(state, pitch, sizes.dk, q, k, v, y, decay, rate, c,
                          static_cast<int>(left < kLanes ? left : kLanes));
        }
        head.y.write(y, t, 0, sizes.dv);
    }
}

// Tokens [first, first + n) of a head, n <= kChunk; state [dk, wide].
inline void delta_chunk(const DeltaHead &head, const DeltaSizes &sizes, int64_t first, int64_t n, float *state,
                        float *scratch) {
    const int64_t dk = sizes.dk, wide = sizes.wide, row = sizes.row;
    float *const u = scratch, *const y = u + kChunk * wide, *const q = y + kChunk * wide;
    float *const k = q + kChunk * row, *const k_columns = k + kChunk * row, *const lower = k_columns + row * kChunk;
    float *const scores = lower + kChunk * kChunk, *const decays = scores + kChunk * kChunk;
    float *const since = decays + kChunk * kChunk, *const rate = since + kChunk;

    // decays[t, j]: what remains at t of what was written at j, as a product, because a difference of sums of g would
    // lose the digits that the sums have in common; since[t]: of what the chunk began with.
    for (int64_t t = 0; t < n; ++t) {
        if (t + kDeltaAhead < n) { // rows are pages apart, which the hardware does not prefetch
            const int64_t next = first + t + kDeltaAhead;
            head.q.prefetch(next, dk);
            head.k.prefetch(next, dk);
            head.v.prefetch(next, sizes.dv);
        }
        const float decay = head.decay(first + t);
        float *const at = decays + t * kChunk;
        for (int64_t j = 0; j < kChunk; ++j) {
            at[j] = t == 0 || j >= t ? 0.0f : decays[(t - 1) * kChunk + j] * decay;
        }
        at[t] = 1.0f;
        since[t] = t == 0 ? decay : since[t - 1] * decay;
        rate[t] = head.rate(first + t);
        head.read_q(q + t * row, first + t, dk);
        head.read_k(k + t * row, first + t, dk);
        head.v.read(u + t * wide, first + t, 0, sizes.dv);
    }
    transpose_chunk(k_columns, kChunk, k, row, n, dk);

    // The decay is 0 above the diagonal, and `lower` has 0 on it.
    const auto decayed = [&](float *to, const float *rates) {
        return [=](int64_t r, int64_t c, VecF sum) {
            const VecF decay = load(decays + r * kChunk + c);
            store(to + r * kChunk + c, (rates == nullptr ? decay : splat(-rates[r]) * decay) * sum);
        };
    };
    for (int64_t t = 0; t < n; t += kChunkRows) {
        const int64_t end = t + kChunkRows < n ? t + kChunkRows : n, columns = padded(end);
        chunk_product(t, end, columns, {k, row, 1}, k_columns, kChunk, dk, from_zero(), decayed(lower, rate));
        chunk_product(t, end, columns, {q, row, 1}, k_columns, kChunk, dk, from_zero(), decayed(scores, nullptr));
    }

    chunk_product(0, n, wide, {k, row, 1}, state, wide, dk, from_zero(), [&](int64_t r, int64_t c, VecF sum) {
        float *const at = u + r * wide + c;
        store(at, splat(rate[r]) * (load(at) - splat(since[r]) * sum));
    });
    for (int64_t t = 0; t < n; t += kChunkRows) {
        const int64_t end = t + kChunkRows < n ? t + kChunkRows : n;
        if (t > 0) {
            chunk_product(t, end, wide, {lower, kChunk, 1}, u, wide, t, from_scaled(u, wide, 1.0f), into(u, wide));
        }
        for (int64_t r = t + 1; r < end; ++r) {
            chunk_product(r, r + 1, wide, {lower + t, kChunk, 1}, u + t * wide, wide, r - t, from_scaled(u, wide, 1.0f),
                          into(u, wide));
        }
    }

    chunk_product(0, n, wide, {q, row, 1}, state, wide, dk, from_zero(),
                  [&](int64_t r, int64_t c, VecF sum) { store(y + r * wide + c, splat(since[r]) * sum); });
    for (int64_t t = 0; t < n; t += kChunkRows) {
        const int64_t end = t + kChunkRows < n ? t + kChunkRows : n;
        chunk_product(t, end, wide, {scores, kChunk, 1}, u, wide, end, from_scaled(y, wide, 1.0f), into(y, wide));
    }
    for (int64_t t = 0; t < n; ++t) {
        head.y.write(y + t * wide, first + t, 0, sizes.dv);
        for (int64_t i = 0; i < wide; i += kLanes) {
            float *const at = u + t * wide + i;
            store(at, load(at) * splat(decays[(n - 1) * kChunk + t]));
        }
    }

    chunk_product(0, dk, wide, {k_columns, kChunk, 1}, u, wide, n, from_scaled(state, wide, since[n - 1]),
                  into(state, wide));
}

inline void delta_head(const gated_delta_rule::Args &a, const DeltaSizes &sizes, int64_t s, int64_t h, float *scratch) {
    const auto rows = [&](const TensorView &x, int64_t of) {
        return ConvertedRows(x, a.sequences.start(x, 2, s) + of * x.stride(-2), token_stride(x, 2), 0);
    };
    const auto gate = [&](const TensorView &x) {
        return ConvertedRows(x, a.sequences.start(x, 1, s) + h * x.stride(-1), token_stride(x, 1), 0);
    };
    const int64_t of_k = h / (a.v.size(-2) / a.q.size(-2));
    const DeltaHead head{rows(a.q, of_k),
                         rows(a.k, of_k),
                         rows(a.v, h),
                         rows(a.y, h),
                         gate(a.g),
                         gate(a.beta),
                         a.sequences.length(a.q, 2, s),
                         static_cast<float>(a.scale),
                         a.l2norm,
                         a.q.dtype == INFINI_DTYPE_F32    ? read_delta_row<float>
                         : a.q.dtype == INFINI_DTYPE_BF16 ? read_delta_row<bf16>
                                                          : read_delta_row<f16>};
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
    parallel_for_with_scratch(count, bytes, sizes.scratch() * static_cast<int64_t>(sizeof(float)),
                              [&](int64_t begin, int64_t end, char *scratch) {
                                  for (int64_t i = begin; i < end; ++i) {
                                      delta_head(args, sizes, i / heads, i % heads, reinterpret_cast<float *>(scratch));
                                  }
                              });
}
