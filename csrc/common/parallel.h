// Splits a loop over rows among OpenMP threads (torch's: both share one pool and one thread count). A parallel region
// costs microseconds, so work below a threshold in bytes, which an op may choose, stays on the calling thread. Rows are
// independent, so the thread count never changes a result's bits.
#pragma once

#include <omp.h>

#include <cstdint>

#include "level.h"
#include "scratch.h"

namespace infini::INFINI_LEVEL {
namespace {

// Work is split from this many bytes of traffic on: a region costs microseconds, and one core streams these bytes in 6
// microseconds (40 bytes/ns). Derived from those figures, not tuned; ops that compute more per byte pass a smaller
// threshold.
constexpr int64_t kParallelBytes = 256 * 1024;

// How many threads parallel_for asks for.
inline int64_t parallel_threads(int64_t n, int64_t bytes, int64_t threshold = kParallelBytes) {
    const int64_t limit = omp_in_parallel() ? 1 : omp_get_max_threads();
    return bytes < threshold ? 1 : (n < limit ? n : limit);
}

// Calls body(begin, end) for disjoint ranges that together are [0, n).
template <typename Body>
void parallel_for(int64_t n, int64_t bytes, const Body &body, int64_t threshold = kParallelBytes) {
    const int64_t threads = parallel_threads(n, bytes, threshold);
    if (threads <= 1) {
        if (n > 0) {
            body(int64_t{0}, n);
        }
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
        // The team may be smaller than asked for (OMP_THREAD_LIMIT, nesting): split by the size it has.
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t begin = n * me / team, end = n * (me + 1) / team;
        if (begin < end) {
            body(begin, end);
        }
    }
}

// The same with body(begin, end, scratch): each thread gets scratch_bytes bytes, aligned to 64. They are allocated
// before the threads start, because no exception may leave a parallel region.
template <typename Body>
void parallel_for_with_scratch(int64_t n, int64_t bytes, int64_t scratch_bytes, const Body &body,
                               int64_t threshold = kParallelBytes) {
    const int64_t threads = parallel_threads(n, bytes, threshold), pitch = (scratch_bytes + 63) / 64 * 64;
    char *const memory =
        pitch > 0 && n > 0 ? static_cast<char *>(cpu::scratch(static_cast<size_t>(threads * pitch))) : nullptr;
    parallel_for(
        n, bytes,
        [&](int64_t begin, int64_t end) {
            body(begin, end, memory + (threads > 1 ? omp_get_thread_num() * pitch : 0));
        },
        threshold);
}

} // namespace
} // namespace infini::INFINI_LEVEL
