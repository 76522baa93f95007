// For kernels that take any strides: brings the views of one shape into the form that is walked best, and splits the
// walk, also within one long row. Used with rows.h.
#pragma once

#include <cstring>

#include "parallel.h"
#include "rows.h"

namespace infini::INFINI_LEVEL {
namespace {

// Moves a dimension of all views to another place; those between make room.
template <int kTensors> void move_dim(TensorView (&views)[kTensors], int from, int to) {
    const int step = from < to ? 1 : -1;
    for (TensorView &view : views) {
        const int64_t size = view.shape[from], stride = view.strides[from];
        for (int dim = from; dim != to; dim += step) {
            view.shape[dim] = view.shape[dim + step];
            view.strides[dim] = view.strides[dim + step];
        }
        view.shape[to] = size;
        view.strides[to] = stride;
    }
}

// Rewrites non-empty views of one shape, views[0] that of the output, so that index by index they show the same
// elements, in another order and with at least one dimension: none of size 1 (unless it is the only one), the output's
// strides positive and falling, adjacent dimensions merged where that is one dimension in every view.
template <int kTensors> void normalise(TensorView (&views)[kTensors]) {
    TensorView &out = views[0];
    for (int dim = out.ndim - 1; dim >= 0; --dim) {
        if (out.shape[dim] == 1) {
            move_dim(views, dim, out.ndim - 1);
            for (TensorView &view : views) {
                --view.ndim;
            }
        } else if (out.strides[dim] < 0) { // walk it from its other end
            for (TensorView &view : views) {
                const auto bytes = static_cast<int64_t>(size_of(view.dtype));
                view.data = view.as<char>() + (view.shape[dim] - 1) * view.strides[dim] * bytes;
                view.strides[dim] = -view.strides[dim];
            }
        }
    }
    for (int dim = 1; dim < out.ndim; ++dim) {
        int to = dim;
        while (to > 0 && out.strides[to - 1] < out.strides[dim]) {
            --to;
        }
        move_dim(views, dim, to);
    }
    for (int dim = out.ndim - 2; dim >= 0; --dim) {
        bool merges = true;
        for (const TensorView &view : views) {
            merges = merges && view.strides[dim] == view.strides[dim + 1] * view.shape[dim + 1];
        }
        if (merges) {
            for (TensorView &view : views) {
                view.shape[dim + 1] *= view.shape[dim];
            }
            move_dim(views, dim, out.ndim - 1);
            for (TensorView &view : views) {
                --view.ndim;
            }
        }
    }
    if (out.ndim == 0) {
        for (TensorView &view : views) {
            view.ndim = 1;
            view.shape[0] = view.strides[0] = 1;
        }
    }
}

// A last dimension shorter than this is over before its loop pays.
constexpr int64_t kShortRow = 16;

inline int longest_dim(const TensorView &view) {
    int longest = view.ndim - 1;
    for (int dim = longest - 1; dim >= 0; --dim) {
        longest = view.shape[dim] > view.shape[longest] ? dim : longest;
    }
    return longest;
}

// Copies n elements of kBytes that lie to_step and from_step bytes apart; the two share no memory.
template <int kBytes> void copy_strided(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n) {
    if (to_step == kBytes) { // the compiler makes whole vectors to store
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy(to + i * kBytes, from + i * from_step, kBytes);
        }
    } else {
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy(to + i * to_step, from + i * from_step, kBytes);
        }
    }
}

// Calls body(offsets, begin, end) for parts of all rows, each row being [0, n): split among threads in steps of `step`.
template <int kTensors, typename Body>
void parallel_rows(const Rows<kTensors> &rows, int64_t n, int64_t step, int64_t bytes, const Body &body) {
    const int64_t steps = (n + step - 1) / step;
    parallel_for(rows.count() * steps, bytes, [&](int64_t begin, int64_t end) {
        const int64_t first = begin / steps, last = (end - 1) / steps;
        int64_t row = first;
        rows.visit(first, last + 1, [&](const int64_t *offsets) {
            const int64_t from = row == first ? begin % steps * step : 0;
            const int64_t to = row == last ? ((end - 1) % steps + 1) * step : n;
            body(offsets, from, to < n ? to : n);
            ++row;
        });
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL
