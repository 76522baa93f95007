// The CPU kernel of gemm: for a few rows b is streamed from memory; for more, b is packed; for many, a and b are packed
// in blocks that stay in the caches. All three have the same order of sums.
// Limit: memory bandwidth up to about 8 rows, which read b once; the multiply-add units beyond.
#include "batch.h"
#include "gemm.h"
#include "level_types.h"
#include "panel_loops.h"
#include "parallel.h"
#include "streaming.h"

#include "scratch.h"

namespace infini::INFINI_LEVEL {
namespace {

// Threads are used from this many multiply-adds on: a region costs microseconds, a core does 60 or more per nanosecond.
constexpr double kParallelProducts = 1 << 18;

// c = beta * c: the product if k is 0.
template <typename T> void multiply_nothing(const Product<T> &p) {
    const float zeros[kTileColumns] = {};
    for (int64_t i = 0; i < p.m; ++i) {
        for (int64_t j = 0; j < p.n; j += kTileColumns) {
            write_tile(p, i, j, 1, zeros);
        }
    }
}

enum class Algorithm { kNothing, kStreaming, kFew, kMany };

// The fastest algorithm for m rows, measured with a b of 4096 x 14336.
template <typename T> Algorithm algorithm_of(const Product<T> &p, int64_t m) {
    if (p.k == 0) {
        return Algorithm::kNothing;
    }
    return streams(p, m) ? Algorithm::kStreaming : p.b.along_k && m <= kFewRows ? Algorithm::kFew : Algorithm::kMany;
}

template <typename T> int64_t scratch_floats(const Product<T> &p, int64_t m, int64_t n) {
    switch (algorithm_of(p, m)) {
    case Algorithm::kNothing:
        return 0;
    case Algorithm::kStreaming:
        return streaming_floats(p, m);
    case Algorithm::kFew:
        return few_floats<T>(m, p.k);
    default:
        return many_floats<T>(m, n);
    }
}

template <typename T> void multiply(const Product<T> &p, float *scratch) {
    switch (algorithm_of(p, p.m)) {
    case Algorithm::kNothing:
        return multiply_nothing(p);
    case Algorithm::kStreaming:
        return multiply_streaming(p, scratch);
    case Algorithm::kFew:
        return multiply_few(p, scratch);
    case Algorithm::kMany:
        return multiply_many(p, scratch);
    }
}

template <typename T> void multiply(const gemm::Args &args) {
    const Batch<T> batch(args);
    const Product<T> &whole = batch.product;
    const double products = static_cast<double>(args.c.numel()) * static_cast<double>(whole.k);
    const int64_t limit = products < kParallelProducts || omp_in_parallel() ? 1 : omp_get_max_threads();
    // Split each product into one rectangle per thread, unless there are enough products. Every thread packs what it
    // needs, so the rectangles are as square as possible.
    const int64_t parts = batch.size % limit == 0 || batch.size >= 8 * limit ? 1 : limit;
    int64_t row_parts = 1;
    for (int64_t i = 2; i <= parts; ++i) {
        const auto sides = [&](int64_t cuts) { return whole.m / cuts + whole.n / (parts / cuts); };
        if (parts % i == 0 && whole.m / i > kFewRows && sides(i) < sides(row_parts)) {
            row_parts = i;
        }
    }
    const EvenSplit rows(whole.m, ceil_div(whole.m, row_parts), row_parts > 1 ? kTileRows : 1);
    const EvenSplit columns(whole.n, ceil_div(whole.n, parts / row_parts), kTileColumns);
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
    with_level_float_type(args.c.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                          [&](auto type) { multiply<decltype(type)>(args); });
}
