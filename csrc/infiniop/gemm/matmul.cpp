// The rules of matmul; turns leading dimensions into batches of gemm's kernel.
#include "matmul.h"

#include <limits>

#include "check.h"
#include "rearrange/rearrange.h"

namespace infini::matmul {

namespace {

void insert_dim(TensorView &view, int dim) {
    for (int i = view.ndim++; i > dim; --i) {
        view.shape[i] = view.shape[i - 1];
        view.strides[i] = view.strides[i - 1];
    }
    view.shape[dim] = 1;
    view.strides[dim] = 0;
}

void drop_first_dim(TensorView &view) {
    --view.ndim;
    for (int i = 0; i < view.ndim; ++i) {
        view.shape[i] = view.shape[i + 1];
        view.strides[i] = view.strides[i + 1];
    }
}

// Broadcasts all but the last `kept` dimensions of the view to the shape of `like`, by stride 0.
TensorView expand(const TensorView &view, const TensorView &like, int kept) {
    TensorView wide = like;
    wide.data = view.data;
    wide.dtype = view.dtype;
    for (int i = 0; i < like.ndim; ++i) {
        const int from = i - like.ndim + view.ndim;
        const bool stays = i >= like.ndim - kept;
        if (from >= 0 && stays) {
            wide.shape[i] = view.shape[from];
        }
        wide.strides[i] = from >= 0 && wide.shape[i] == view.shape[from] ? view.strides[from] : 0;
    }
    return wide;
}

// Whether `view` broadcasts to the shape of `like`.
bool expands(const TensorView &view, const TensorView &like) {
    bool holds = view.ndim <= like.ndim;
    for (int i = 1; holds && i <= view.ndim; ++i) {
        holds = view.size(-i) == 1 || view.size(-i) == like.size(-i);
    }
    return holds;
}

// Merges leading dimensions if all three matrices allow it, and removes those of size 1.
void merge_batches(gemm::Args &args) {
    TensorView *const views[] = {&args.c, &args.a, &args.b};
    const int batches = args.c.ndim - 2;
    int dims = 0;
    for (int dim = 0; dim < batches; ++dim) {
        const int64_t size = args.c.shape[dim];
        if (size == 1) {
            continue;
        }
        bool merges = dims > 0;
        for (const TensorView *view : views) {
            merges = merges && view->strides[dims - 1] == view->strides[dim] * size;
        }
        dims += merges ? 0 : 1;
        for (TensorView *view : views) {
            view->shape[dims - 1] = merges ? view->shape[dims - 1] * size : size;
            view->strides[dims - 1] = view->strides[dim];
        }
    }
    for (TensorView *view : views) {
        for (int i = 0; i < 2; ++i) {
            view->shape[dims + i] = view->shape[batches + i];
            view->strides[dims + i] = view->strides[batches + i];
        }
        view->ndim = dims + 2;
    }
}

// Loops over the leading dimensions except the last, which the kernel takes as its batch.
void multiply(const ExecutionContext &context, const gemm::Args &args) {
    if (args.c.ndim <= 3) {
        gemm::compute(context, args);
        return;
    }
    gemm::Args entry = args;
    for (int64_t i = 0; i < args.c.shape[0]; ++i) {
        const auto at = [&](const TensorView &view) {
            TensorView inner = view;
            inner.data = view.as<char>() + i * view.strides[0] * static_cast<int64_t>(size_of(view.dtype));
            drop_first_dim(inner);
            return inner;
        };
        entry.c = at(args.c);
        entry.a = at(args.a);
        entry.b = at(args.b);
        multiply(context, entry);
    }
}

} // namespace

TensorView output_of(const char *op, const TensorView &a, const TensorView &b) {
    const Checker rule(op);
    rule.rank("a", a, 1, kMaxDims);
    rule.dtype("a", a, INFINI_FLOATS);
    rule.rank("b", b, 1, kMaxDims);
    rule.same_dtype("b", b, "a", a);
    const int64_t k = a.size(-1), rows = b.size(b.ndim > 1 ? -2 : -1);
    if (rows != k) {
        rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "b", message("have ", k, " rows, as a has columns"),
                  message(rows, " (shapes ", shape_of(a), " and ", shape_of(b), ")"));
    }
    TensorView out;
    out.dtype = a.dtype;
    const int a_batches = a.ndim > 2 ? a.ndim - 2 : 0, b_batches = b.ndim > 2 ? b.ndim - 2 : 0;
    out.ndim = a_batches > b_batches ? a_batches : b_batches;
    for (int i = 0; i < out.ndim; ++i) {
        const int in_a = i - out.ndim + a_batches, in_b = i - out.ndim + b_batches;
        const int64_t a_size = in_a < 0 ? 1 : a.shape[in_a], b_size = in_b < 0 ? 1 : b.shape[in_b];
        if (a_size != b_size && a_size != 1 && b_size != 1) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "b",
                      message("have leading dimensions that broadcast with those of a, shape ", shape_of(a)),
                      message("shape ", shape_of(b)));
        }
        out.shape[i] = a_size == 1 ? b_size : a_size;
    }
    if (a.ndim > 1) {
        out.shape[out.ndim++] = a.size(-2);
    }
    if (b.ndim > 1) {
        out.shape[out.ndim++] = b.size(-1);
    }
    return out;
}

gemm::Args product_of(const char *op, const Args &args) {
    const Checker rule(op);
    const TensorView &out = args.out, &a = args.a, &b = args.b, &c = args.c;
    const TensorView wanted = output_of(op, a, b);
    rule.same_dtype("out", out, "a", a);
    rule.same_shape("out", out, "a @ b", wanted);

    gemm::Args product;
    product.c = out;
    if (b.ndim == 1) {
        insert_dim(product.c, out.ndim);
    }
    if (a.ndim == 1) {
        insert_dim(product.c, product.c.ndim - 1);
    }
    TensorView a_matrix = a, b_matrix = b;
    if (a.ndim == 1) {
        insert_dim(a_matrix, 0);
    }
    if (b.ndim == 1) {
        insert_dim(b_matrix, 1);
    }
    gemm::check_layout(rule, "a", a_matrix);
    gemm::check_layout(rule, "b", b_matrix);
    gemm::check_layout(rule, "out", product.c);
    rule.writable("out", out);
    rule.no_overlap("out", out, "a", a);
    rule.no_overlap("out", out, "b", b);

    constexpr double largest = std::numeric_limits<float>::max();
    rule.range("alpha", args.alpha, -largest, largest, "be a finite number");
    rule.range("beta", args.beta, -largest, largest, "be a finite number");
    if (c.dtype != INFINI_DTYPE_INVALID) {
        rule.same_dtype("c", c, "a", a);
        if (!expands(c, out)) {
            rule.fail(INFINI_STATUS_BAD_TENSOR_SHAPE, "c",
                      message("have a shape that broadcasts to that of a @ b, ", shape_of(out)), shape_of(c));
        }
        rule.no_partial_overlap("out", out, "c", expand(c, out, 0));
    } else if (args.beta != 0) {
        rule.fail(INFINI_STATUS_NULL_POINTER, "c", "be a tensor where beta is not 0", "None");
    }
    if (out.numel() > 0) {
        product.a = expand(a_matrix, product.c, 2);
        product.b = expand(b_matrix, product.c, 2);
        product.alpha = static_cast<float>(args.alpha);
        product.beta = static_cast<float>(args.beta);
        merge_batches(product);
    }
    return product;
}

size_t workspace_bytes(const ExecutionContext &context, gemm::Args product) {
    while (product.c.ndim > 3) { // all entries have the same layout
        for (TensorView *view : {&product.c, &product.a, &product.b}) {
            drop_first_dim(*view);
        }
    }
    return gemm::workspace_bytes(context, product);
}

void compute(const ExecutionContext &context, const Args &args, const gemm::Args &product) {
    if (args.out.numel() == 0) {
        return;
    }
    if (args.beta != 0) {
        // The kernel accumulates into out, so copy c there; nothing to do if out is c.
        rearrange::run(context, {args.out, expand(args.c, args.out, 0)});
    }
    multiply(context, product);
}

void multiply_batches(const ExecutionContext &context, gemm::Args args) {
    merge_batches(args);
    multiply(context, args);
}

} // namespace infini::matmul
