// For CPU kernels that take any strides: copies of strided elements, and loops over rows split among threads, also
// within one long row. Used with row_iterator.h and layout.h.
#pragma once

#include <cstring>

#include "layout.h"
#include "parallel.h"
#include "row_iterator.h"

namespace infini::INFINI_LEVEL {
namespace {

// A last dimension shorter than this is not worth a vector loop.
constexpr int64_t kShortRow = 16;

// Copies n elements of kBytes that lie to_step and from_step bytes apart. The two must not share memory.
template <int kBytes> void copy_strided(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t n) {
    if (to_step == kBytes) { // this case apart: the compiler vectorizes its stores
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy(to + i * kBytes, from + i * from_step, kBytes);
        }
    } else {
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy(to + i * to_step, from + i * from_step, kBytes);
        }
    }
}

// Calls body(offsets, begin, end) for parts of all rows [0, n), split among threads at multiples of `step`.
template <int kTensors, typename Body>
void parallel_rows(const RowIterator<kTensors> &rows, int64_t n, int64_t step, int64_t bytes, const Body &body) {
    const int64_t steps = (n + step - 1) / step;
    parallel_for(rows.count() * steps, bytes, [&](int64_t begin, int64_t end) {
        const int64_t first = begin / steps, last = (end - 1) / steps;
        int64_t row = first;
        rows.visit(first, last + 1, [&](const int64_t *offsets) {
            const int64_t from = row == first ? begin % steps * step : 0;
            const int64_t to = row == last ? ((end - 1) % steps + 1) * step : n;
            body(offsets, from, to < n ? to : n);
            ++row;
        });
    });
}

} // namespace
} // namespace infini::INFINI_LEVEL
