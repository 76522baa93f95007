// Products with a weight in blocks by slices of its rows, which are decoded to the workspace in the dtype of x and
// multiplied by linear. Shared by the CPU and CUDA.
#pragma once

#include "linear/linear.h"
#include "linear_blocks.h"

namespace infini::linear_blocks {

// Rows of a slice of at most `most` decoded bytes: a multiple of 64, or all.
inline int64_t slice_rows(const Args &args, int64_t most) {
    const int64_t row = args.x.size(-1) * static_cast<int64_t>(size_of(args.x.dtype));
    const int64_t rows = most / row / 64 * 64, n = args.weight.size(0);
    return rows < 64 ? (n < 64 ? n : 64) : rows < n ? rows : n;
}

inline size_t slice_bytes(const Args &args, int64_t most) {
    return static_cast<size_t>(slice_rows(args, most) * args.x.size(-1)) * size_of(args.x.dtype);
}

// Calls body(rows of the weight, their decoded form at the workspace, the product with it) for each slice.
template <typename Body> void for_each_slice(const Args &args, int64_t most, const Body &body) {
    const int64_t n = args.weight.size(0), k = args.x.size(-1), step = slice_rows(args, most);
    const auto part = [](const TensorView &view, int dim, int64_t first, int64_t count) {
        TensorView some = view;
        if (view.dtype != INFINI_DTYPE_INVALID) {
            some.data = view.as<char>() + first * view.strides[dim] * static_cast<int64_t>(size_of(view.dtype));
            some.shape[dim] = count;
        }
        return some;
    };
    TensorView dense;
    dense.data = args.workspace;
    dense.dtype = args.x.dtype;
    dense.ndim = 2;
    dense.shape[1] = dense.strides[0] = k;
    dense.strides[1] = 1;
    for (int64_t first = 0; first < n; first += step) {
        const int64_t rows = n - first < step ? n - first : step;
        dense.shape[0] = rows;
        linear::Args product;
        product.x = args.x;
        product.y = part(args.y, args.y.ndim - 1, first, rows);
        product.weight[0] = dense;
        product.bias[0] = part(args.bias, 0, first, rows);
        body(part(args.weight, 0, first, rows), dense, product);
    }
}

} // namespace infini::linear_blocks
