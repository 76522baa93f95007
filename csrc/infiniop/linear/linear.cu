// The CUDA kernels of linear and fused_linear. With few rows of x the weights are streamed (weight_stream.cuh); with
// more, cuBLAS multiplies by each weight and adds the bias in its epilogue, rounding once. Where it has no such product,
// y holds the bias before, and cuBLAS adds to it, which rounds the product too. A float32 bias with half types, or one
// of unaligned rows, is added to sums that cuBLAS leaves in float32. A residual is added in the epilogue of streamed
// weights; a product of cuBLAS is first rounded into the workspace.
#include <algorithm>
#include <utility>

#include "elementwise/elementwise.h"
#include "gemm/cublas.h"
#include "gemm/matmul.h"
#include "gemm/scale_sums.h"
#include "linear.h"
#include "weight_stream.cuh"

namespace infini::linear {
namespace {

bool has_residual(const Args &args) {
    return args.residual.dtype != INFINI_DTYPE_INVALID;
}

// Whether the bias is float32 but y a half type: y cannot hold the bias before the product.
bool has_wide_bias(const Args &args, int weight) {
    return args.bias[weight].dtype != INFINI_DTYPE_INVALID && args.bias[weight].dtype != args.x.dtype;
}

// Sets `product` to the product with one weight into float32 sums, without addresses; false if cuBLAS does not support
// the layouts.
bool as_sums(const Args &args, int i, gemm::Args &product) {
    const TensorView &weight = args.weight[i];
    if (!as_matrix(args.x, product.a)) {
        return false;
    }
    product.b = product.c = product.a;
    product.b.data = weight.data;
    product.workspace = args.workspace;
    product.b.shape[0] = weight.size(1), product.b.shape[1] = weight.size(0);
    product.b.strides[0] = 1, product.b.strides[1] = weight.stride(0);
    product.c.dtype = INFINI_DTYPE_F32;
    product.c.shape[1] = weight.size(0);
    product.c.strides[0] = (weight.size(0) + 3) / 4 * 4; // a multiple of 4, for vector accesses
    return gemm::cublas_takes(product);
}

// Whether x, the weight and its columns of y have rows that begin at multiples of 16 bytes, if the tensors do.
bool has_aligned_rows(const Args &args, int weight) {
    const auto aligned = [&](int64_t elements) {
        return elements * static_cast<int64_t>(size_of(args.x.dtype)) % 16 == 0;
    };
    int64_t first_column = 0;
    for (int i = 0; i < weight; ++i) {
        first_column += args.weight[i].size(0);
    }
    bool all = aligned(first_column) && aligned(args.weight[weight].stride(0));
    for (int dim = 0; dim + 1 < args.x.ndim; ++dim) {
        all = all && aligned(args.x.strides[dim]) && aligned(args.y.strides[dim]);
    }
    return all;
}

// Whether cuBLAS leaves float32 sums, to which the bias is added: always if the bias is float32 but y a half type, and
// in half types where rows are not aligned: with cuBLASLt the one test that failed on an H200 had such rows.
bool leaves_sums(const Args &args, int weight) {
    gemm::Args sums;
    return has_wide_bias(args, weight) ||
           (args.bias[weight].dtype != INFINI_DTYPE_INVALID && size_of(args.x.dtype) == 2 &&
            args.weight[weight].size(0) > 0 && !has_aligned_rows(args, weight) && as_sums(args, weight, sums));
}

// The bytes of a product's float32 sums; they follow cuBLAS's own workspace.
size_t sums_bytes(const Args &args) {
    const int64_t n = columns(args);
    bool any = false;
    for (int i = 0; i < args.weights; ++i) {
        any = any || leaves_sums(args, i);
    }
    return any ? static_cast<size_t>(args.y.numel() / n * (n + 4)) * sizeof(float) : 0;
}

template <typename T> struct Fill {
    T *y;
    const T *bias;
    int64_t n;
    cuda::RowStrides<1> rows;
};

// Sets every row of y to the bias.
template <typename T> __global__ void __launch_bounds__(256) fill_rows(const __grid_constant__ Fill<T> a) {
    cuda::grid_dependency_sync();
    const int64_t row = blockIdx.x;
    int64_t at[1];
    a.rows.locate(row, at);
    for (int64_t i = threadIdx.x; i < a.n; i += blockDim.x) {
        a.y[at[0] + i] = a.bias[i];
    }
}

template <typename T> void stream(const ExecutionContext &context, const Args &args) {
    weight_stream::Problem<T> problem(args.y, args.x);
    for (int i = 0; i < args.weights; ++i) {
        problem.add(args.weight[i]);
        problem.weight[i].bias = weight_stream::FloatVector(args.bias[i], 1);
    }
    problem.residual = has_residual(args) ? args.residual.data : nullptr;
    weight_stream::multiply_dense(context, problem);
}

// Adds a leading dimension of 1 to a view of one dimension.
TensorView with_rows(TensorView x) {
    if (x.ndim == 1) {
        x.ndim = 2;
        x.shape[1] = x.shape[0];
        x.strides[1] = x.strides[0];
        x.shape[0] = 1;
        x.strides[0] = x.shape[1];
    }
    return x;
}

// The product of rows x, which may have several dimensions, with one weight, and its bias; false, with y undefined, if
// cuBLAS has none for the layouts. Rows that are no matrix are multiplied part by part.
bool multiply_with_bias(const ExecutionContext &context, gemm::Args product, const TensorView &bias) {
    gemm::Args matrices = product;
    if (as_matrix(product.a, matrices.a) && as_matrix(product.c, matrices.c)) {
        return gemm::multiply_with_bias(context, matrices, bias.data);
    }
    const auto drop_first_dimension = [](TensorView &x) {
        --x.ndim;
        std::copy(x.shape + 1, x.shape + 1 + x.ndim, x.shape);
        std::copy(x.strides + 1, x.strides + 1 + x.ndim, x.strides);
    };
    const int64_t parts = product.a.shape[0];
    const int64_t step[] = {product.a.strides[0] * static_cast<int64_t>(size_of(product.a.dtype)),
                            product.c.strides[0] * static_cast<int64_t>(size_of(product.c.dtype))};
    drop_first_dimension(product.a);
    drop_first_dimension(product.c);
    for (int64_t i = 0; i < parts; ++i) {
        if (!multiply_with_bias(context, product, bias)) {
            return false;
        }
        product.a.data = static_cast<char *>(product.a.data) + step[0];
        product.c.data = static_cast<char *>(product.c.data) + step[1];
    }
    return true;
}

template <typename T> void multiply(const ExecutionContext &context, const Args &args) {
    gemm::Args product;
    product.a = with_rows(args.x);
    product.c = with_rows(args.y);
    product.workspace = args.workspace;
    for (int i = 0; i < args.weights; ++i) {
        const TensorView &weight = args.weight[i], &bias = args.bias[i];
        const int64_t n = weight.size(0);
        if (n == 0) {
            continue;
        }
        product.c.shape[product.c.ndim - 1] = n;
        if (leaves_sums(args, i)) {
            gemm::Args sums;
            as_sums(args, i, sums);
            sums.c.data = static_cast<char *>(args.workspace) + gemm::kWorkspaceBytes;
            gemm::multiply_by_cublas(context, sums);
            gemm::scale_sums(context, {sums.c, product.c, {}, {}, bias});
            product.c.data = product.c.as<T>() + n;
            continue;
        }
        product.b = product.c; // its leading dimensions by stride 0
        for (int dim = 0; dim + 2 < product.b.ndim; ++dim) {
            product.b.strides[dim] = 0;
        }
        product.b.data = weight.data;
        product.b.shape[product.b.ndim - 2] = weight.size(1);
        product.b.strides[product.b.ndim - 2] = weight.stride(1);
        product.b.strides[product.b.ndim - 1] = weight.stride(0);
        product.beta = 0;
        if (bias.dtype != INFINI_DTYPE_INVALID) {
            gemm::Args with_bias = product;
            with_bias.b = weight; // [n, k], and transposed [k, n]
            std::swap(with_bias.b.shape[0], with_bias.b.shape[1]);
            std::swap(with_bias.b.strides[0], with_bias.b.strides[1]);
            if (multiply_with_bias(context, with_bias, bias)) {
                product.c.data = product.c.as<T>() + n;
                continue;
            }
            const TensorView *const views[] = {&product.c};
            const Fill<T> fill{product.c.as<T>(), bias.as<const T>(), n, cuda::RowStrides<1>(views)};
            cuda::launch(context, fill_rows<T>, cuda::grid_x(fill.rows.count), dim3(256), 0, fill);
            product.beta = 1;
        }
        matmul::multiply_batches(context, product);
        product.c.data = product.c.as<T>() + n;
    }
}

// The same with a residual, which is added by a separate kernel afterwards, because y may alias it.
template <typename T> void multiply_and_add(const ExecutionContext &context, const Args &args) {
    Args product = args;
    product.residual = {};
    product.y.data = static_cast<char *>(args.workspace) + gemm::kWorkspaceBytes + sums_bytes(args);
    for (int64_t dim = product.y.ndim - 1, stride = 1; dim >= 0; --dim) {
        product.y.strides[dim] = stride;
        stride *= product.y.shape[dim];
    }
    multiply<T>(context, product);
    elementwise::Args sum;
    sum.op = elementwise::Op::add;
    sum.tensors[0] = args.y;
    sum.tensors[1] = product.y;
    sum.tensors[2] = args.residual;
    elementwise::kernels.run(context, sum);
}

bool streams(const Args &args) {
    const int64_t rows = args.y.numel() / columns(args);
    bool streamed = rows <= weight_stream::streamed_rows(size_of(args.x.dtype)) || args.x.size(-1) == 0;
    for (int i = 0; i < args.weights && !streamed; ++i) {
        gemm::Args sums;
        streamed = has_wide_bias(args, i) && args.weight[i].size(0) > 0 && !as_sums(args, i, sums);
    }
    return streamed;
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    cuda::with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) {
            streams(args)        ? stream<T>(context, args)
            : has_residual(args) ? multiply_and_add<T>(context, args)
                                 : multiply<T>(context, args);
        }
    });
}

// None for streamed rows: a CUDA graph would keep it.
size_t workspace_on_cuda(const ExecutionContext &, const Args &args) {
    if (streams(args)) {
        return 0;
    }
    const auto product = static_cast<size_t>(has_residual(args) ? args.y.numel() : 0) * size_of(args.y.dtype);
    return gemm::kWorkspaceBytes + sums_bytes(args) + product;
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda, workspace_on_cuda};

} // namespace
} // namespace infini::linear
