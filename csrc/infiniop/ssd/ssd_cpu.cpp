// The CPU kernel of ssd. A few tokens are taken one by one: a pass over the state as it lies. Limit: memory bandwidth,
// the state read and written once. Longer sequences are taken in chunks of 64 tokens, in which y and S are matrix products
// (Dao and Gu, arXiv:2405.21060, section 6). The scores c b^T of a chunk are computed once for several heads, whose
// states stay in the second cache. Limit: the vector units, 2 P (2 N + 32) operations a token and head.
#include "ssd.h"

#include "parallel.h"
#include "sequence_states/chunk_product.h"
#include "sequence_states/converted_rows.h"
#include "sequence_states/time_step.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

constexpr int64_t kSsdChunk = 64;

// From this many tokens on the chunks are used.
constexpr int64_t kSsdChunkTokens = 16;

// Heads that share the scores of a chunk: no more than have their states in this memory.
constexpr int64_t kSsdHeads = 8, kSsdStateBytes = 384 * 1024;

struct SsdSizes {
    int64_t p, n, wide, row;                 // wide, row: p and n in whole vectors
    int64_t heads_of_group, together, parts; // together: heads of a task; parts: tasks of a group
    bool chunks;

    // bytes: of the states' traffic.
    SsdSizes(const ssd::Args &a, int64_t bytes) : p(a.x.size(-1)), n(a.b.size(-1)), wide(padded(p)), row(padded(n)) {
        const int64_t count = a.sequences.count(a.x, 2), groups = a.b.size(-2);
        heads_of_group = a.x.size(-2) / groups;
        const int64_t state_bytes = (n > 0 ? n : 1) * wide * static_cast<int64_t>(sizeof(float));
        together = kSsdStateBytes / state_bytes;
        together = together < 1 ? 1 : together > kSsdHeads ? kSsdHeads : together;
        together = together < heads_of_group ? together : heads_of_group;
        // Each head's numbers are the same in any company: tasks are made smaller if there are more threads.
        const int64_t threads = parallel_threads(count * a.x.size(-2), bytes);
        while (together > 1 && count * groups * tasks_of_group() < threads) {
            together = (together + 1) / 2;
        }
        parts = tasks_of_group();
        chunks = false;
        for (int64_t s = 0; s < count; ++s) {
            chunks = chunks || a.sequences.length(a.x, 2, s) >= kSsdChunkTokens;
        }
    }

    int64_t tasks_of_group() const { return (heads_of_group + together - 1) / together; }

    // In floats, enough for both. Steps: one state; b, c, x, y of all tokens. Chunks: states; b, c, b transposed; scores
    // and their products with the decays; x, y; four [chunk].
    int64_t scratch() const {
        const int64_t steps = n * wide + 2 * kSsdChunkTokens * (row + together * wide);
        const int64_t in_chunks = together * n * wide + 3 * kSsdChunk * row + 2 * kSsdChunk * kSsdChunk +
                                  2 * kSsdChunk * wide + 4 * kSsdChunk;
        return chunks && in_chunks > steps ? in_chunks : steps;
    }
};

// Several heads of one group in one sequence.
struct SsdHeads {
    ConvertedRows x, b, c, y, dt, d, bias; // of the first head
    const float *a;
    int64_t a_head;
    TimeStep time_step;
    int64_t heads, length;

    // The time steps of tokens [t, t + count) of a head, count <= kSsdChunk, and their decays; 0 and 1 up to a whole
    // vector.
    void times(int64_t h, int64_t t, int64_t count, float *dts, float *decays) const {
        const VecF offset = splat(bias.number(0, h)), rate = splat(a[h * a_head]);
        for (int64_t i = 0; i < count; i += kLanes) {
            VecF v = {};
            for (int64_t j = 0; j < kLanes && i + j < count; ++j) {
                v[j] = dt.number(t + i + j, h);
            }
            v = time_step.of(v, offset);
            store(dts + i, v);
            store(decays + i, exp(v * rate));
        }
    }
};

// S = decay S + (step x) b^T of kRows rows of S; returns the vectors whose sums are S c.
template <int kRows>
inline __attribute__((always_inline)) void ssd_step_rows(float *state, int64_t pitch, int64_t n, const float *x,
                                                         const float *b, const float *c, float step, float decay,
                                                         VecF *seen) {
    VecF add[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        add[r] = splat(step * x[r]);
        seen[r] = splat(0.0f);
    }
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecF right = load_at(b, i, lanes), query = load_at(c, i, lanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const VecF s = fma(add[r], right, splat(decay) * load_at(state + r * pitch, i, lanes));
            store_at(state + r * pitch, i, s, lanes);
            seen[r] = fma(query, s, seen[r]);
        }
    });
}

// One token of one head; state [P, N] as it lies.
inline __attribute__((noinline)) void ssd_step(float *state, int64_t pitch, int64_t p, int64_t n, const float *x,
                                               float *y, const float *b, const float *c, float step, float decay,
                                               float skip) {
    int64_t r = 0;
    for (; r + kLanes <= p; r += kLanes) {
        VecF seen[kLanes];
        for (int i = 0; i < kLanes; i += 4) {
            ssd_step_rows<4>(state + (r + i) * pitch, pitch, n, x + r + i, b, c, step, decay, seen + i);
        }
        store(y + r, fma(splat(skip), load(x + r), sums([&](int i) { return seen[i]; })));
    }
    for (; r < p; ++r) {
        VecF seen;
        ssd_step_rows<1>(state + r * pitch, pitch, n, x + r, b, c, step, decay, &seen);
        store(y + r, fma(splat(skip), splat(x[r]), splat(sum(seen))), 1);
    }
}

// Tokens [first, first + count) of several heads, count <= kSsdChunk; the heads' states [N, wide] one after the other,
// `empty` if they are zeros.
inline void ssd_chunk(const SsdHeads &heads, const SsdSizes &sizes, int64_t first, int64_t count, float *states,
                      float *scratch, bool empty) {
    const int64_t n = sizes.n, wide = sizes.wide, row = sizes.row;
    float *const b = scratch, *const c = b + kSsdChunk * row, *const b_columns = c + kSsdChunk * row;
    float *const scores = b_columns + row * kSsdChunk, *const weights = scores + kSsdChunk * kSsdChunk;
    float *const x = weights + kSsdChunk * kSsdChunk, *const y = x + kSsdChunk * wide;
    float *const dts = y + kSsdChunk * wide, *const decays = dts + kSsdChunk, *const since = decays + kSsdChunk;
    float *const left = since + kSsdChunk;
    for (int64_t t = 0; t < count; ++t) {
        heads.b.read(b + t * row, first + t, 0, n);
        heads.c.read(c + t * row, first + t, 0, n);
    }
    transpose_chunk(b_columns, kSsdChunk, b, row, count, n);
    for (int64_t t = 0; t < count; t += kChunkRows) {
        const int64_t end = t + kChunkRows < count ? t + kChunkRows : count;
        chunk_product(t, end, padded(end), {c, row, 1}, b_columns, kSsdChunk, n, from_zero(), into(scores, kSsdChunk));
    }

    for (int64_t h = 0; h < heads.heads; ++h) {
        float *const state = states + h * n * wide;
        heads.times(h, first, count, dts, decays);
        const VecF skip = splat(heads.d.number(0, h));
        // left[j]: dt[j] times what remains at t of what was written at j, as a product, because a difference of sums
        // would lose the digits that the sums have in common; since[t]: what remains of what the chunk began with.
        for (int64_t j = 0; j < kSsdChunk; j += kLanes) {
            store(left + j, splat(0.0f));
        }
        for (int64_t t = 0; t < count; ++t) {
            const VecF decay = splat(decays[t]);
            for (int64_t j = 0; j < t; j += kLanes) {
                store(left + j, load(left + j) * decay);
            }
            left[t] = dts[t];
            since[t] = t == 0 ? decays[t] : since[t - 1] * decays[t];
            for (int64_t j = 0; j < padded(t / kChunkRows * kChunkRows + kChunkRows); j += kLanes) {
                const VecF all = load(scores + t * kSsdChunk + j) * load(left + j);
                // Later tokens are left out, whatever they are.
                const VecF own = j + kLanes <= t + 1 ? all
                                 : j > t             ? splat(0.0f)
                                                     : first_lanes(all, static_cast<int>(t + 1 - j), 0.0f);
                store(weights + t * kSsdChunk + j, own);
            }
            heads.x.read(x + t * wide, first + t, h, sizes.p);
        }
        if (empty) {
            for (int64_t i = 0; i < count * wide; i += kLanes) {
                store(y + i, skip * load(x + i));
            }
        } else {
            chunk_product(0, count, wide, {c, row, 1}, state, wide, n, from_zero(),
                          [&](int64_t r, int64_t i, VecF sum) {
                              store(y + r * wide + i, fma(splat(since[r]), sum, skip * load(x + r * wide + i)));
                          });
        }
        for (int64_t t = 0; t < count; t += kChunkRows) {
            const int64_t end = t + kChunkRows < count ? t + kChunkRows : count;
            chunk_product(t, end, wide, {weights, kSsdChunk, 1}, x, wide, end, from_scaled(y, wide, 1.0f),
                          into(y, wide));
        }
        for (int64_t t = 0; t < count; ++t) {
            heads.y.write(y + t * wide, first + t, h, sizes.p);
            for (int64_t i = 0; i < wide; i += kLanes) {
                store(x + t * wide + i, load(x + t * wide + i) * splat(left[t]));
            }
        }
        if (empty) {
            chunk_product(0, n, wide, {b, 1, row}, x, wide, count, from_zero(), into(state, wide));
        } else {
            chunk_product(0, n, wide, {b, 1, row}, x, wide, count, from_scaled(state, wide, since[count - 1]),
                          into(state, wide));
        }
    }
}

// Copies [rows, columns] transposed, in blocks of 16 by 16 for the cache.
inline void transpose_ssd_state(float *to, int64_t to_pitch, const float *from, int64_t from_pitch, int64_t rows,
                                int64_t columns) {
    for (int64_t r = 0; r < rows; r += 16) {
        for (int64_t c = 0; c < columns; c += 16) {
            for (int64_t i = r; i < rows && i < r + 16; ++i) {
                for (int64_t j = c; j < columns && j < c + 16; ++j) {
                    to[j * to_pitch + i] = from[i * from_pitch + j];
                }
            }
        }
    }
}

// The heads [h, h + count) of a sequence, of one group.
inline void ssd_heads(const ssd::Args &a, const SsdSizes &sizes, int64_t s, int64_t h, int64_t count, float *scratch) {
    const auto rows = [&](const TensorView &x, int64_t from) {
        return ConvertedRows(x, a.sequences.start(x, 2, s) + from * x.stride(-2), token_stride(x, 2), x.stride(-2));
    };
    const auto of_heads = [&](const TensorView &x) { return ConvertedRows(x, h * x.strides[0], 0, x.strides[0]); };
    const int64_t group = h / sizes.heads_of_group;
    const SsdHeads heads{rows(a.x, h),
                         rows(a.b, group),
                         rows(a.c, group),
                         rows(a.y, h),
                         ConvertedRows(a.dt, a.sequences.start(a.dt, 1, s) + h * a.dt.stride(-1), token_stride(a.dt, 1),
                                       a.dt.stride(-1)),
                         of_heads(a.d),
                         of_heads(a.dt_bias),
                         a.a.as<const float>() + h * a.a.strides[0],
                         a.a.strides[0],
                         {a.dt_softplus, static_cast<float>(a.dt_min), static_cast<float>(a.dt_max)},
                         count,
                         a.sequences.length(a.x, 2, s)};
    if (heads.length == 0) {
        return; // the state stays
    }
    const int64_t slot = a.state.dtype ? a.sequences.slot(s) : -1;
    const int64_t pitch = a.state.strides[2], wide = sizes.wide, n = sizes.n;
    const auto kept = [&](int64_t i) {
        return slot < 0 ? nullptr : a.state.as<float>() + slot * a.state.strides[0] + (h + i) * a.state.strides[1];
    };
    if (heads.length < kSsdChunkTokens) {
        // Rows are converted before and after, so that nothing interrupts the stream of the states.
        const int64_t length = heads.length;
        float *const b = scratch + n * wide, *const c = b + length * sizes.row, *const x = c + length * sizes.row;
        float *const y = x + count * length * wide;
        float dts[kSsdHeads][kSsdChunkTokens], decays[kSsdHeads][kSsdChunkTokens], skips[kSsdHeads];
        static_assert(kSsdChunkTokens % kLanes == 0);
        for (int64_t t = 0; t < length; ++t) {
            heads.b.read(b + t * sizes.row, t, 0, n);
            heads.c.read(c + t * sizes.row, t, 0, n);
        }
        for (int64_t i = 0; i < count; ++i) {
            heads.times(i, 0, length, dts[i], decays[i]);
            skips[i] = heads.d.number(0, i);
            for (int64_t t = 0; t < length; ++t) {
                heads.x.read(x + (i * length + t) * wide, t, i, sizes.p);
            }
        }
        for (int64_t i = 0; i < count; ++i) {
            float *state = kept(i);
            const int64_t state_pitch = state == nullptr ? n : pitch;
            if (state == nullptr) {
                state = scratch;
                for (int64_t j = 0; j < sizes.p * n; ++j) {
                    state[j] = 0.0f;
                }
            }
            for (int64_t t = 0; t < length; ++t) {
                const int64_t at = (i * length + t) * wide;
                ssd_step(state, state_pitch, sizes.p, n, x + at, y + at, b + t * sizes.row, c + t * sizes.row,
                         dts[i][t], decays[i][t], skips[i]);
            }
        }
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t t = 0; t < length; ++t) {
                heads.y.write(y + (i * length + t) * wide, t, i, sizes.p);
            }
        }
        return;
    }
    float *const states = scratch, *const rest = scratch + sizes.together * n * wide;
    if (slot >= 0) {
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t j = 0; wide > sizes.p && j < n; ++j) {
                for (int64_t k = sizes.p; k < wide; ++k) {
                    states[(i * n + j) * wide + k] = 0.0f;
                }
            }
            transpose_ssd_state(states + i * n * wide, wide, kept(i), pitch, sizes.p, n);
        }
    }
    for (int64_t t = 0; t < heads.length; t += kSsdChunk) {
        const int64_t left = heads.length - t;
        ssd_chunk(heads, sizes, t, left < kSsdChunk ? left : kSsdChunk, states, rest, t == 0 && slot < 0);
    }
    for (int64_t i = 0; slot >= 0 && i < count; ++i) {
        transpose_ssd_state(kept(i), pitch, states + i * n * wide, wide, n, sizes.p);
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::ssd::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    // The traffic of the state, which the caches have in chunks.
    const int64_t bytes = args.x.numel() * args.b.size(-1) * 8;
    const SsdSizes sizes(args, bytes);
    const int64_t groups = args.b.size(-2), tasks = groups * sizes.parts;
    parallel_for_with_scratch(
        args.sequences.count(args.x, 2) * tasks, bytes, sizes.scratch() * static_cast<int64_t>(sizeof(float)),
        [&](int64_t begin, int64_t end, char *scratch) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t part = i % sizes.parts * sizes.together, left = sizes.heads_of_group - part;
                const int64_t group = i % tasks / sizes.parts;
                ssd_heads(args, sizes, i / tasks, group * sizes.heads_of_group + part,
                          left < sizes.together ? left : sizes.together, reinterpret_cast<float *>(scratch));
            }
        });
}
