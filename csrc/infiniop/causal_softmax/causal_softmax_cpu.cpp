// The CPU kernel of causal_softmax: one row at a time, in three passes over its visible columns: the maximum, the
// exponentials and their sum, the scaling. Limit: arithmetic, mostly the exponential: 0.2 to 0.3 ns per visible element
// (Zen 5, AVX-512); a copy of as many elements takes a fifth to a half of that.
#include "causal_softmax.h"
#include "dense_rows.h"
#include "level_types.h"
#include "softmax/softmax_row.h"

namespace infini::INFINI_LEVEL {
namespace {

// Splits the rows of matrices [q, k] by work: row i sees k - q + 1 + i columns.
class Triangle {
public:
    Triangle(int64_t q, int64_t k, int64_t rows) : q_(q), hidden_(k - q), rows_(rows) {}

    int64_t seen(int64_t row) const { return hidden_ + 1 + row % q_; }
    // The number of columns that all rows before this one see.
    int64_t before(int64_t row) const {
        const int64_t i = row % q_;
        return row / q_ * sum_of(q_) + sum_of(i);
    }
    // The first row for which before() is at least `columns`.
    int64_t row_at(int64_t columns) const {
        int64_t low = 0, high = rows_;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (before(middle) < columns) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }

private:
    int64_t sum_of(int64_t i) const { return i * hidden_ + i * (i + 1) / 2; }
    int64_t q_, hidden_, rows_;
};

template <typename T> void softmax_rows(const causal_softmax::Args &a) {
    const int64_t q = a.x.size(-2), k = a.x.size(-1);
    const TensorView *const views[] = {&a.y, &a.x};
    const DenseRows<2> rows(views, 1);
    const Triangle triangle(q, k, rows.count());
    const int64_t bytes = a.x.numel() * 2 * static_cast<int64_t>(sizeof(T));
    parallel_for_with_scratch(
        triangle.before(rows.count()), bytes, exps_bytes<T>(k) + rows.scratch_bytes(),
        [&](int64_t begin, int64_t end, char *scratch) {
            int64_t row = triangle.row_at(begin);
            rows.visit(row, triangle.row_at(end), scratch + exps_bytes<T>(k), [&](void *const *at) {
                const int64_t seen = triangle.seen(row++);
                auto *const y = static_cast<T *>(at[0]);
                softmax_row(y, static_cast<const T *>(at[1]), scratch, seen);
                std::memset(static_cast<void *>(y + seen), 0, static_cast<size_t>(k - seen) * sizeof(T));
            });
        },
        kSoftmaxParallelBytes);
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::causal_softmax::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_level_float_type(args.x.dtype, args, INFINI_FLOAT_LEVEL::cpu_kernel,
                          [&](auto x) { softmax_rows<decltype(x)>(args); });
}
