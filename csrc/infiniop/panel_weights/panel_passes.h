// Products with weights in panels: passes over the rows of x. In a pass all threads quantize the rows together, then
// each multiplies its panels and writes their results.
#pragma once

#include <omp.h>

#include "bias.h"
#include "panel_weights.h"
#include "parallel.h"
#include "quantize_row.h"
#include "row_iterator.h"

namespace infini::INFINI_LEVEL {
namespace {

using namespace panels;

constexpr int kVectors = kPanel / kLanes; // per row of results, or per line of a block

// X(m, k) holds m rows of k elements in the form that a kernel reads: bytes() is a multiple of 64; set_memory() takes
// that many bytes; set(row, elements) stores a row. Passes have at most kMost rows, split evenly. scratch_bytes(x, m)
// is per thread. multiply_panels(x, m, begin, end, scratch, output) calls output(row, panel, totals) with kVectors
// vectors for each row and panel.
template <typename X, typename Layout, int64_t kMost, typename T, typename ScratchBytes, typename Multiply>
void multiply_passes(const Args &a, const ScratchBytes &scratch_bytes, const Multiply &multiply_panels) {
    const int64_t k = a.x.size(-1), n = a.scales.size(0), panels = (n + kPanel - 1) / kPanel;
    const int64_t panel_bytes = (k + kBlock - 1) / kBlock * Layout::kBlockBytes;
    const TensorView *const views[] = {&a.x, &a.y};
    const RowIterator<2> rows(views);
    const int64_t passes = (rows.count() + kMost - 1) / kMost;
    const int64_t pass_rows = passes > 0 ? (rows.count() + passes - 1) / passes : 0;
    int64_t offsets[kMost];
    const Bias<T> bias(a.bias);
    for (int64_t begin = 0; begin < rows.count(); begin += pass_rows) {
        const int64_t left = rows.count() - begin, m = left < pass_rows ? left : pass_rows;
        X x(m, k);
        const int64_t work = panels * panel_bytes * ((m + 3) / 4);
        const int64_t threads = parallel_threads(INT64_MAX, work);
        const int64_t pitch = (scratch_bytes(x, m) + 63) / 64 * 64;
        char *const memory = static_cast<char *>(cpu::scratch(static_cast<size_t>(x.bytes() + threads * pitch)));
        x.set_memory(memory);
        parallel_for(m, m * k * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
            int64_t row = first;
            rows.visit(begin + first, begin + last, [&](const int64_t *at) {
                offsets[row] = at[1];
                x.set(row++, a.x.as<const T>() + at[0]);
            });
        });
        const auto write = [&](int64_t row, int64_t panel, const VecF *totals) {
            for (int v = 0; v < kVectors; ++v) {
                const int64_t column = panel * kPanel + v * kLanes, there = n - column;
                const auto store_results = [&](auto lanes) {
                    const VecF value = totals[v] * load_at(a.scales.as<const float>(), column, lanes);
                    store_at(a.y.as<T>() + offsets[row], column, bias.plus(value, column, lanes), lanes);
                };
                if (there >= kLanes) {
                    store_results(Full{});
                } else if (there > 0) {
                    store_results(static_cast<int>(there));
                }
            }
        };
        parallel_for(panels, work, [&](int64_t first, int64_t last) {
            multiply_panels(x, m, first, last, memory + x.bytes() + omp_get_thread_num() % threads * pitch, write);
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL
