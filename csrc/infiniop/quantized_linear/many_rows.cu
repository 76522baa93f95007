// Many rows of x by quantized weights (see many_rows.h): each slice is unpacked, multiplied by cuBLAS and scaled.
// Limit: cuBLAS, and the memory bandwidth of the workspace.
#include "many_rows.h"

#include "gemm/cublas.h"
#include "gemm/scale_sums.h"
#include "rearrange/rearrange.h"
#include "unpack.h"

namespace infini::many_rows {
namespace {

TensorView matrix(void *data, infiniDtype_t dtype, int64_t rows, int64_t columns, int64_t step) {
    TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.ndim = 2;
    view.shape[0] = rows;
    view.shape[1] = columns;
    view.strides[0] = step;
    view.strides[1] = 1;
    return view;
}

// Narrows a dimension to elements [first, first + count); an absent view stays absent.
TensorView part(TensorView view, int dim, int64_t first, int64_t count) {
    if (view.dtype != INFINI_DTYPE_INVALID) {
        view.data = view.as<char>() + first * view.stride(dim) * static_cast<int64_t>(size_of(view.dtype));
        view.shape[dim] = count;
    }
    return view;
}

// Copies x to rows that lie `step` apart.
void copy_rows(const ExecutionContext &context, const TensorView &x, void *to, int64_t step) {
    TensorView copy = x;
    copy.data = to;
    for (int dim = x.ndim - 2; dim >= 0; --dim) {
        copy.strides[dim] = step;
        step *= x.shape[dim];
    }
    rearrange::run(context, {copy, x});
}

} // namespace

void run(const ExecutionContext &context, const Problem &problem) {
    const Plan plan(problem);
    const uintptr_t aligned =
        (reinterpret_cast<uintptr_t>(problem.workspace) + kAlignment - 1) / kAlignment * kAlignment;
    auto *const room = reinterpret_cast<char *>(aligned);
    const infiniDtype_t dtype = problem.x.dtype;
    const int64_t pitch = unpack::padded(plan.k);
    gemm::Args product;
    product.workspace = room + plan.cublas_at;
    if (plan.x_step > 0) {
        product.a = matrix(problem.x.data, dtype, plan.m, plan.k, plan.x_step);
    } else {
        copy_rows(context, problem.x, room + plan.copied_x_at, pitch);
        product.a = matrix(room + plan.copied_x_at, dtype, plan.m, plan.k, pitch);
    }
    const int columns = problem.y.ndim - 1;
    for (int64_t first = 0, count = 0; first < plan.n; first += count) {
        const int64_t left = plan.n - first;
        // A last slice of one row must not occur: cuBLAS would see a column-major matrix, whose elements are not
        // contiguous.
        count = left <= plan.slice ? left : left == plan.slice + 1 ? plan.slice - 1 : plan.slice;
        TensorView weight = part(problem.weight, 0, first, count);
        if (plan.unpacks) {
            const TensorView rows = matrix(room + plan.weight_at, dtype, count, plan.k, pitch);
            unpack::run(context, {rows, weight, part(problem.group_scales, 0, first, count),
                                  part(problem.group_zeros, 0, first, count)});
            weight = rows;
        }
        product.b = matrix(weight.data, dtype, plan.k, count, 1);
        product.b.strides[1] = weight.stride(0);
        const TensorView y = part(problem.y, columns, first, count);
        if (plan.y_step > 0) {
            product.c = matrix(y.data, y.dtype, plan.m, count, plan.y_step);
            gemm::multiply_by_cublas(context, product);
            continue;
        }
        product.c = matrix(room + plan.sums_at, plan.unpacks ? INFINI_DTYPE_F32 : INFINI_DTYPE_I32, plan.m, count,
                           padded_columns(count));
        gemm::multiply_by_cublas(context, product);
        gemm::scale_sums(context, {product.c, y, problem.row_scales, part(problem.column_scales, 0, first, count),
                                   part(problem.bias, 0, first, count)});
    }
}

} // namespace infini::many_rows
