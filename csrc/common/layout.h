// Layout transformations for kernels that take views of any strides: reordering and coalescing dimensions, splitting
// large views. Shared by the CPU and the CUDA kernels.
// All in an anonymous namespace, so that the linker can never pick one instruction set's copy for another.
#pragma once

#include "tensor_view.h"

namespace infini {
namespace {

// Moves a dimension of all views to another position; the dimensions between shift by one.
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

// Rewrites non-empty views of equal shape, views[0] the output, as equivalent views in another order: at least one
// dimension, none of size 1 (unless it is the only one), the output's strides positive and descending, adjacent
// dimensions merged if every view allows it.
template <int kTensors> void coalesce_dims(TensorView (&views)[kTensors]) {
    TensorView &out = views[0];
    for (int dim = out.ndim - 1; dim >= 0; --dim) {
        if (out.shape[dim] == 1) {
            move_dim(views, dim, out.ndim - 1);
            for (TensorView &view : views) {
                --view.ndim;
            }
        } else if (out.strides[dim] < 0) { // reverse the dimension
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

inline int longest_dim(const TensorView &view) {
    int longest = view.ndim - 1;
    for (int dim = longest - 1; dim >= 0; --dim) {
        longest = view.shape[dim] > view.shape[longest] ? dim : longest;
    }
    return longest;
}

// Splits views of equal shape into parts of at most `most` elements and calls body(parts) for each. Split points are
// multiples of 64, so that vectors stay aligned.
template <int kTensors, typename Body>
void for_each_part(const TensorView (&views)[kTensors], int64_t most, const Body &body) {
    if (views[0].numel() <= most) {
        return body(views);
    }
    const int dim = longest_dim(views[0]);
    const int64_t half = views[0].shape[dim] / 2, cut = half < 64 ? half : half / 64 * 64;
    TensorView part[kTensors];
    for (int t = 0; t < kTensors; ++t) {
        part[t] = views[t];
        part[t].shape[dim] = cut;
    }
    for_each_part(part, most, body);
    for (int t = 0; t < kTensors; ++t) {
        part[t].shape[dim] = views[t].shape[dim] - cut;
        part[t].data =
            part[t].template as<char>() + cut * part[t].strides[dim] * static_cast<int64_t>(size_of(part[t].dtype));
    }
    for_each_part(part, most, body);
}

} // namespace
} // namespace infini
