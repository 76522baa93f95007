// The CUDA kernel of gemm. Most products go to cuBLAS; a few rows of a with a column-major b (or few columns of b with
// a row-major a) to weight_stream.cuh; and what cuBLAS does not support (matrices whose rows overlap or have negative
// strides, and k = 0) to a plain tiled kernel. Limit: the tensor units, or memory bandwidth for few rows; the plain
// kernel is far from either.
#include "cublas.h"
#include "cuda/launch.cuh"
#include "cuda/scalar_types.cuh"
#include "linear/weight_stream.cuh"

namespace infini::gemm {
namespace {

using cuda::Compute;

constexpr int kTile = 16; // of every dimension

struct Matrix {
    int64_t row, column, step; // strides
    explicit Matrix(const TensorView &x)
        : row(x.stride(-2)), column(x.stride(-1)), step(x.ndim == 3 && x.shape[0] > 1 ? x.strides[0] : 0) {}
};

template <typename T> struct Plain {
    const T *a, *b;
    T *c;
    Matrix at_a, at_b, at_c;
    int64_t m, n, k, row_tiles, column_tiles;
    float alpha, beta;
};

// One thread per element of c; products are added in the order of k.
template <typename T>
__global__ void __launch_bounds__(kTile *kTile) multiply_plain(const __grid_constant__ Plain<T> p) {
    cuda::grid_dependency_sync();
    INFINI_SHARED(a, float[kTile][kTile + 1]);
    INFINI_SHARED(b, float[kTile][kTile + 1]);
    const int64_t tile = blockIdx.x;
    const int64_t entry = tile / (p.row_tiles * p.column_tiles);
    const int64_t i0 = tile / p.column_tiles % p.row_tiles * kTile, j0 = tile % p.column_tiles * kTile;
    const int x = threadIdx.x, y = threadIdx.y;
    const T *const from_a = p.a + entry * p.at_a.step, *const from_b = p.b + entry * p.at_b.step;
    float sum = 0;
    for (int64_t k0 = 0; k0 < p.k; k0 += kTile) {
        const bool in_a = i0 + y < p.m && k0 + x < p.k, in_b = k0 + y < p.k && j0 + x < p.n;
        a[y][x] = in_a ? cuda::widen(from_a[(i0 + y) * p.at_a.row + (k0 + x) * p.at_a.column]) : 0.0f;
        b[y][x] = in_b ? cuda::widen(from_b[(k0 + y) * p.at_b.row + (j0 + x) * p.at_b.column]) : 0.0f;
        __syncthreads();
#pragma unroll
        for (int q = 0; q < kTile; ++q) {
            sum += a[y][q] * b[q][x];
        }
        __syncthreads();
    }
    if (i0 + y < p.m && j0 + x < p.n) {
        T &c = p.c[entry * p.at_c.step + (i0 + y) * p.at_c.row + (j0 + x) * p.at_c.column];
        const float product = p.k > 0 ? p.alpha * sum : 0.0f;
        c = cuda::narrow<T>(p.beta == 0 ? product : product + p.beta * cuda::widen(c));
    }
}

template <typename T> void launch_plain(const ExecutionContext &context, const Args &args) {
    const TensorView &a = args.a, &b = args.b, &c = args.c;
    const int64_t m = c.size(-2), n = c.size(-1), batch = c.ndim == 3 ? c.shape[0] : 1;
    const int64_t row_tiles = (m + kTile - 1) / kTile, column_tiles = (n + kTile - 1) / kTile;
    cuda::launch(context, multiply_plain<T>, cuda::grid_x(batch * row_tiles * column_tiles), dim3(kTile, kTile), 0,
                 Plain<T>{a.as<const T>(), b.as<const T>(), c.as<T>(), Matrix(a), Matrix(b), Matrix(c), m, n,
                          a.size(-1), row_tiles, column_tiles, args.alpha, args.beta});
}

// Turns a batch that shares b into one product with more rows, if the rows are evenly spaced.
Args merged(Args args) {
    TensorView &a = args.a, &b = args.b, &c = args.c;
    if (c.ndim == 2) {
        return args;
    }
    const int64_t batch = c.shape[0], m = c.shape[1];
    const bool shares_b = b.shape[0] == 1 || b.strides[0] == 0;
    const auto in_step = [&](const TensorView &x) { return m == 1 || x.strides[0] == m * x.strides[1]; };
    if (batch > 1 && !(shares_b && a.shape[0] == batch && in_step(a) && in_step(c))) {
        return args;
    }
    for (TensorView *x : {&a, &c}) {
        x->strides[1] = batch > 1 && m == 1 ? x->strides[0] : x->strides[1];
        x->shape[1] = batch * m;
    }
    for (TensorView *x : {&a, &b, &c}) {
        x->ndim = 2;
        for (int i = 0; i < 2; ++i) {
            x->shape[i] = x->shape[i + 1];
            x->strides[i] = x->strides[i + 1];
        }
    }
    return args;
}

TensorView transposed(const TensorView &x) { // x is a matrix
    TensorView turned = x;
    for (int i = 0; i < 2; ++i) {
        turned.shape[i] = x.shape[1 - i];
        turned.strides[i] = x.strides[1 - i];
    }
    return turned;
}

// Whether c = a @ b streams b: few rows of a, and contiguous columns of b.
bool streams(const TensorView &c, const TensorView &a, const TensorView &b) {
    const auto runs_along_k = [](const TensorView &rows) { return rows.stride(-1) == 1 || rows.size(-1) <= 1; };
    return c.ndim == 2 && a.size(-1) > 0 && c.size(0) <= weight_stream::streamed_rows(size_of(c.dtype)) &&
           runs_along_k(a) && runs_along_k(transposed(b));
}

// Rewrites a product of matrices as c^T = b^T @ a^T.
Args turned(Args args) {
    args.c = transposed(args.c);
    const TensorView a = transposed(args.b);
    args.b = transposed(args.a);
    args.a = a;
    return args;
}

template <typename T> void stream(const ExecutionContext &context, const Args &args) {
    weight_stream::Problem<T> problem(args.c, args.a);
    problem.add(transposed(args.b));
    problem.alpha = args.alpha;
    problem.beta = args.beta;
    weight_stream::multiply_dense(context, problem);
}

enum class Algorithm { kStream, kStreamTurned, kCublas, kPlain };

// Chooses by layouts alone; `args` are merged.
Algorithm algorithm_of(const Args &args) {
    if (streams(args.c, args.a, args.b)) {
        return Algorithm::kStream;
    }
    if (args.c.ndim == 2) {
        const Args other = turned(args);
        if (streams(other.c, other.a, other.b)) {
            return Algorithm::kStreamTurned;
        }
    }
    return args.a.size(-1) > 0 && cublas_takes(args) ? Algorithm::kCublas : Algorithm::kPlain;
}

size_t workspace_on_cuda(const ExecutionContext &, const Args &given) {
    return algorithm_of(merged(given)) == Algorithm::kCublas ? kWorkspaceBytes : 0;
}

void run_on_cuda(const ExecutionContext &context, const Args &given) {
    const Args args = merged(given);
    cuda::with_float_type(args.c.dtype, [&](auto type) {
        using T = decltype(type);
        if constexpr (sizeof(T) <= 4) {
            switch (algorithm_of(args)) {
            case Algorithm::kStream:
                return stream<T>(context, args);
            case Algorithm::kStreamTurned:
                return stream<T>(context, turned(args));
            case Algorithm::kCublas:
                return multiply_by_cublas(context, args);
            case Algorithm::kPlain:
                return launch_plain<T>(context, args);
            }
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda, workspace_on_cuda};

} // namespace
} // namespace infini::gemm
