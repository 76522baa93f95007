// The CPU kernel of gemm: a few rows stream b from memory; from some more on b is packed, from many on a and b both,
// in blocks that stay in the caches. All three add up in one order.
// Limit: memory bandwidth for about 8 rows, which b is read once for; the multiply-add units beyond.
#include "gemm.h"
#include "own_types.h"
#include "packed.h"
#include "parallel.h"
#include "streaming.h"

#include "scratch.h"

namespace infini::INFINI_LEVEL {
namespace {

// Multiply-adds from which on threads pay: a region costs microseconds, a core does 60 and more a nanosecond.
constexpr double kParallelProducts = 1 << 18;

// c = beta * c: there is nothing to add up.
template <typename T> void multiply_nothing(const Product<T> &p) {
    const float zeros[kTileColumns] = {};
    for (int64_t i = 0; i < p.m; ++i) {
        for (int64_t j = 0; j < p.n; j += kTileColumns) {
            write_tile(p, i, j, 1, zeros);
        }
    }
}

enum class Way { kNothing, kStreaming, kFew, kMany };

// The fastest way, measured with a b of 4096 x 14336.
template <typename T> Way way_of(const Product<T> &p, int64_t m) {
    if (p.k == 0) {
        return Way::kNothing;
    }
    return streams(p, m) ? Way::kStreaming : p.b.along_k && m <= kFewRows ? Way::kFew : Way::kMany;
}

template <typename T> int64_t scratch_floats(const Product<T> &p, int64_t m, int64_t n) {
    switch (way_of(p, m)) {
    case Way::kNothing:
        return 0;
    case Way::kStreaming:
        return streaming_floats(p, m);
    case Way::kFew:
        return few_floats<T>(m, p.k);
    default:
        return many_floats<T>(m, n);
    }
}

template <typename T> void multiply(const Product<T> &p, float *scratch) {
    switch (way_of(p, p.m)) {
    case Way::kNothing:
        return multiply_nothing(p);
    case Way::kStreaming:
        return multiply_streaming(p, scratch);
    case Way::kFew:
        return multiply_few(p, scratch);
    case Way::kMany:
        return multiply_many(p, scratch);
    }
}

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

// All products of a call: entry i of the batch begins i steps further on in each matrix.
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
        // The vectors lie along the dimension of c that is contiguous: if that is m, compute c^T = b^T @ a^T.
        if (product.m > 1 && (product.n == 1 || product.c.column_stride != 1)) {
            swap(product.a, product.b);
            swap(product.m, product.n);
            swap(product.c.row_stride, product.c.column_stride);
            swap(a_step, b_step);
        }
        merge();
    }

    // A batch that shares b is one product with more rows, if these lie in step.
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

template <typename T> void multiply(const gemm::Args &args) {
    const Batch<T> batch(args);
    const Product<T> &whole = batch.product;
    const double products = static_cast<double>(args.c.numel()) * static_cast<double>(whole.k);
    const int64_t limit = products < kParallelProducts || omp_in_parallel() ? 1 : omp_get_max_threads();
    // Each product is cut into a rectangle for each thread, unless there are products enough. Every thread packs what
    // it needs: the rectangles are as square as can be.
    const int64_t parts = batch.size % limit == 0 || batch.size >= 8 * limit ? 1 : limit;
    int64_t row_parts = 1;
    for (int64_t i = 2; i <= parts; ++i) {
        const auto sides = [&](int64_t cuts) { return whole.m / cuts + whole.n / (parts / cuts); };
        if (parts % i == 0 && whole.m / i > kFewRows && sides(i) < sides(row_parts)) {
            row_parts = i;
        }
    }
    const Pieces rows(whole.m, ceil_div(whole.m, row_parts), row_parts > 1 ? kTileRows : 1);
    const Pieces columns(whole.n, ceil_div(whole.n, parts / row_parts), kTileColumns);
    const int64_t items = batch.size * rows.count * columns.count, threads = items < limit ? items : limit;
    const int64_t floats = ceil_div(scratch_floats(whole, rows.size, columns.size), 1024) * 1024;
    auto *scratch = static_cast<float *>(cpu::scratch(static_cast<size_t>(floats * threads) * sizeof(float)));
    parallel_for(threads, kParallelBytes, [&](int64_t begin, int64_t end) {
        for (int64_t item = items * begin / threads; item < items * end / threads; ++item) {
            const int64_t entry = item / (rows.count * columns.count);
            const int64_t row = item / columns.count % rows.count, column = item % columns.count;
            Product<T> p = whole;
            p.m = rows.length(row);
            p.n = columns.length(column);
            p.a.data += entry * batch.a_step + rows.begin(row) * p.a.j_stride;
            p.b.data += entry * batch.b_step + columns.begin(column) * p.b.j_stride;
            p.c.data +=
                entry * batch.c_step + rows.begin(row) * p.c.row_stride + columns.begin(column) * p.c.column_stride;
            multiply(p, scratch + begin * floats);
        }
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::gemm::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_own_float_type(args.c.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                        [&](auto type) { multiply<decltype(type)>(args); });
}
