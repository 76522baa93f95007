// The CUDA kernel of lp_norm: one pass over memory, with the row in registers. Rows too long for registers (16384
// halves) and rows of ColumnReducer are read twice, the second time from L2.
// Limit: memory bandwidth, 4 bytes per bf16 element; for p above 2 arithmetic, one or two multiplications per bit of p.
// SASS: norm_rows: LDG.E.128 STG.E.128
#include "cuda/launch.cuh"
#include "cuda/strided_rows.cuh"
#include "lp_norm.h"

namespace infini::lp_norm {
namespace {

template <typename T> struct Job {
    const T *x;
    T *y;
    cuda::StridedRows<2> rows;
    int64_t p;
    float eps;
};

// v^p for p >= 1.
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
template <int kWidth, typename Reducer> __device__ float norm(Reducer &reducer, int64_t p, float unit) {
    const float sum = reducer.template reduce<cuda::Sum>(0.0f, [&](float &part, int64_t, int, float (&v)[kWidth]) {
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

template <typename T, typename Reducer>
__global__ void __launch_bounds__(Reducer::kMaxThreads, 1) norm_rows(const __grid_constant__ Job<T> a) {
    cuda::grid_dependency_sync();
    constexpr int kWidth = cuda::kWidth<T>;
    INFINI_SHARED(shared, float[Reducer::kShared]);
    const int64_t number = Reducer::number();
    const bool mine = number < a.rows.starts.count; // threads without a row in the last block still reach the barriers
    int64_t at[2];
    a.rows.starts.locate(mine ? number : 0, at);
    Reducer reducer(a.x + at[0], mine ? a.rows.n : 0, a.rows, shared);

    float unit = 1, denominator = 1;
    bool again = a.p > 2;
    if (a.p <= 2) {
        const float length = norm<kWidth>(reducer, a.p, 1);
        denominator = length + a.eps;
        // The squares (or their sum) overflowed, or lost precision by underflow.
        again = mine && (length < 1e-15f || length == cuda::kInfinity<float>);
    }
    if (__syncthreads_or(again) != 0) { // asks for all rows of the block, because the code has barriers
        // Powers relative to the largest |x| do not overflow and do not all underflow. fmaxf ignores NaN.
        const float top = reducer.template reduce<cuda::Max>(0.0f, [&](float &part, int64_t, int, float (&v)[kWidth]) {
            for (int e = 0; e < kWidth; ++e) {
                part = fmaxf(part, fabsf(v[e]));
            }
        });
        const float largest = top > 0 && top < cuda::kInfinity<float> ? top : 1.0f,
                    length = norm<kWidth>(reducer, a.p, largest);
        if (again) {
            unit = largest;
            denominator = length + a.eps / largest;
        }
    }
    reducer.visit([&](int64_t i, int count, float (&v)[kWidth]) {
        if (unit != 1) {
            for (int e = 0; e < kWidth; ++e) {
                v[e] /= unit;
            }
        }
        for (int e = 0; e < kWidth; ++e) {
            v[e] /= denominator;
        }
        cuda::store(a.y + at[1] + i * a.rows.steps[1], v, reducer.whole(i), count, a.rows.steps[1]);
    });
}

template <typename T> void launch(const ExecutionContext &context, const Args &args) {
    const int axis = args.axis < 0 ? args.x.ndim + args.axis : args.axis;
    const TensorView x = moved_last(args.x, axis), y = moved_last(args.y, axis);
    const TensorView *const views[] = {&x, &y};
    const Job<T> job{x.as<const T>(), y.as<T>(), cuda::StridedRows<2>(views, cuda::kWidth<T>), args.p,
                     static_cast<float>(args.eps)};
    cuda::with_reducer<T>(job.rows, [&](auto reducer, dim3 grid, dim3 block) {
        cuda::launch(context, norm_rows<T, typename decltype(reducer)::type>, grid, block, 0, job);
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
