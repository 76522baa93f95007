// The CPU kernel of silu and swiglu: element by element along rows, or along the whole tensor where it is contiguous.
// Limit: memory bandwidth, one value written for each one or two read; the exponential has to stay below that.
#include "parallel.h"
#include "rows.h"
#include "stream.h"
#include "swiglu.h"
#include "vec.h"

namespace infini::INFINI_LEVEL {
namespace {

// A single row is split among threads in steps of this many elements, so that no two of them write one cache line.
constexpr int64_t kRowStep = 64;

bool is_contiguous(const TensorView &view) {
    int64_t expected = 1;
    for (int dim = view.ndim - 1; dim >= 0; --dim) {
        if (view.shape[dim] > 1 && view.strides[dim] != expected) {
            return false;
        }
        expected *= view.shape[dim];
    }
    return true;
}

void flatten(TensorView &view) {
    view.shape[0] = view.numel();
    view.strides[0] = 1;
    view.ndim = 1;
}

template <bool kStream, typename T, bool kWithUp> void swiglu_row(T *y, const T *gate, const T *up, int64_t n) {
    for_each_vector(n, [&](int64_t i, auto lanes) {
        const VecF g = load_at(gate, i, lanes);
        VecF value = g / (splat(1.0f) + exp_for<T>(-g));
        if constexpr (kWithUp) {
            value = value * load_at(up, i, lanes);
        }
        put_at<kStream>(y, i, value, lanes);
    });
}

template <typename T, bool kWithUp> void swiglu_rows(const swiglu::Args &a) {
    // Without up, gate stands in for it, so that one walk serves both ops.
    TensorView y = a.y, gate = a.gate, up = kWithUp ? a.up : a.gate;
    if (is_contiguous(y) && is_contiguous(gate) && is_contiguous(up)) {
        flatten(y);
        flatten(gate);
        flatten(up);
    }
    const int64_t n = y.size(-1);
    const TensorView *const views[] = {&y, &gate, &up};
    const Rows<3> rows(views);
    const int64_t bytes = y.numel() * static_cast<int64_t>(sizeof(T)) * (kWithUp ? 3 : 2);
    const bool large = y.numel() * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
    const auto run = [&](const int64_t *at, int64_t begin, int64_t end) {
        T *out = y.as<T>() + at[0] + begin;
        const T *g = gate.as<const T>() + at[1] + begin, *u = up.as<const T>() + at[2] + begin;
        if (large && stream_aligned(out)) {
            swiglu_row<true, T, kWithUp>(out, g, u, end - begin);
        } else {
            swiglu_row<false, T, kWithUp>(out, g, u, end - begin);
        }
    };
    if (rows.count() == 1) {
        const int64_t start[3] = {};
        parallel_for((n + kRowStep - 1) / kRowStep, bytes, [&](int64_t begin, int64_t end) {
            run(start, begin * kRowStep, end * kRowStep < n ? end * kRowStep : n);
            stream_fence();
        });
    } else {
        parallel_for(rows.count(), bytes, [&](int64_t begin, int64_t end) {
            rows.visit(begin, end, [&](const int64_t *at) { run(at, 0, n); });
            stream_fence();
        });
    }
}

} // namespace
} // namespace infini::INFINI_LEVEL

void infini::swiglu::INFINI_LEVEL::cpu_kernel(const Args &args) {
    using namespace infini::INFINI_LEVEL;
    with_float_type(args.gate.dtype, [&](auto type) {
        using T = decltype(type);
        if (args.up.dtype != INFINI_DTYPE_INVALID) {
            swiglu_rows<T, true>(args);
        } else {
            swiglu_rows<T, false>(args);
        }
    });
}
