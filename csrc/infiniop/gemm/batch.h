// The products of a call of gemm, transposed if necessary, so that vectors run along a row of c.
#pragma once

#include "gemm.h"
#include "blocking.h"

namespace infini::INFINI_LEVEL {
namespace {

template <typename T> Operand<T> operand(const TensorView &x, int k_dim, int j_dim) {
    const int64_t k_stride = x.stride(k_dim), j_stride = x.stride(j_dim);
    const bool k_dense = k_stride == 1 || x.size(k_dim) <= 1, j_dense = j_stride == 1 && x.size(j_dim) > 1;
    return {x.as<const T>(), k_stride, j_stride, k_dense && !j_dense};
}

template <typename Value> void swap(Value &a, Value &b) {
    const Value kept = a;
    a = b;
    b = kept;
}

// All products of a call: those of batch entry i begin i steps into each matrix.
template <typename T> struct Batch {
    Product<T> product;
    int64_t size, a_step, b_step, c_step;

    explicit Batch(const gemm::Args &args) {
        const TensorView &a = args.a, &b = args.b, &c = args.c;
        const int64_t k = a.size(-1);
        product = {operand<T>(a, -1, -2),
                   operand<T>(b, -2, -1),
                   {c.as<T>(), c.stride(-2), c.stride(-1), k > 0 ? args.alpha : 0, args.beta},
                   c.size(-2),
                   c.size(-1),
                   k};
        const auto step = [](const TensorView &x) { return x.ndim == 3 && x.shape[0] > 1 ? x.strides[0] : 0; };
        size = c.ndim == 3 ? c.shape[0] : 1;
        a_step = step(a), b_step = step(b), c_step = step(c);
        // Vectors run along the contiguous dimension of c: if that is m, compute c^T = b^T @ a^T.
        if (product.m > 1 && (product.n == 1 || product.c.column_stride != 1)) {
            swap(product.a, product.b);
            swap(product.m, product.n);
            swap(product.c.row_stride, product.c.column_stride);
            swap(a_step, b_step);
        }
        merge();
    }

    // Turns a batch that shares b into one product with more rows, if the rows are evenly spaced.
    void merge() {
        Product<T> &p = product;
        if (size <= 1 || b_step != 0) {
            return;
        }
        if (p.m == 1 && p.a.along_k) {
            p.c.row_stride = c_step;
            p.a.j_stride = a_step;
        } else if (p.m == 1 || c_step != p.m * p.c.row_stride || a_step != p.m * p.a.j_stride) {
            return;
        }
        p.m *= size;
        size = 1;
    }
};

} // namespace
} // namespace infini::INFINI_LEVEL
