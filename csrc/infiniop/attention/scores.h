// Turns the scores of a row into probabilities, block by block: the scales of int8 keys and values, the soft cap,
// masks, ALiBi, and softmax.
#pragma once

#include <cmath>

#include "block_sizes.h"
#include "tensor_view.h"

namespace infini::INFINI_LEVEL {
namespace {

inline VecI lane_numbers() {
    VecI v;
    for (int i = 0; i < kLanes; ++i) {
        v[i] = i;
    }
    return v;
}

// The first n lanes of v (n may exceed their number), `other` in the rest.
inline VecF first_lanes(VecF v, int64_t n, float other) {
    return n >= kLanes ? v : select(lane_numbers() < VecI{} + static_cast<int>(n), v, splat(other));
}

// The largest score so far, and the sum of e^(score - largest) in as many parts as there are lanes.
struct RowState {
    VecF sum;
    float largest;

    RowState() : sum{}, largest(-INFINITY) {}
    // Begins with a sink, a score without a value. Infinity and NaN make the sum NaN; -infinity is no score.
    explicit RowState(float sink) : sum{}, largest(sink) { sum[0] = sink == -INFINITY ? 0.0f : 1.0f + (sink - sink); }
};

// Turns one row's scores of a block into probabilities relative to the largest score so far: n keys are visible; the
// scores after them up to `width`, which are read later, become 0. Returns the factor for earlier sums.
template <typename T> float softmax(float *scores, int64_t n, int64_t width, float scale, RowState &state) {
    const int64_t whole = n / kLanes * kLanes;
    // The last visible scores, and -infinity in the lanes after them.
    const auto last = [&] { return first_lanes(load(scores + whole) * splat(scale), n - whole, -INFINITY); };
    VecF largest = splat(state.largest);
    for (int64_t i = 0; i < whole; i += kLanes) {
        largest = max(load(scores + i) * splat(scale), largest);
    }
    if (whole < n) {
        largest = max(last(), largest);
    }
    const float before = state.largest;
    state.largest = max(largest);
    const float base = state.largest == -INFINITY ? 0.0f : state.largest; // nothing is visible yet
    const float factor = state.largest == before ? 1.0f : exp(splat(before - base))[0];
    VecF sum = state.sum * splat(factor);
    for (int64_t i = 0; i < whole; i += kLanes) {
        const VecF p = exp_for<T>(load(scores + i) * splat(scale) - splat(base));
        sum = sum + p;
        store(scores + i, p);
    }
    int64_t done = whole;
    if (whole < n) {
        const VecF p = exp_for<T>(last() - splat(base));
        sum = sum + p;
        store(scores + whole, p);
        done += kLanes;
    }
    for (; done < width; done += kLanes) {
        store(scores + done, VecF{});
    }
    state.sum = sum;
    return factor;
}

// scores *= factor * factors, one for each of n keys.
inline void multiply_keys(float *scores, float factor, const float *factors, int64_t n) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        store_at(scores, i, load_at(scores, i, lanes) * (splat(factor) * load_at(factors, i, lanes)), lanes);
    });
}

// softcap * tanh(scores * factor), with 1 / softcap in the factor.
template <typename T> void cap_scores(float *scores, int64_t n, float factor, float softcap) {
    // Whole vectors: elements after the last visible key are never used, and there is room for them.
    for (int64_t i = 0; i < n; i += kLanes) {
        store(scores + i, tanh_for<T>(load(scores + i) * splat(factor)) * splat(softcap));
    }
}

// Loads the row of a mask from the key at p on: one of three element types, any stride.
template <typename M> inline VecF load_mask(const M *p, int64_t stride, int n) {
    if (stride == 0) {
        return splat(widen(*p));
    }
    if (stride == 1) {
        return n == kLanes ? load(p) : load(p, n);
    }
    VecF v = {};
    for (int i = 0; i < n; ++i) {
        v[i] = widen(p[i * stride]);
    }
    return v;
}

inline VecF load_mask(const bool *p, int64_t stride, int n) {
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    Bytes visible = {};
    if (stride == 1) {
        std::memcpy(&visible, p, static_cast<size_t>(n));
    } else {
        for (int i = 0; i < n; ++i) {
            visible[i] = p[i * stride];
        }
    }
    return select(__builtin_convertvector(visible == 0, VecI), splat(-INFINITY), VecF{});
}

template <typename M> void add_mask(float *scores, const M *mask, int64_t stride, int64_t n, float scale) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        store(scores + i, fma(load(scores + i), splat(scale), load_mask(mask + i * stride, stride, lanes)));
    });
}

void add_mask(float *scores, const TensorView &mask, int64_t offset, int64_t stride, int64_t n, float scale) {
    if (mask.dtype == INFINI_DTYPE_BOOL) {
        add_mask(scores, mask.as<const bool>() + offset, stride, n, scale);
    } else {
        with_float_type(mask.dtype, [&](auto type) {
            add_mask(scores, mask.as<const decltype(type)>() + offset, stride, n, scale);
        });
    }
}

// scores * scale + slope * (key - the query's own position): ALiBi. `first` is that difference for the first key.
inline void add_slope(float *scores, float slope, int64_t first, int64_t n, float scale) {
    const VecF lanes = __builtin_convertvector(lane_numbers(), VecF);
    for_each_vector(n, [&](int64_t i, auto count) {
        const VecF distance = lanes + splat(static_cast<float>(first + i));
        store_at(scores, i, fma(load_at(scores, i, count), splat(scale), distance * splat(slope)), count);
    });
}

// scores * scale, and -infinity for the first `hidden` of n: keys before a window.
inline void hide_first(float *scores, int64_t hidden, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i += kLanes) { // whole vectors, as in cap_scores
        const VecI before = lane_numbers() < VecI{} + static_cast<int>(hidden - i);
        store(scores + i, select(before, splat(-INFINITY), load(scores + i) * splat(scale)));
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
