// The CUDA kernel of lp_norm: one pass, the line in the registers of the threads that share it; lines too long for that
// (16384 halves) and lines side by side are read twice, the second time from the level-2 cache.
// Limit: memory bandwidth, 4 bytes for each bf16; for p above 2 arithmetic, a multiplication or two for each bit of p.
// SASS: norm_lines: LDG.E.128 STG.E.128
#include "cuda/launch.cuh"
#include "cuda/lines.cuh"
#include "lp_norm.h"

namespace infini::lp_norm {
namespace {

template <typename T> struct Job {
    const T *x;
    T *y;
    cuda::Lines<2> lines;
    int64_t p;
    float eps;
};

// v^p, p at least 1.
__device__ __forceinline__ float power(float v, int64_t p) {
    float result = 1;
    for (;; v *= v) {
        if ((p & 1) != 0) {
            result *= v;
        }
        p >>= 1;
        if (p == 0) {
            return result;
        }
    }
}

// (sum |x / unit|^p)^(1 / p).
template <int kWidth, typename Line> __device__ float norm(Line &line, int64_t p, float unit) {
    const float sum = line.template reduce<cuda::Sum>(0.0f, [&](float &part, int64_t, int, float (&v)[kWidth]) {
        if (unit != 1) {
            for (int e = 0; e < kWidth; ++e) {
                v[e] /= unit;
            }
        }
        for (int e = 0; e < kWidth; ++e) {
            part += p == 1 ? fabsf(v[e]) : p == 2 ? v[e] * v[e] : power(fabsf(v[e]), p);
        }
    });
    return p == 1 ? sum : p == 2 ? sqrtf(sum) : powf(sum, 1 / static_cast<float>(p));
}

template <typename T, typename Line>
__global__ void __launch_bounds__(Line::kMaxThreads, 1) norm_lines(const __grid_constant__ Job<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kWidth = cuda::kWidth<T>;
    INFINI_SHARED(shared, float[Line::kShared]);
    const int64_t number = Line::number();
    const bool mine = number < a.lines.rows.count; // the last block may have lines too many; they meet the barriers too
    int64_t at[2];
    a.lines.rows.locate(mine ? number : 0, at);
    Line line(a.x + at[0], mine ? a.lines.n : 0, a.lines, shared);

    float unit = 1, denominator = 1;
    bool again = a.p > 2;
    if (a.p <= 2) {
        const float length = norm<kWidth>(line, a.p, 1);
        denominator = length + a.eps;
        // Squares (or their sum) overflowed, or so many bits of them vanished that it shows.
        again = mine && (length < 1e-15f || length == cuda::kInfinity<float>);
    }
    if (__syncthreads_or(again) != 0) { // in any line of the block, for there are barriers
        // In units of the largest |x|, powers neither overflow nor all vanish. A NaN is passed over.
        const float top = line.template reduce<cuda::Max>(0.0f, [&](float &part, int64_t, int, float (&v)[kWidth]) {
            for (int e = 0; e < kWidth; ++e) {
                part = fmaxf(part, fabsf(v[e]));
            }
        });
        const float largest = top > 0 && top < cuda::kInfinity<float> ? top : 1.0f,
                    length = norm<kWidth>(line, a.p, largest);
        if (again) {
            unit = largest;
            denominator = length + a.eps / largest;
        }
    }
    line.visit([&](int64_t i, int count, float (&v)[kWidth]) {
        if (unit != 1) {
            for (int e = 0; e < kWidth; ++e) {
                v[e] /= unit;
            }
        }
        for (int e = 0; e < kWidth; ++e) {
            v[e] /= denominator;
        }
        cuda::store(a.y + at[1] + i * a.lines.steps[1], v, line.whole(i), count, a.lines.steps[1]);
    });
}

template <typename T> void launch(const ExecutionContext &context, const Args &args) {
    const int axis = args.axis < 0 ? args.x.ndim + args.axis : args.axis;
    const TensorView x = moved_last(args.x, axis), y = moved_last(args.y, axis);
    const TensorView *const views[] = {&x, &y};
    const Job<T> job{x.as<const T>(), y.as<T>(), cuda::Lines<2>(views, cuda::kWidth<T>), args.p,
                     static_cast<float>(args.eps)};
    cuda::with_line<T>(job.lines, [&](auto line, dim3 grid, dim3 block) {
        cuda::launch(context, norm_lines<T, typename decltype(line)::type>, grid, block, 0, job);
    });
}

void run_on_cuda(const ExecutionContext &context, const Args &args) {
    infini::cuda::with_float_type(args.x.dtype, [&](auto x) {
        if constexpr (!std::is_same_v<decltype(x), double>) {
            launch<decltype(x)>(context, args);
        }
    });
}

const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};

} // namespace
} // namespace infini::lp_norm
